// SPDX-License-Identifier: Apache-2.0
#include "client/python/src/arguments.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

namespace ashlar::python {
namespace {

std::string Printed(nb::handle number) {
  const std::string text = nb::str(number).c_str();
  return text.size() <= 40 ? text : text.substr(0, 37) + "...";
}

// Throws for bool and for values that are not integers.
nb::object Index(std::string_view name, nb::handle given) {
  if (PyBool_Check(given.ptr()) || PyIndex_Check(given.ptr()) == 0) throw WrongType(name, given, "a whole number");
  PyObject* const index = PyNumber_Index(given.ptr());
  if (index == nullptr) {  // an array, for example
    PyErr_Clear();
    throw WrongType(name, given, "a whole number");
  }
  return nb::steal(index);
}

std::invalid_argument OutOfRange(std::string_view name, nb::handle number, const std::string& least,
                                 const std::string& most) {
  return Refused(name, Printed(number) + " is out of range; expected " + least + " to " + most);
}

}  // namespace

nb::builtin_exception WrongType(std::string_view name, nb::handle given, std::string_view expected) {
  const std::string type = given.is_none() ? "None" : nb::cast<std::string>(given.type().attr("__name__"));
  return nb::type_error((std::string(name) + ": " + type + " was given; expected " + std::string(expected)).c_str());
}

std::string At(std::string_view name, size_t index) {
  return std::string(name) + "[" + std::to_string(index) + "]";
}

int64_t WholeBetween(std::string_view name, nb::handle given, int64_t least, int64_t most) {
  const nb::object index = Index(name, given);
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0 || value < least || value > most) {
    throw OutOfRange(name, index, std::to_string(least), std::to_string(most));
  }
  return value;
}

uint64_t WholeUpTo(std::string_view name, nb::handle given, uint64_t most) {
  const nb::object index = Index(name, given);
  const uint64_t value = PyLong_AsUnsignedLongLong(index.ptr());
  if (value == UINT64_MAX && PyErr_Occurred() != nullptr) {  // negative, or wider than 64 bits
    PyErr_Clear();
  } else if (value <= most) {
    return value;
  }
  throw OutOfRange(name, index, "0", std::to_string(most));
}

double Real(std::string_view name, nb::handle given) {
  const double value = PyBool_Check(given.ptr()) ? -1.0 : PyFloat_AsDouble(given.ptr());
  if (value == -1.0 && (PyBool_Check(given.ptr()) || PyErr_Occurred() != nullptr)) {
    PyErr_Clear();
    throw WrongType(name, given, "a number");
  }
  if (!std::isfinite(value)) throw Refused(name, Printed(given) + " is not finite");
  return value;
}

bool Flag(std::string_view name, nb::handle given) {
  if (PyBool_Check(given.ptr())) return given.ptr() == Py_True;
  const std::string type = nb::cast<std::string>(given.type().attr("__name__"));
  if (type != "bool_" && type != "bool") throw WrongType(name, given, "a bool");
  return PyObject_IsTrue(given.ptr()) == 1;
}

std::string Text(std::string_view name, nb::handle given) {
  if (!PyUnicode_Check(given.ptr())) throw WrongType(name, given, "a str");
  Py_ssize_t bytes = 0;
  const char* const text = PyUnicode_AsUTF8AndSize(given.ptr(), &bytes);
  if (text == nullptr) {
    PyErr_Clear();
    throw Refused(name, "contains characters that UTF-8 cannot encode");
  }
  if (std::find(text, text + bytes, '\0') != text + bytes) throw Refused(name, "contains a null character");
  return {text, static_cast<size_t>(bytes)};
}

std::string Path(std::string_view name, nb::handle given) {
  PyObject* encoded = nullptr;
  if (PyUnicode_FSConverter(given.ptr(), &encoded) == 0) {
    const bool value = PyErr_ExceptionMatches(PyExc_ValueError) != 0;
    PyErr_Clear();
    if (value) throw Refused(name, "contains a null character");
    throw WrongType(name, given, "a path: str or os.PathLike");
  }
  const nb::object path = nb::steal(encoded);
  return {PyBytes_AsString(path.ptr()), static_cast<size_t>(PyBytes_Size(path.ptr()))};  // stable ABI
}

