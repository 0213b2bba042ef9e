// SPDX-License-Identifier: Apache-2.0
#include "daemon/session/unread_descriptors.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ashlar::daemon {
namespace {

// Returns whether the peer of a Unix socket has unread messages. SIOCOUTQ counts socket-buffer memory, at least
// kLeastMessage per message, and may report 1 byte while the last message is being read.
bool Unread(int socket) {
  constexpr int kLeastMessage = 128;
  int bytes = 0;
  return ioctl(socket, SIOCOUTQ, &bytes) == 0 && bytes >= kLeastMessage;
}

}  // namespace

bool UnreadDescriptors::Holds(Receiver receiver) {
  const auto found = carriers_.find(receiver);
  if (found == carriers_.end()) return false;
  if (Unread(found->second.socket)) return true;
  carriers_.erase(found);
  return false;
}

absl::Status UnreadDescriptors::MaySend(storage::TenantId tenant, size_t share) {
  const auto unread = [&] {
    return static_cast<size_t>(
        std::ranges::count_if(carriers_, [&](const auto& entry) { return entry.second.tenant == tenant; }));
  };
  if (unread() < share) return absl::OkStatus();
  Sweep();
  if (unread() < share) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("descriptors: the tenant's engines have ", share, " unread descriptors; read them and try again"));
}

void UnreadDescriptors::Sent(Receiver receiver, storage::TenantId tenant, int socket) {
  carriers_[receiver] = {.tenant = tenant, .socket = socket, .kept = {}};
}

void UnreadDescriptors::Ended(Receiver receiver, UniqueFd socket) {
  if (Holds(receiver)) carriers_.at(receiver).kept = std::move(socket);
}

void UnreadDescriptors::Sweep() {
  std::erase_if(carriers_, [](const auto& entry) { return !Unread(entry.second.socket); });
}

}  // namespace ashlar::daemon
