// PeerAsker: the calls that this node makes to others about objects that it fetches.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/peer/control/peer_calls.h"
#include "daemon/peer/control/peer_messages.h"
#include "daemon/peer/directory/directory.h"
#include "storage/executor.h"

namespace ashlar::daemon {

// Thread-safe; nothing waits. Every call is answered once, on any thread, within its deadline (nanoseconds from now):
// with UNAVAILABLE at once where the node cannot be reached and was tried a moment ago.
class PeerAsker {
 public:
  virtual ~PeerAsker() = default;

  virtual void Open(const Member& member, const std::string& tenant, PeerOpen open, storage::Nanos deadline,
                    PeerCalls::Done<std::vector<PeerOpened>> done) = 0;
  virtual void Renew(const Member& member, PeerRenew renew, storage::Nanos deadline,
                     PeerCalls::Done<std::vector<uint32_t>> done) = 0;
  // Nobody waits for it.
  virtual void Close(const Member& member, std::vector<PeerLease> leases) = 0;
};

}  // namespace ashlar::daemon
