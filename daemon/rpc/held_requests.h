// HeldRequests: bounds what a tenant's requests take from their parsing until they have been served. gRPC's memory for
// requests counts their bytes, and only until they are parsed; one of many small parts is then many times as large.
// What a look-up works with beside its request is not counted.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ashlar::daemon {

// Thread-safe.
class HeldRequests {
 public:
  static constexpr uint64_t kMost = uint64_t{128} << 20;

  // A request takes so many bytes. False: it is not to be served, and does not count. One alone always is.
  bool Add(size_t bytes) {
    const uint64_t all = bytes_ += bytes;
    if (all <= kMost || all == bytes) return true;
    bytes_ -= bytes;
    return false;
  }
  void Remove(size_t bytes) { bytes_ -= bytes; }

 private:
  std::atomic<uint64_t> bytes_{0};
};

}  // namespace ashlar::daemon
