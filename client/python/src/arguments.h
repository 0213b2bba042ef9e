// SPDX-License-Identifier: Apache-2.0
// Arguments from Python, read by name. A value that cannot be taken raises TypeError (another type) or ValueError (out
// of range), whose message begins with the argument's name.
#pragma once

#include <nanobind/nanobind.h>

#include <concepts>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "ashlar/engine.h"

namespace ashlar::python {

namespace nb = nanobind;

// A ValueError: "name: why".
inline std::invalid_argument Refused(std::string_view name, std::string_view why) {
  return std::invalid_argument(std::string(name) + ": " + std::string(why));
}
// A TypeError: "name: a str; expected …".
nb::builtin_exception WrongType(std::string_view name, nb::handle given, std::string_view expected);

// "name[3]"
std::string At(std::string_view name, size_t index);

// An int, or any object with __index__ (NumPy's integers). Not bool.
int64_t WholeBetween(std::string_view name, nb::handle given, int64_t least, int64_t most);
uint64_t WholeUpTo(std::string_view name, nb::handle given, uint64_t most);
template <std::unsigned_integral T>
T Whole(std::string_view name, nb::handle given) {
  return static_cast<T>(WholeUpTo(name, given, std::numeric_limits<T>::max()));
}
// A finite number: an int, a float, or an object with __float__. Not bool.
double Real(std::string_view name, nb::handle given);
// A bool of Python or NumPy.
bool Flag(std::string_view name, nb::handle given);
std::string Text(std::string_view name, nb::handle given);
// str, bytes or os.PathLike.
std::string Path(std::string_view name, nb::handle given);
// bytes, bytearray or memoryview.
std::string Bytes(std::string_view name, nb::handle given);
// A list of the elements of any sequence or iterable. Not of str and bytes.
nb::list Elements(std::string_view name, nb::handle given, std::string_view expected);

template <std::unsigned_integral T>
std::vector<T> WholeNumbers(std::string_view name, nb::handle given) {
  std::vector<T> numbers;
  for (const nb::handle number : Elements(name, given, "a sequence of whole numbers")) {
    numbers.push_back(static_cast<T>(WholeUpTo(At(name, numbers.size()), number, std::numeric_limits<T>::max())));
  }
  return numbers;
}
template <std::floating_point T>
std::vector<T> RealNumbers(std::string_view name, nb::handle given) {
  std::vector<T> numbers;
  for (const nb::handle number : Elements(name, given, "a sequence of numbers")) {
    const double value = PyFloat_AsDouble(number.ptr());
    if (value == -1.0 && PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      throw WrongType(At(name, numbers.size()), number, "a number");
    }
    numbers.push_back(static_cast<T>(value));
  }
  return numbers;
}

// Checks for one of the package's own classes ("ashlar.model", "Rope").
void CheckClass(std::string_view name, nb::handle given, const char* module, const char* type);
// A member of one of the package's enumerations.
int MemberOf(std::string_view name, nb::handle given, const char* module, const char* type);
// A bound object.
template <typename T>
T& Bound(std::string_view name, nb::handle given, const char* expected) {
  if (!nb::isinstance<T>(given)) throw WrongType(name, given, expected);
  return *nb::cast<T*>(given);
}

// Throws the Python exception for the error: ValueError, ConnectionError, MemoryError, PermissionError, RuntimeError.
// Returns kOk, kPending, kRestart and kOtherPages, which are not errors. Replaces the engine API's field names by the
// package's argument names.
engine::Code Checked(const engine::Status& status);
// "prompts[0].segment_lengths[2]: …" is Python's "segments[2]: …".
std::string InPythonsNames(std::string_view message);

// An argument that the bound function reads by name itself, because nanobind's own errors list signatures. An omitted
// argument is None, and refused as None if it is required.
inline auto Any(const char* name) {
  return nb::arg(name).none() = nb::none();
}

void BindArguments(nb::module_& module);

}  // namespace ashlar::python
