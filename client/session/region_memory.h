// SPDX-License-Identifier: Apache-2.0
// RegionMemory: one region of memory that engine and daemon share, and the daemon's number for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/session/connection.h"
#include "client/session/descriptor.h"
#include "client/session/reconnector.h"
#include "client/session/shared_memory.h"
#include "kernels/mutex.h"

namespace ashlar::internal {

// Thread-safe. Process-bound. Destroying it tells the daemon to drop the region.
class RegionMemory : public Restorable {
 public:
  RegionMemory(Descriptor descriptor, SharedMemory place)
      : descriptor_(std::move(descriptor)), place_(std::move(place)) {}
  ~RegionMemory() override;

  const SharedMemory& place() const { return place_; }

  // The daemon's number for the region on this connection; none if the region is not registered.
  std::optional<uint64_t> IdOn(const Connection& connection) const;
  // The offset of [data, data + bytes) in the region; none if the range is not inside.
  std::optional<uint64_t> OffsetOf(const std::byte* data, uint64_t bytes) const;

  // A region that the daemon hosted is registered as the engine's own after a restart: its memory outlives the daemon.
  absl::Status Restore(const std::shared_ptr<Connection>& connection, Deadline deadline) override;
  void SetId(const std::shared_ptr<Connection>& connection, uint64_t id);

 private:
  const Descriptor descriptor_;
  const SharedMemory place_;
  mutable Mutex mutex_;
  std::weak_ptr<Connection> connection_ ABSL_GUARDED_BY(mutex_);
  uint64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t id_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ashlar::internal
