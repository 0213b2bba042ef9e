// SPDX-License-Identifier: Apache-2.0
// RemoteSource: copies held by other nodes, as the tier after the disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "kernels/gpu.h"
#include "storage/executor.h"

namespace ashlar::storage {

// A copy of an object on another node, while that node keeps it for this one. Assigned by the source; never 0, never
// reused.
using RemoteCopyId = uint64_t;

// Used by the metadata thread, including callbacks. Storage knows neither nodes nor networks: if a node fails, the
// source continues with another one internally.
class RemoteSource {
 public:
  virtual ~RemoteSource() = default;

  // Returns whether bytes of other nodes can be received directly in this GPU's memory.
  virtual bool Reaches(const kernels::Gpu& gpu) const = 0;
  // Starts reading the extents from `first` into `targets`, one each, in the memory of a reachable GPU (null: host
  // memory). `done` is called after this returns; until then the source owns the targets. The first extent always
  // begins with the encoded header under which the object was adopted. Returns false if too much of the copy's node is
  // in flight; the caller must retry, and other copies may succeed.
  virtual bool Read(RemoteCopyId copy, uint64_t first, std::vector<std::byte*> targets, const kernels::Gpu* gpu,
                    std::function<void(absl::Status)> done) = 0;
  // Sets the time to recompute the object (0: unknown). Reads end with ABORTED if the rest would take longer by current
  // measurements. Of several calls for one copy the longest time counts, and 0 means no limit.
  virtual void SetRecompute(RemoteCopyId copy, Nanos recompute) = 0;
  // The copy is no longer needed, and no read is in flight.
  virtual void Release(RemoteCopyId copy) = 0;
  // Bytes of this copy did not match the object's checksums. The copy has usually been released before, because bytes
  // are verified when they land.
  virtual void Damaged(RemoteCopyId copy) = 0;
};

}  // namespace ashlar::storage
