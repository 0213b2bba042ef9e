// PeerAsker: the calls that this node makes to others, as the modules that make them need them.
#pragma once

#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/peer/directory/directory.h"
#include "storage/executor.h"

namespace ashlar::v1 {
class PeerCloseRequest;
class PeerOpenReply;
class PeerOpenRequest;
class PeerRenewReply;
class PeerRenewRequest;
}  // namespace ashlar::v1

namespace ashlar::daemon {

// Thread-safe; nothing waits. Every call is answered once, on any thread, within its deadline (nanoseconds from now):
// with UNAVAILABLE at once where the node cannot be reached and was tried a moment ago.
class PeerAsker {
 public:
  virtual ~PeerAsker() = default;
  template <typename Reply>
  using Answer = std::function<void(absl::StatusOr<Reply>)>;

  virtual void Open(const Member& member, const v1::PeerOpenRequest& request, storage::Nanos deadline,
                    Answer<v1::PeerOpenReply> answer) = 0;
  virtual void Renew(const Member& member, const v1::PeerRenewRequest& request, storage::Nanos deadline,
                     Answer<v1::PeerRenewReply> answer) = 0;
  // Nobody waits for it.
  virtual void Close(const Member& member, const v1::PeerCloseRequest& request) = 0;
};

}  // namespace ashlar::daemon
