// UnreadReplies: bounds what a tenant's engines have been answered and do not read. gRPC keeps answers until they are
// read, and does not count them as it counts requests.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ashlar::daemon {

// Thread-safe.
class UnreadReplies {
 public:
  // Beyond the first bound no call is begun but those that give something back, beyond the second none is answered:
  // between them is room for what was begun before.
  static constexpr uint64_t kBeforeACall = uint64_t{128} << 20, kBeforeAnAnswer = uint64_t{512} << 20;

  bool MayBegin() const { return bytes_ <= kBeforeACall; }
  // An answer of so many bytes is there. False: it is not to be sent, and does not count.
  bool Add(size_t bytes) {
    if (bytes_ += bytes; bytes_ <= kBeforeAnAnswer) return true;
    bytes_ -= bytes;
    return false;
  }
  // It has been read, or nobody waits for it any more.
  void Remove(size_t bytes) { bytes_ -= bytes; }

  uint64_t bytes() const { return bytes_; }

 private:
  std::atomic<uint64_t> bytes_{0};
};

}  // namespace ashlar::daemon