std::string Bytes(std::string_view name, nb::handle given) {
  Py_buffer view = {};
  const bool plain = !PyUnicode_Check(given.ptr()) && PyObject_CheckBuffer(given.ptr()) != 0;
  if (!plain || PyObject_GetBuffer(given.ptr(), &view, PyBUF_SIMPLE) != 0) {
    PyErr_Clear();
    throw WrongType(name, given, "bytes");
  }
  std::string bytes(static_cast<const char*>(view.buf), static_cast<size_t>(view.len));
  PyBuffer_Release(&view);
  return bytes;
}

nb::list Elements(std::string_view name, nb::handle given, std::string_view expected) {
  const bool text = PyUnicode_Check(given.ptr()) || PyBytes_Check(given.ptr());
  PyObject* const list = text ? nullptr : PySequence_List(given.ptr());
  if (list != nullptr) return nb::steal<nb::list>(list);
  if (!text && PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw nb::python_error();  // the iterable's own
  PyErr_Clear();
  throw WrongType(name, given, expected);
}

void CheckClass(std::string_view name, nb::handle given, const char* module, const char* type) {
  const nb::object wanted = nb::module_::import_(module).attr(type);
  const int is = PyObject_IsInstance(given.ptr(), wanted.ptr());
  if (is < 0) throw nb::python_error();
  if (is == 0) throw WrongType(name, given, std::string("ashlar.") + type);
}

int MemberOf(std::string_view name, nb::handle given, const char* module, const char* type) {
  CheckClass(name, given, module, type);
  return nb::cast<int>(given.attr("value"));
}

namespace {

// Fields of the engine API that the package's calls lack or name differently. Fields of a plan are `plan` in Python,
// except the two fields that are separate arguments.
constexpr std::array<std::pair<std::string_view, std::string_view>, 14> kStructs{{{"prompts", ""},
                                                                                  {"look_again", ""},
                                                                                  {"move", ""},
                                                                                  {"texts", ""},
                                                                                  {"text", ""},
                                                                                  {"plans", "plan"},
                                                                                  {"memory", ""},
                                                                                  {"alone", ""},
                                                                                  {"advance", ""},
                                                                                  {"inputs", ""},
                                                                                  {"run", "missing"},
                                                                                  {"layout", ""},
                                                                                  {"identity", ""},
                                                                                  {"options", ""}}};
constexpr std::array<std::pair<std::string_view, std::string_view>, 21> kFields{
    {{"segment_lengths", "segments"},
     {"rotary_shift_count", "rotary_shifts"},
     {"segment_count", "segments"},
     {"token_count", "tokens"},
     {"page_tables", "page_table"},
     {"page_table_count", "page_table"},
     {"page_count", "page_table"},
     {"checkpoint_count", "checkpoints"},
     {"linear_count", "linear"},
     {"media_count", "media"},
     {"salt_bytes", "salt"},
     {"group_count", "groups"},
     {"layer_count", "layers"},
     {"place_count", "places"},
     {"copy_count", "copies"},
     {"kind", "memory_kind"},
     {"bytes", "memory_bytes"},
     {"gpu_data", "gpu_address"},
     {"timeout", "timeout_ms"},
     {"rotary_dim", "frequencies"},
     {"ns", "namespace"}}};

// Calls that texts of errors name.
constexpr std::array<std::pair<std::string_view, std::string_view>, 6> kCalls{
    {{"Admit", "admit"},
     {"TakeQuiescedPages", "take_quiesced_pages"},
     {"LookAgain", "look_again"},
     {"Finish", "finish"},
     {"Move", "move"},
     {"missing()", "missing"}}};

std::string WithPythonsCalls(std::string text) {
  for (const auto& [from, to] : kCalls) {
    for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
      text.replace(at, from.size(), to);
    }
  }
  return text;
}

template <size_t count>
std::optional<std::string_view> Find(const std::array<std::pair<std::string_view, std::string_view>, count>& table,
                                     std::string_view name) {
  for (const auto& [from, to] : table) {
    if (from == name) return to;
  }
  return std::nullopt;
}

}  // namespace

