// SPDX-License-Identifier: Apache-2.0
#include "client/python/src/arrays.h"

#include <cstring>
#include <optional>

namespace ashlar::python {
namespace {

// Throws unless NumPy's array can become one of 32-bit integers without changing a number.
void CheckNumbers(const char* name, const nb::object& array) {
  if (nb::cast<int64_t>(array.attr("size")) == 0) return;  // NumPy makes floats of an empty list
  const nb::object type = array.attr("dtype");
  const auto kind = nb::cast<char>(type.attr("kind"));
  const auto bytes = nb::cast<size_t>(type.attr("itemsize"));
  if (kind != 'i' && kind != 'u') throw Refused(name, "not a list of integers");
  if (bytes < sizeof(int32_t) || (kind == 'i' && bytes == sizeof(int32_t))) return;
  for (const char* const end : {"min", "max"}) {
    const nb::int_ number(array.attr(end)());
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    if (overflow != 0 || value < INT32_MIN || value > INT32_MAX) {
      throw Refused(name, std::string(nb::str(number).c_str()) + " has more than 32 bits");
    }
  }
}

}  // namespace

Integers::Integers(const char* name, nb::handle given) {
  if (Take(given)) return;
  // NumPy converts objects that are not such a row. The buffer keeps NumPy's array alive.
  nb::object dense;
  try {
    dense = nb::module_::import_("numpy").attr("ascontiguousarray")(given);
  } catch (const nb::python_error& error) {  // lists of different lengths, for example
    if (!error.matches(PyExc_ValueError) && !error.matches(PyExc_TypeError)) throw;
    throw Refused(name, "not a list of integers");
  }
  CheckNumbers(name, dense);
  if (!Take(dense.attr("astype")("int32"))) throw Refused(name, "not a list of integers");
}

Integers::~Integers() {
  PyBuffer_Release(&view_);
}

bool Integers::Take(nb::handle given) {
  if (!PyObject_CheckBuffer(given.ptr())) return false;
  if (PyObject_GetBuffer(given.ptr(), &view_, PyBUF_ND | PyBUF_FORMAT) != 0) {
    PyErr_Clear();
    view_ = {};
    return false;
  }
  if (view_.ndim == 1 && view_.itemsize == sizeof(int32_t) && view_.format != nullptr &&
      std::strcmp(view_.format, "i") == 0) {
    return true;
  }
  PyBuffer_Release(&view_);
  view_ = {};
  return false;
}

PageTables::PageTables(const std::string& name, nb::handle given, size_t groups) {
  if (given.is_none()) return;
  if (groups == 0) {
    lists_.emplace_back(name.c_str(), given);
    return;
  }
  if (!PySequence_Check(given.ptr())) throw Refused(name, "expected one list of integers for each group of layers");
  for (const nb::handle list : nb::borrow<nb::sequence>(given)) {
    const std::string field = name + "[" + std::to_string(lists_.size()) + "]";
    const Integers& pages = lists_.emplace_back(field.c_str(), list);
    tables_.push_back({pages.data(), pages.size()});
  }
}

namespace {

std::string NameOf(const nb::dlpack::dtype& type) {
  using Code = nb::dlpack::dtype_code;
  const auto code = static_cast<Code>(type.code);
  const char* const kind = code == Code::Float    ? "float"
                           : code == Code::Bfloat ? "bfloat"
                           : code == Code::Int    ? "int"
                           : code == Code::UInt   ? "uint"
                                                  : "another type of bits: ";
  return kind + std::to_string(type.bits);
}

bool IsDense(const Strided& tensor) {
  int64_t dense = 1;
  for (size_t i = tensor.ndim(); i-- > 0;) {
    if (tensor.shape(i) > 1 && tensor.stride(i) != dense) return false;
    dense *= static_cast<int64_t>(tensor.shape(i));
  }
  return true;
}

}  // namespace

Strided ArrayOf(std::string_view name, nb::handle given) {
  Strided array;
  if (nb::try_cast(given, array, /*convert=*/false)) return array;
  throw WrongType(name, given, "an array in CPU memory that can be written");
}

DType TypeOf(const std::string& name, const Strided& tensor) {
  const nb::dlpack::dtype type = tensor.dtype();
  const auto code = static_cast<nb::dlpack::dtype_code>(type.code);
  if (code == nb::dlpack::dtype_code::Float && type.bits == 32) return DType::kF32;
  if (code == nb::dlpack::dtype_code::Float && type.bits == 16) return DType::kF16;
  if (code == nb::dlpack::dtype_code::Bfloat && type.bits == 16) return DType::kBF16;
  throw Refused(name, "expected an array of float32, float16 or bfloat16");
}

void CheckType(const std::string& name, const Strided& tensor, DType type) {
  const char* const needed = type == DType::kF32 ? "float32" : type == DType::kF16 ? "float16" : "bfloat16";
  if (TypeOf(name, tensor) != type) throw Refused(name, NameOf(tensor.dtype()) + "; expected " + needed);
}

template <typename Scalar>
Scalar* DataOf(const std::string& name, const Strided& tensor, uint64_t elements) {
  if (tensor.dtype() != nb::dtype<Scalar>()) {
    throw Refused(name, NameOf(tensor.dtype()) + "; expected " + NameOf(nb::dtype<Scalar>()));
  }
  if (tensor.size() != elements) {
    throw Refused(name, std::to_string(tensor.size()) + " elements; expected " + std::to_string(elements));
  }
  if (!IsDense(tensor)) throw Refused(name, "not dense");
  return static_cast<Scalar*>(tensor.data());
}

void* BytesOf(const std::string& name, const Strided& tensor, uint64_t bytes) {
  const uint64_t given = tensor.itemsize() * tensor.size();
  if (given != bytes) throw Refused(name, std::to_string(given) + " bytes; expected " + std::to_string(bytes));
  if (!IsDense(tensor)) throw Refused(name, "not dense");
  return tensor.data();
}

template float* DataOf(const std::string& name, const Strided& tensor, uint64_t elements);
template int32_t* DataOf(const std::string& name, const Strided& tensor, uint64_t elements);

RowsOfElements ElementRows(const std::string& name, const Strided& tensor, uint64_t rows, uint64_t width) {
  if (tensor.size() != rows * width) {
    throw Refused(name, std::to_string(tensor.size()) + " elements; expected " + std::to_string(rows * width));
  }
  // Starting with the last dimension: dense up to a row's width, and one stride after that.
  int64_t dense = 1;
  size_t i = tensor.ndim();
  for (; i > 0 && dense < static_cast<int64_t>(width); --i) {
    if (tensor.shape(i - 1) > 1 && tensor.stride(i - 1) != dense) throw Refused(name, "a head, or row, is not dense");
    dense *= static_cast<int64_t>(tensor.shape(i - 1));
  }
  if (dense == static_cast<int64_t>(rows * width)) return {tensor.data(), 0};
  if (dense != static_cast<int64_t>(width))
    throw Refused(name, "its last dimensions have " + std::to_string(dense) + " elements; expected " +
                            std::to_string(width) + ", the size of a row");
  std::optional<int64_t> stride;
  int64_t next = 0;
  for (; i > 0; --i) {
    if (tensor.shape(i - 1) == 1) continue;
    if (!stride.has_value()) stride = next = tensor.stride(i - 1);
    if (tensor.stride(i - 1) != next) throw Refused(name, "the strides between its rows differ; expected one stride");
    next *= static_cast<int64_t>(tensor.shape(i - 1));
  }
  if (stride.value_or(0) < static_cast<int64_t>(width))
    throw Refused(name, "its rows overlap; expected a stride of at least " + std::to_string(width));
  return {tensor.data(), *stride == static_cast<int64_t>(width) ? 0 : *stride};
}

}  // namespace ashlar::python
