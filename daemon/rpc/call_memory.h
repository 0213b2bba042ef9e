// SPDX-License-Identifier: Apache-2.0
// CallMemory: limits the memory of a tenant's calls that gRPC's own limit on request bytes does not cover. A request of
// many small parts is many times larger after parsing. Replies are kept by gRPC until they are read. Texts, which take
// their size once more, and the working memory of lookups are not counted.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ashlar::daemon {

// Thread-safe.
class CallMemory {
 public:
  struct Bounds {
    uint64_t requests = uint64_t{128} << 20;  // parsed requests that are not served yet
    // Bytes of unread replies. Above the first limit, only calls that release something start. Above the second, no
    // reply is sent. The space between the two is for calls that started earlier.
    uint64_t before_a_call = uint64_t{128} << 20, before_an_answer = uint64_t{512} << 20;
  };
  CallMemory() = default;
  explicit CallMemory(const Bounds& bounds) : bounds_(bounds) {}

  // Charges a request until EndRequest. Returns false, without charging, if it must not be served. A single request is
  // always allowed.
  bool HoldRequest(size_t bytes) {
    const uint64_t all = requests_ += bytes;
    if (all <= bounds_.requests || all == bytes) return true;
    requests_ -= bytes;
    return false;
  }
  void EndRequest(size_t bytes) { requests_ -= bytes; }

  bool MayBegin() const { return answers_ <= bounds_.before_a_call; }
  // Charges a reply until EndAnswer. Returns false, without charging, if it must not be sent.
  bool HoldAnswer(size_t bytes) {
    if (answers_ += bytes; answers_ <= bounds_.before_an_answer) return true;
    answers_ -= bytes;
    return false;
  }
  void EndAnswer(size_t bytes) { answers_ -= bytes; }  // the answer was read, or no client waits for it

 private:
  const Bounds bounds_ = {};
  std::atomic<uint64_t> requests_{0}, answers_{0};
};

}  // namespace ashlar::daemon
