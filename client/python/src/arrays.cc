#include "client/python/src/arrays.h"

#include <new>

namespace ashlar::python {

DType TypeOf(const std::string& name, const Tensor& tensor) {
  const nb::dlpack::dtype type = tensor.dtype();
  const auto code = static_cast<nb::dlpack::dtype_code>(type.code);
  if (code == nb::dlpack::dtype_code::Float && type.bits == 32) return DType::kF32;
  if (code == nb::dlpack::dtype_code::Float && type.bits == 16) return DType::kF16;
  if (code == nb::dlpack::dtype_code::Bfloat && type.bits == 16) return DType::kBF16;
  throw Refused(name, "neither float32, float16 nor bfloat16");
}

void* DataOf(const std::string& name, const Tensor& tensor, uint64_t elements) {
  if (tensor.size() == elements) return tensor.data();
  throw Refused(name, std::to_string(tensor.size()) + " elements, not " + std::to_string(elements));
}

engine::Code Checked(const engine::Status& status) {
  using engine::Code;
  switch (status.code) {
    case Code::kOk:
    case Code::kPending:
    case Code::kRestart:
    case Code::kOtherPages:
      return status.code;
    case Code::kInvalidArgument:
      throw nb::value_error(status.message);
    case Code::kResourceExhausted:
      PyErr_SetString(PyExc_MemoryError, status.message);
      throw nb::python_error();
    case Code::kPermissionDenied:
      PyErr_SetString(PyExc_PermissionError, status.message);
      throw nb::python_error();
    case Code::kUnavailable:
      PyErr_SetString(PyExc_ConnectionError, status.message);
      throw nb::python_error();
    default:
      PyErr_SetString(PyExc_RuntimeError, status.message);
      throw nb::python_error();
  }
}

}  // namespace ashlar::python
