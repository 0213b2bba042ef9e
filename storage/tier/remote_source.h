// SPDX-License-Identifier: Apache-2.0
// RemoteSource: the copies that other nodes hold, as a place below the disk that objects come up from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "kernels/gpu.h"
#include "storage/executor.h"

namespace ashlar::storage {

// One object's copy on another node, as long as that node keeps it there for this one. Drawn by the source, never 0,
// and never drawn twice.
using RemoteCopyId = uint64_t;

// The metadata thread makes all calls and gets all callbacks. Storage knows neither nodes nor networks: another node
// takes over inside the source where the first one fails.
class RemoteSource {
 public:
  virtual ~RemoteSource() = default;

  // Returns whether bytes of other nodes come straight to this GPU's memory.
  virtual bool Reaches(const kernels::Gpu& gpu) const = 0;
  // Begins to read the extents from `first` on into `targets`, one each, in the memory of a GPU that is reached (null:
  // the processor's). `done` comes after this returned; until then the targets are the source's. Whatever other nodes
  // send, the first extent begins with the encoded header that the object was adopted with. False: too much of this
  // copy's node is in flight already; the caller tries again, and other copies may have room meanwhile.
  virtual bool Read(RemoteCopyId copy, uint64_t first, std::vector<std::byte*> targets, const kernels::Gpu* gpu,
                    std::function<void(absl::Status)> done) = 0;
  // To compute the object again takes so long (0: not known). If what has not come yet would take longer, by what is
  // measured meanwhile, reads end with ABORTED. Of several calls for one copy the longest time counts, and 0 for ever.
  virtual void SetRecompute(RemoteCopyId copy, Nanos recompute) = 0;
  // The copy is not needed any more, and nothing of it is being read.
  virtual void Release(RemoteCopyId copy) = 0;
  // Bytes that came by this copy did not fit to the object's checksums. Mostly the copy has been released before: bytes
  // are verified when they land.
  virtual void Damaged(RemoteCopyId copy) = 0;
};

}  // namespace ashlar::storage
