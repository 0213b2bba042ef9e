// SPDX-License-Identifier: Apache-2.0
// CallMemory: bounds what a tenant's calls take beside gRPC's own bound on the bytes of requests. One of many small
// parts is many times as large once it is parsed; texts are as large again as their bytes, and not counted. Answers
// gRPC keeps until they are read, and does not count. What a look-up works with beside its request is not counted
// either.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ashlar::daemon {

// Thread-safe.
class CallMemory {
 public:
  struct Bounds {
    uint64_t requests = uint64_t{128} << 20;  // parsed, and not served yet
    // Answers that are not read: beyond the first no call is begun but those that give something back, beyond the
    // second none is answered. Between them is room for what was begun before.
    uint64_t before_a_call = uint64_t{128} << 20, before_an_answer = uint64_t{512} << 20;
  };
  CallMemory() = default;
  explicit CallMemory(const Bounds& bounds) : bounds_(bounds) {}

  // A request takes so many bytes until EndRequest. False: it is not to be served, and does not count. One alone always
  // is.
  bool HoldRequest(size_t bytes) {
    const uint64_t all = requests_ += bytes;
    if (all <= bounds_.requests || all == bytes) return true;
    requests_ -= bytes;
    return false;
  }
  void EndRequest(size_t bytes) { requests_ -= bytes; }

  bool MayBegin() const { return answers_ <= bounds_.before_a_call; }
  // An answer takes so many bytes until EndAnswer. False: it is not to be sent, and does not count.
  bool HoldAnswer(size_t bytes) {
    if (answers_ += bytes; answers_ <= bounds_.before_an_answer) return true;
    answers_ -= bytes;
    return false;
  }
  void EndAnswer(size_t bytes) { answers_ -= bytes; }  // read, or nobody waits for it any more

 private:
  const Bounds bounds_ = {};
  std::atomic<uint64_t> requests_{0}, answers_{0};
};

}  // namespace ashlar::daemon