std::string InPythonsNames(std::string_view message) {
  const size_t end = message.find(": ");
  const std::string_view path = message.substr(0, end);
  if (end == std::string_view::npos || path.find(' ') != std::string_view::npos) {
    return WithPythonsCalls(std::string(message));
  }
  std::vector<std::string> parts;
  bool of_memory = false, of_rows = false;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t dot = std::min(path.find('.', begin), path.size());
    const std::string_view part = path.substr(begin, dot - begin);
    begin = dot + 1;
    const std::string_view name = part.substr(0, part.find('['));
    const bool last = begin > path.size();
    const std::optional<std::string_view> of = last ? std::nullopt : Find(kStructs, name);
    if (of.has_value()) {
      of_memory |= name == "memory";
      of_rows |= name == "inputs";
      if (!of->empty()) parts.emplace_back(*of);
      continue;
    }
    std::string_view renamed = Find(kFields, name).value_or(name);
    const bool ambiguous = name == "kind" || name == "bytes";  // only the memory's fields have these names
    if (ambiguous && !of_memory) renamed = name;
    if (of_rows && name == "tokens") renamed = "k";
    const std::string_view index = part.substr(name.size());
    if (name == "computed" || name == "missing") {  // a run in a list of runs has an index
      if (!index.empty()) parts.push_back("runs" + std::string(index));
      if (name == "missing") parts.emplace_back(name);
      continue;
    }
    parts.push_back(std::string(renamed) + std::string(index));
  }
  const bool apart = parts.size() > 1 && (parts[1].starts_with("present_tokens") ||
                                          parts[1].starts_with("page_table") || parts[1].starts_with("rotary_shifts"));
  if (apart && parts[0] == "plan") parts.erase(parts.begin());
  std::string renamed;
  for (const std::string& part : parts) renamed += (renamed.empty() ? "" : ".") + part;
  return renamed + WithPythonsCalls(std::string(message.substr(end)));
}

namespace {

PyObject* TypeOf(engine::Code code) {
  switch (code) {
    case engine::Code::kInvalidArgument:
      return PyExc_ValueError;
    case engine::Code::kResourceExhausted:
      return PyExc_MemoryError;
    case engine::Code::kPermissionDenied:
      return PyExc_PermissionError;
    case engine::Code::kUnavailable:
      return PyExc_ConnectionError;
    default:
      return PyExc_RuntimeError;
  }
}

}  // namespace

engine::Code Checked(const engine::Status& status) {
  using engine::Code;
  for (const Code fine : {Code::kOk, Code::kPending, Code::kRestart, Code::kOtherPages, Code::kNoPages}) {
    if (status.code == fine) return status.code;
  }
  PyErr_SetString(TypeOf(status.code), InPythonsNames(status.message).c_str());
  throw nb::python_error();
}

// For the package's own functions, which read their arguments like the module does.
void BindArguments(nb::module_& module) {
  module.def(
      "whole",
      [](const std::string& name, nb::handle given, int64_t least, int64_t most) {
        return WholeBetween(name, given, least, most);
      },
      nb::arg("name"), nb::arg("given").none(), nb::arg("least") = 0, nb::arg("most") = INT64_MAX,
      nb::sig("def whole(name: str, given: object, least: int = 0, most: int = ...) -> int"));
  module.def(
      "real", [](const std::string& name, nb::handle given) { return Real(name, given); }, nb::arg("name"),
      nb::arg("given").none(), nb::sig("def real(name: str, given: object) -> float"));
  module.def(
      "text", [](const std::string& name, nb::handle given) { return Text(name, given); }, nb::arg("name"),
      nb::arg("given").none(), nb::sig("def text(name: str, given: object) -> str"));
}

}  // namespace ashlar::python
