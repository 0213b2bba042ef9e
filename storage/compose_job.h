// One composition: cached tuples and runs of tokens are applied to an engine's running states.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "kernels/kernels.h"
#include "proto/object.h"
#include "storage/cancel_flag.h"
#include "storage/composition.h"
#include "storage/object_bytes.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// The object of one interior. Header and slot stay until the composition is done.
struct ComposeSource {
  const ObjectHeader* header = nullptr;
  const Slot* slot = nullptr;
  std::vector<bool> verified;  // one a layer of the composition: its tuple need not be verified again
};

class ComposeJob {
 public:
  // One source an interior, each with a tuple for every layer (tuple_table.h).
  ComposeJob(const kernels::Kernels& kernels, kernels::Workers& workers, const Tier& tier,
             std::vector<ComposeSource> sources, Composition composition, CancelFlag cancel);

  // On any thread, once. Verifies all that has not been verified before anything is written; writes nothing when a
  // source is found corrupt.
  void Run();

  // After Run, on the thread that waits for it.
  bool corrupt(size_t source) const { return sources_[source].corrupt; }
  bool cancelled() const { return cancelled_; }
  void ReleaseMemory() { composition_.keep.reset(); }

 private:
  struct Source {
    ComposeSource object;
    ObjectBytes bytes;
    bool corrupt = false;
  };

  bool Verify();  // false: a source is corrupt, or the job was cancelled
  void VerifyLayer(size_t layer, absl::flat_hash_set<const ObjectHeader*>& corrupt);
  void Advance(const Composition::Layer& layer) const;

  const kernels::Kernels& kernels_;
  kernels::Workers& workers_;
  Composition composition_;
  const CancelFlag cancel_;
  std::vector<Source> sources_;
  bool cancelled_ = false;
};

}  // namespace ashlar::storage
