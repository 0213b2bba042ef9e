// SPDX-License-Identifier: Apache-2.0
// The boundary between C and C++. Sized structs and status codes cross it, and the thread keeps the text of its last
// error; exceptions do not cross.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "ashlar/engine.h"
#include "client/c/include/ashlar.h"

// The handles. Each owns its C++ handle; a request also owns what its calls point to until it ends.
struct ashlar_cache {
  ashlar::engine::Cache cache;
};
struct ashlar_request {
  ashlar::engine::Request request;
};
struct ashlar_job {
  std::shared_ptr<void> kept;  // the call's arguments; destroyed after the job
  ashlar::engine::Job job;
};

namespace ashlar::c {

// A field that makes no sense. Becomes ASHLAR_INVALID_ARGUMENT.
class Refused : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

int32_t Fail(int32_t code, const char* message);
// ASHLAR_INVALID_ARGUMENT for an index that must be less than `count`, the number of `items`.
int32_t OutOfRange(const char* field, uint64_t index, uint64_t count, const char* items);
// The status's code; keeps the text of an error.
int32_t Report(const engine::Status& status);

// The caller's struct in this library's version: missing fields are zero.
template <typename T>
T Read(const std::string& name, const T* given) {
  if (given == nullptr) throw Refused(name + ": null");
  if (given->size < sizeof given->size) throw Refused(name + ".size: not set; set it to sizeof the struct");
  T own;
  std::memset(&own, 0, sizeof own);
  std::memcpy(&own, given, std::min(given->size, sizeof own));
  const auto* const bytes = reinterpret_cast<const char*>(given);
  for (size_t i = sizeof own; i < given->size; ++i) {
    if (bytes[i] == 0) continue;
    throw Refused(
        name + ".size: the struct is from a newer header and sets fields unknown to this library; upgrade libashlar");
  }
  return own;
}

// All structs of an array.
template <typename T>
std::vector<T> ReadAll(const std::string& name, const T* given, uint64_t count) {
  std::vector<T> all;
  if (count > 0 && given == nullptr) throw Refused(name + ": null");
  for (uint64_t i = 0; i < count; ++i) {
    const std::string element = name + "[" + std::to_string(i) + "]";
    const auto* const at = reinterpret_cast<const T*>(reinterpret_cast<const char*>(given) + i * given->size);
    if (at->size != given->size) {
      throw Refused(element + ".size: " + std::to_string(at->size) + "; expected " + std::to_string(given->size) +
                    ", the size of element 0");
    }
    all.push_back(Read(element, at));
  }
  return all;
}

// Fills as much of the caller's struct as it has.
template <typename T>
int32_t Write(const T& own, T* out) {
  if (out == nullptr) return Fail(ASHLAR_INVALID_ARGUMENT, "out: null");
  const size_t size = out->size;
  if (size < sizeof out->size) return Fail(ASHLAR_INVALID_ARGUMENT, "out.size: not set; set it to sizeof the struct");
  std::memset(out, 0, size);
  std::memcpy(out, &own, std::min(size, sizeof own));
  out->size = size;
  return ASHLAR_OK;
}

// An enumeration, which has fewer bits here than in C.
template <typename Enum>
Enum EnumOf(const std::string& name, uint32_t number) {
  if (number > std::numeric_limits<std::underlying_type_t<Enum>>::max()) {
    throw Refused(name + ": " + std::to_string(number) + " is unknown");
  }
  return static_cast<Enum>(number);
}
// The same, where 0 stands for `otherwise`.
template <typename Enum>
Enum EnumOf(const std::string& name, uint32_t number, Enum otherwise) {
  return number == 0 ? otherwise : EnumOf<Enum>(name, number);
}

// Returns the job of a started call. `kept`: what the call reads until it is over.
template <typename Call>
int32_t Start(ashlar_job** job, Call call, std::shared_ptr<void> kept = nullptr) {
  if (job == nullptr) throw Refused("job: null");
  auto handle = std::make_unique<ashlar_job>();
  handle->kept = std::move(kept);
  const int32_t code = call(&handle->job);
  if (code == ASHLAR_OK) *job = handle.release();
  return code;
}

// Runs `call`, which returns a code, and converts exceptions into codes.
template <typename Call>
int32_t Guarded(Call call) {
  try {
    return call();
  } catch (const Refused& refused) {
    return Fail(ASHLAR_INVALID_ARGUMENT, refused.what());
  } catch (const std::bad_alloc&) {
    return Fail(ASHLAR_RESOURCE_EXHAUSTED, "out of memory");
  } catch (const std::exception& error) {
    return Fail(ASHLAR_INTERNAL, error.what());
  }
}

std::vector<engine::LinearTensors> TensorsOf(const std::string& name, const ashlar_linear_tensors* given,
                                             uint32_t count);
std::vector<engine::PageTable> TablesOf(const std::string& name, const ashlar_page_table* given, uint32_t count);
std::vector<engine::Media> MediaOf(const std::string& name, const ashlar_media* given, uint64_t count);
engine::TokenRows RowsOf(const std::string& name, const ashlar_token_rows* given);
engine::State StateOf(const std::string& name, const ashlar_state* given);

}  // namespace ashlar::c
