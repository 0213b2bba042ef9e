// SPDX-License-Identifier: Apache-2.0
// The client library. One Client is one session with the daemon of this node; all methods are thread-safe.
//
// Errors. A cache failure is a miss: matching, landing, composing and publishing never fail a request, they return each
// segment's outcome. Only connecting, opening a model and registering memory return errors. Every call has a deadline
// (ClientOptions::timeout) and returns by then.
//
// Prefixes. A prompt that shares a prefix with an earlier one resumes from the earlier one's checkpoint (PrefixUse).
// The engine lands the match's prefix, continues from its states, computes the rest, and captures the states at
// Match::checkpoint_positions() and at the end of all tokens that ran through the model; then it commits these states.
// A text is exact if it resumed from an exact prefix or from none, and landed no interior; every text of the namespace
// may resume from it. Any other text is composed, and serves only the conversation of its commit. If an exact prompt
// landed interiors, its tokens before the first interior, including the head of that interior's segment, are still
// exact; the engine may commit them as a separate text, without the match.
//
// Lifetime. The client detects at once that the daemon has ended. Calls then return kDaemonUnavailable without waiting,
// and the client reconnects in the background: it opens models, registers regions and declares pages again. If the
// daemon has no space for a region, landings into it and publications from it are kBusy until it has; everything else
// is served. Using a Match from before a reconnect is safe: tuples stay mapped, and its landings are misses
// (kLeaseLost). But its lease ended with the session, and a running daemon may have reused the memory for other
// objects: values read from tuples are valid only if Match::valid() returns true after reading. Objects may be
// destroyed in any order: destroying the Client ends all calls, but the session with the daemon, and the leases in it,
// stay until the last Match and Landing is gone.
//
// Fork. A client belongs to the process that connected it. In a child its copy refuses every call with
// FAILED_PRECONDITION (misses: kDaemonUnavailable; landings never quiesce), and destroying it releases nothing. The
// session ends with the parent, even if the child lives. A child cannot connect, because gRPC does not survive fork: it
// must exec first, or be forked before the parent's first Connect.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/session/connection.h"
#include "client/session/deadline.h"
#include "client/session/descriptor.h"
#include "client/session/model.h"
#include "client/session/options.h"
#include "client/session/probe.h"
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
  // Connects. UNAVAILABLE: no daemon. FAILED_PRECONDITION: no common protocol version, or forked after an earlier
  // Connect. PERMISSION_DENIED: this user belongs to no tenant. RESOURCE_EXHAUSTED: the daemon or the tenant has
  // reached its limit of sessions.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const ClientOptions& options);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  bool connected() const;
  const std::string& tenant() const;

  absl::StatusOr<Model> OpenModel(const Identity& identity, const Layout& layout, const Shard& shard = {},
                                  const CostModel& cost = {}, const PrefixUse& prefixes = {});

  // Estimates how much of a prompt the node, and with `cluster` its cluster's other nodes, have cached and how busy
  // they are: for routers. `cheapest` is the index of the node where its first token is expected first. NOT_FOUND: no
  // engine of the tenant has opened the model on this node. UNIMPLEMENTED: the daemon is too old.
  absl::StatusOr<std::vector<NodeProbe>> Probe(const ProbedModel& model, const Prompt& prompt, bool cluster,
                                               uint32_t* cheapest);

  // Registers a memfd of the engine, sealed with F_SEAL_SHRINK (otherwise INVALID_ARGUMENT). The caller keeps the
  // descriptor; the client maps it too. Touch the memory or call fallocate before: the daemon allocates missing pages
  // from its spare memory, and refuses if that is not enough (RESOURCE_EXHAUSTED).
  absl::StatusOr<Region> RegisterRegion(int memfd, size_t bytes);
  // CPU memory that the daemon allocates for this engine. It outlives the session and the daemon, and is emptied when
  // the last copy of the Region is destroyed; forked children then read zeros there.
  absl::StatusOr<Region> HostRegion(size_t bytes);

  // Registers memory of a GPU that the daemon serves: `gpu`, for a process whose library has no back end for it;
  // otherwise ClientOptions::gpu, or the daemon's only GPU. FAILED_PRECONDITION if the daemon does not serve the GPU.
  // All GPU regions of a client are on one GPU: a process that uses two GPUs has two clients. If that GPU has an hbm
  // tier, all regions of the client must be on it, and the calls above are refused for CPU memory. Keys and values land
  // in such a region, objects are published from it, and the composition service works in it, on the GPU.
  //
  // `descriptor`: a CUDA virtual memory allocation (cuMemCreate) of exactly `bytes` bytes, exported as a POSIX file
  // descriptor. The engine has mapped it at `data`, and owns that mapping; the client neither maps nor accesses it.
  absl::StatusOr<Region> RegisterGpuRegion(int descriptor, std::byte* data, size_t bytes,
                                           const kernels::GpuId& gpu = {});

 private:
  explicit Client(std::shared_ptr<internal::Reconnector> reconnector) : reconnector_(std::move(reconnector)) {}
  // Creates a region of a descriptor that the daemon knows or will be told of.
  absl::StatusOr<Region> Keep(internal::Descriptor memory, internal::SharedMemory place,
                              std::optional<uint64_t> hosted_id,
                              const std::shared_ptr<internal::Connection>& connection,
                              internal::Deadline deadline) const;

  const std::shared_ptr<internal::Reconnector> reconnector_;
};

}  // namespace ashlar
