// SPDX-License-Identifier: Apache-2.0
// UnreadDescriptors: tracks descriptors sent to engines that have not read them. The kernel counts them against the
// daemon's user until they are read or the receiving socket is gone; beyond its limit on open files it sends no more
// descriptors to any process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "absl/status/status.h"
#include "daemon/runtime/unique_fd.h"
#include "storage/tier/tier.h"

namespace ashlar::daemon {

// Used by one thread. A receiver has at most one unread descriptor. A tenant has a bounded share, which includes ended
// receivers, because their sockets may still be open in other processes.
class UnreadDescriptors {
 public:
  using Receiver = uint64_t;
  static constexpr size_t kOfASession = 2;  // a tenant's share per session that it may have

  // Returns whether the receiver may not have read the previous one.
  bool Holds(Receiver receiver);
  // RESOURCE_EXHAUSTED while `share` descriptors of the tenant are unread.
  absl::Status MaySend(storage::TenantId tenant, size_t share);
  // A descriptor was sent on `socket`, which stays open until Ended.
  void Sent(Receiver receiver, storage::TenantId tenant, int socket);
  // The receiver has ended. Its socket is kept while a descriptor is unread on it.
  void Ended(Receiver receiver, UniqueFd socket);
  // Releases descriptors that have been read. Call it periodically.
  void Sweep();

 private:
  struct Carrier {
    storage::TenantId tenant = 0;
    int socket = -1;
    UniqueFd kept;
  };
  std::map<Receiver, Carrier> carriers_;
};

}  // namespace ashlar::daemon
