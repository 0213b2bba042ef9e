// SPDX-License-Identifier: Apache-2.0
#include "daemon/open_files.h"

#include <sys/resource.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"
#include "daemon/events/zmq_publisher.h"
#include "daemon/observe/http_server.h"
#include "daemon/peer/channels/peer_bounds.h"
#include "daemon/rpc/rpc_listener.h"
#include "daemon/session/hosted_memory.h"
#include "daemon/session/unread_descriptors.h"

namespace ashlar::daemon {
namespace {

// Sockets, polls, logs, libraries' files, and connections of unknown users, HTTP and event subscribers: all files that
// do not belong to a tenant or a peer are bounded, so that tenants always have theirs.
constexpr uint64_t kOwnFiles = 512 + HttpServer::kMaxConnections + ZmqPublisher::kConnections;
constexpr uint64_t kPerSession = 8;  // its socket, its process, and messages with descriptors in flight
// RPC connections of every user, for each possible session.
constexpr uint64_t kPerUserAndSession = RpcListener::kOfASession * RpcListener::kDescriptors;

}  // namespace

uint64_t OpenFilesNeeded(const v1::Config& config) {
  uint64_t arenas = 0;
  uint64_t hosted = 0;
  uint64_t regions = 0;  // each one keeps its memfd
  uint64_t unread = 0;   // sockets of ended sessions; the same number may be in flight
  uint64_t users = 0;
  for (const v1::Tenant& tenant : config.tenants()) {
    arenas += (tenant.dram_bytes() + config.dram().arena_bytes() - 1) / config.dram().arena_bytes();
    for (const v1::Hbm& hbm : config.hbm()) {
      arenas += (tenant.hbm_bytes() + hbm.arena_bytes() - 1) / hbm.arena_bytes();
    }
    users += tenant.uids_size();
    hosted += HostedMemory::kBlocksPerSession * tenant.max_sessions();
    regions += tenant.max_regions();
    unread += UnreadDescriptors::kOfASession * tenant.max_sessions();
  }
  return arenas + hosted + regions + unread +
         (kPerSession + kPerUserAndSession * users) * config.sessions().max_sessions() + kOwnFiles +
         PeerBounds::Of(config).files;
}

absl::Status RaiseOpenFilesLimit(const v1::Config& config) {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return absl::ErrnoToStatus(errno, "getrlimit(RLIMIT_NOFILE)");
  const uint64_t needed = OpenFilesNeeded(config);
  if (limit.rlim_max != RLIM_INFINITY && limit.rlim_max < needed) {
    return absl::FailedPreconditionError(absl::StrCat(
        "open files: the configuration may need ", needed, ", the hard limit (RLIMIT_NOFILE) is ", limit.rlim_max,
        "; raise the limit, increase dram.arena_bytes, or lower sessions.max_sessions or tenants[].max_regions"));
  }
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return absl::ErrnoToStatus(errno, "setrlimit(RLIMIT_NOFILE)");
  return absl::OkStatus();
}

}  // namespace ashlar::daemon
