// SPDX-License-Identifier: Apache-2.0
// Arrays from Python (NumPy, torch, anything with DLPack) for the engine API: never copied, always checked.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <deque>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ashlar/engine.h"
#include "client/python/src/arguments.h"

namespace ashlar::python {

using Floats = nb::ndarray<const float, nb::device::cpu>;
using MutableFloats = nb::ndarray<float, nb::device::cpu>;
using Exponents = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Strided = nb::ndarray<nb::device::cpu>;  // has any element type; need not be dense

// A list of 32-bit integers, valid while this object exists: the given memory if it is one dense row of them, otherwise
// a copy by NumPy. Buffers are tried first, which is several times as fast as DLPack. Created and destroyed with
// the GIL.
class Integers {
 public:
  Integers(const char* name, nb::handle given);
  ~Integers();
  Integers(const Integers&) = delete;
  Integers& operator=(const Integers&) = delete;

  const int32_t* data() const { return static_cast<const int32_t*>(view_.buf); }
  uint64_t size() const { return static_cast<uint64_t>(view_.len) / sizeof(int32_t); }

 private:
  bool Take(nb::handle given);
  Py_buffer view_ = {};
};

// The pages that a call passes, valid while this object exists: one list of numbers or, of a cache with `groups` groups
// of layers, a sequence of one list each. Created and destroyed with the GIL.
class PageTables {
 public:
  PageTables(const std::string& name, nb::handle given, size_t groups);

  // Sets the fields of an engine API struct to these rows. Sets nothing if None was given.
  template <typename Struct>
  void Put(Struct& out) const {
    out.page_tables = tables_.empty() ? nullptr : tables_.data();
    out.page_table_count = static_cast<uint32_t>(tables_.size());
    if (lists_.empty() || !tables_.empty()) return;
    out.page_table = lists_.front().data();
    out.page_count = lists_.front().size();
  }

 private:
  std::deque<Integers> lists_;
  std::vector<engine::PageTable> tables_;
};

// Rows of consecutive tokens, `stride` floats apart. Each row is dense.
struct RowsView {
  const float* data = nullptr;
  uint64_t tokens = 0;
  int64_t stride = 0;
};

// An object of `type`, a Python class that is or derives from the bound class of T. Calls thus return the class that
// users see, without a wrapper.
template <typename T>
std::pair<nb::object, T*> MakeObject(nb::handle type) {
  nb::object object = nb::inst_alloc(type);
  T* const value = new (nb::inst_ptr<T>(object)) T();
  nb::inst_mark_ready(object);
  return {std::move(object), value};
}

// Checks that an array is [tokens, ...] with `width` floats per token. Each token is dense, and tokens do not overlap.
template <typename Array>
RowsView RowsOf(const std::string& name, const Array& array, uint64_t width) {
  if (array.ndim() < 1) throw Refused(name, "0 dimensions; expected at least 1");
  int64_t dense = 1;
  for (size_t i = array.ndim(); i-- > 1;) {
    if (array.shape(i) > 1 && array.stride(i) != dense)
      throw Refused(name, "a token's row is not dense; expected a contiguous array");
    dense *= static_cast<int64_t>(array.shape(i));
  }
  if (static_cast<uint64_t>(dense) != width) {
    throw Refused(name, std::to_string(dense) + " floats a token; expected " + std::to_string(width));
  }
  const int64_t stride = array.shape(0) > 1 ? array.stride(0) : dense;
  if (stride > -dense && stride < dense)
    throw Refused(name, "the tokens' rows overlap; expected a stride of at least " + std::to_string(dense));
  return {array.data(), array.shape(0), stride};
}

// A Python array in its own memory, because a copy would be freed when this call ends. TypeError if it is not an array.
Strided ArrayOf(std::string_view name, nb::handle given);
// The same for one element type. Returns no array if None is given.
template <typename Array>
std::optional<Array> OptionalArray(std::string_view name, nb::handle given, std::string_view expected) {
  if (given.is_none()) return std::nullopt;
  Array array;
  if (nb::try_cast(given, array, /*convert=*/false)) return array;
  throw WrongType(name, given, expected);
}
inline std::optional<Floats> OptionalFloats(std::string_view name, nb::handle given) {
  return OptionalArray<Floats>(name, given, "an array of float32 in CPU memory");
}
inline std::optional<MutableFloats> OptionalOutput(std::string_view name, nb::handle given) {
  return OptionalArray<MutableFloats>(name, given, "an array of float32 in CPU memory that can be written");
}
inline std::optional<Exponents> OptionalExponents(std::string_view name, nb::handle given) {
  return OptionalArray<Exponents>(name, given, "a dense array of int32 in CPU memory");
}
// The element type of a tensor. Throws for a type that states cannot have.
DType TypeOf(const std::string& name, const Strided& tensor);
// Throws unless the tensor's elements are of this type of the engine API's.
void CheckType(const std::string& name, const Strided& tensor, DType type);
// The elements of a dense tensor. Throws unless it has this number of Scalar.
template <typename Scalar>
Scalar* DataOf(const std::string& name, const Strided& tensor, uint64_t elements);
// The bytes of a dense tensor of any type. Throws unless it has this number of bytes.
void* BytesOf(const std::string& name, const Strided& tensor, uint64_t bytes);
// `rows` dense runs of elements: the first dimensions of the tensor.
struct RowsOfElements {
  void* data = nullptr;
  int64_t stride = 0;  // elements from one row to the next; 0: dense
};
// Throws unless the tensor has `rows` dense rows of `width` elements at equal distances: [rows, ...], or one dimension
// of all elements.
RowsOfElements ElementRows(const std::string& name, const Strided& tensor, uint64_t rows, uint64_t width);

}  // namespace ashlar::python
