// SPDX-License-Identifier: Apache-2.0
// The client library. One Client is one session with the daemon of this node; all methods are thread-safe.
//
// Errors. A cache failure is a miss: matching, landing, composing and publishing never fail a request, they return each
// segment's outcome. Only connecting, opening a model and registering memory return errors. Every call has a deadline
// (ClientOptions::timeout) and returns by then.
//
// Prefixes. A prompt that begins as an earlier one did resumes from the earlier one's checkpoint (PrefixUse). The
// engine lands the match's prefix, goes on from its states, computes the rest, and captures the states at
// Match::checkpoint_positions() and at the end of all tokens that ran through the model; then it commits these states.
// A text is exact if it began with an exact prefix or with nothing, and landed no interior; every text of the namespace
// may resume from it. Any other text is composed, and serves only the conversation that it is committed with. If an
// exact prompt landed interiors, its tokens before the first interior, the head of that interior's segment among them,
// are still exact; the engine may commit them as a text of their own, without the match.
//
// Life. The client notices the daemon's end at once. Calls then answer kDaemonUnavailable without waiting, and the
// client reconnects in the background: it opens models, registers regions and declares pages again. A region for which
// the daemon has no room waits; landings into it and publications out of it are kBusy, and the rest is served. A Match
// from before a reconnect can be used without a fault: tuples stay mapped, and its landings are misses (kLeaseLost).
// But its lease ended with the session, and a daemon that lives may have given the memory to other objects: values read
// from tuples count only if Match::valid() says so after reading. Objects may be destroyed in any order: destroying the
// Client ends all calls, but the session with the daemon, and the leases in it, stay until the last Match and Landing
// is gone.
//
// Fork. A client belongs to the process that connected it. In a child its copy refuses every call with
// FAILED_PRECONDITION (misses: kDaemonUnavailable; landings never quiesce), and destroying it there releases nothing.
// The child does not keep the session alive: the session ends with the parent. A child cannot connect either,
// because gRPC does not survive fork: it must exec first, or be forked before the parent's first Connect.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "client/session/connection.h"
#include "client/session/deadline.h"
#include "client/session/descriptor.h"
#include "client/session/model.h"
#include "client/session/options.h"
#include "client/session/reconnector.h"
#include "client/session/region.h"
#include "client/session/shared_memory.h"
#include "kernels/gpu.h"
#include "kernels/kernels.h"
#include "proto/key.h"
#include "proto/layout.h"

namespace ashlar {

class Client {
 public:
  // Connects, or says why not (UNAVAILABLE: no daemon; FAILED_PRECONDITION: no protocol version in common, or forked
  // after an earlier Connect; PERMISSION_DENIED: this user belongs to no tenant; RESOURCE_EXHAUSTED: the daemon, or the
  // tenant, has as many sessions as it may).
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const ClientOptions& options);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  bool connected() const;
  const std::string& tenant() const;

  absl::StatusOr<Model> OpenModel(const Identity& identity, const Layout& layout, const Shard& shard = {},
                                  const CostModel& cost = {}, const PrefixUse& prefixes = {});

  // Registers a memfd of the engine's (sealed with F_SEAL_SHRINK, else INVALID_ARGUMENT). The descriptor stays the
  // caller's; the client maps it too. Touch the memory before, or call fallocate: pages that are not there the daemon
  // takes out of what it has to spare, and refuses where that is not enough (RESOURCE_EXHAUSTED).
  absl::StatusOr<Region> RegisterRegion(int memfd, size_t bytes);
  // Memory that the daemon allocates for this engine. It outlives the session and the daemon, and is emptied when the
  // last copy of the Region is destroyed: processes that were forked meanwhile then read zeros there.
  absl::StatusOr<Region> HostRegion(size_t bytes);

  // Registers memory of a GPU that the daemon serves: `gpu`, for a process whose library has no back end for it; else
  // ClientOptions::gpu, or the daemon's only one. FAILED_PRECONDITION if it serves none, or not that one. All regions
  // of a client that lie on a GPU lie on the same one: a process that works on two has two clients. If an hbm tier lies
  // there, all of its regions must, and the two calls above are refused. Keys and values land in such a region,
  // published objects may lie in it, and the composition service works there, on the GPU.
  //
  // `descriptor`: an allocation of CUDA's virtual memory management (cuMemCreate) of exactly `bytes` bytes, exported as
  // a POSIX file descriptor. The engine has mapped it at `data`, and keeps owning that mapping; the client neither maps
  // nor touches it.
  absl::StatusOr<Region> RegisterGpuRegion(int descriptor, std::byte* data, size_t bytes,
                                           const kernels::GpuId& gpu = {});
  // Allocates memory on a GPU that the daemon serves, all zero, and maps it here by `gpu`, which says which; its number
  // may differ between the processes. The memory stays the engine's as long as any process has it mapped.
  absl::StatusOr<Region> HostGpuRegion(const kernels::Gpu& gpu, size_t bytes);

 private:
  explicit Client(std::shared_ptr<internal::Reconnector> reconnector) : reconnector_(std::move(reconnector)) {}
  // Makes a region of a descriptor that the daemon knows, or is about to be told of.
  absl::StatusOr<Region> Keep(internal::Descriptor memory, internal::SharedMemory place,
                              std::optional<uint64_t> hosted_id,
                              const std::shared_ptr<internal::Connection>& connection,
                              internal::Deadline deadline) const;

  const std::shared_ptr<internal::Reconnector> reconnector_;
};

}  // namespace ashlar
