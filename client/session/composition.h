// SPDX-License-Identifier: Apache-2.0
// The composition service: the arguments of Model::Advance, and its outcome.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "client/session/compose_call.h"
#include "client/session/connection.h"
#include "client/session/deadline.h"
#include "client/session/landing.h"
#include "client/session/opened_model.h"
#include "client/session/process_bound.h"
#include "client/session/region.h"
#include "client/session/region_memory.h"
#include "kernels/dtype.h"
#include "kernels/linear.h"
#include "proto/outcome.h"

namespace ashlar {

// The running states of one linear layer's value heads, consecutive: [d_k, d_v] or [d_v, d_k] each, in the layout's
// order.
struct RunningState {
  std::byte* data = nullptr;
  DType dtype = DType::kF32;     // kF32, kF16 or kBF16
  int32_t* exponents = nullptr;  // [value_heads], only for kF16: a state is its numbers × 2^exponent
};

// One step of a prompt's chain in one layer, like kernels::SeamStep: composes a segment's cached interior, or runs
// tokens [begin, end) of the inputs through the recurrence.
struct AdvanceStep {
  std::optional<LandSegment> segment;  // none: computed tokens. A prefix must be first, and replaces the state
  int64_t begin = 0, end = 0;
  RunningState checkpoint = {};  // out: a copy of the state after this step; null data: not wanted
};

// One layer of a prompt's chain, in order: HYPIC §4.3 and equations 2, 4, 6, like kernels::AdvanceSeamArgs. All
// pointers must be in `region`. At most limits::kMaxStepsPerComposition steps and limits::kMaxTokensPerComposition
// tokens; split a longer chain, and continue from the state of the previous call.
struct LayerAdvance {
  uint32_t layer = 0;  // index into layout.layers
  std::span<const AdvanceStep> steps;
  Region region;
  RunningState state;           // read, then overwritten
  kernels::TokenInputs inputs;  // strides in floats
  float* out = nullptr;         // [tokens][value_heads, d_v] of tokens in runs; may be null
  int64_t out_stride = 0;       // floats
};

// The outcome of an Advance. While quiesced() is false, all memory named in the call belongs to the
// daemon. The destructor waits until nothing writes to that memory any longer, however long the daemon takes.
class Composition {
 public:
  Composition(Composition&&) noexcept = default;
  Composition& operator=(Composition&& other) noexcept {
    if (this == &other) return *this;
    std::destroy_at(this);  // members end in the reverse order
    return *std::construct_at(this, std::move(other));
  }
  ~Composition() = default;

  // kNone: done. After kCancelled, kTimedOut and kDaemonUnavailable, states and outputs are undefined; after other
  // reasons no state has changed. Compute without the cache, or without the segments that segments() reports as lost.
  MissReason reason() const { return reason_; }
  // One reason per segment of the request, in order; kNone: no miss.
  const std::vector<MissReason>& segments() const { return segments_; }

  // True once nothing reads or writes the memory any longer: the daemon answered, confirmed that it has stopped, or is
  // dead.
  bool quiesced() const;
  bool WaitQuiesced(std::chrono::milliseconds timeout);

 private:
  friend class Model;
  Composition() = default;
  static Composition Missed(size_t segments, MissReason reason);
  // Waits for the answer of a call that has been started.
  void Conclude(internal::Deadline deadline);

  MissReason reason_ = MissReason::kNone;
  std::vector<MissReason> segments_;
  // These members keep memory in place while the daemon may write to it. `call_` is last, so it is destroyed first, and
  // waits until nothing writes any longer.
  std::shared_ptr<const internal::ModelHandle> model_;
  std::shared_ptr<internal::LeaseHold> lease_;
  std::shared_ptr<internal::RegionMemory> region_;
  std::shared_ptr<internal::ComposeCall> call_;  // null: the daemon was not asked
  internal::CreatorProcess creator_;
};

}  // namespace ashlar
