// SPDX-License-Identifier: Apache-2.0
// The composition service: what Model::Advance and Model::Compose ask of the daemon, and its outcome.
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

// The running states of one linear layer's value heads, one behind the other: [d_k, d_v] or [d_v, d_k] each, in the
// layout's order.
struct RunningState {
  std::byte* data = nullptr;
  DType dtype = DType::kF32;     // kF32, kF16 or kBF16
  int32_t* exponents = nullptr;  // [value_heads], of kF16 alone: a state is its numbers × 2^exponent
};

// One step of a prompt's chain in one layer, as kernels::SeamStep: composes a segment's cached interior, or runs tokens
// [begin, end) of the inputs through the recurrence.
struct AdvanceStep {
  std::optional<LandSegment> segment;  // none: computed tokens. A prefix comes first and replaces the state
  int64_t begin = 0, end = 0;
  RunningState checkpoint = {};  // out: a copy of the state after this step; null data: not wanted
};

// One layer of a prompt's chain, in order: HYPIC §4.3 and equations 2, 4, 6, as kernels::AdvanceSeamArgs. All pointers
// lie in `region`. At most limits::kMaxStepsPerComposition steps and limits::kMaxTokensPerComposition tokens; a longer
// chain is cut, and continues from the state of the call before.
struct LayerAdvance {
  uint32_t layer = 0;  // index into layout.layers
  std::span<const AdvanceStep> steps;
  Region region;
  RunningState state;           // in and out
  kernels::TokenInputs inputs;  // strides in floats
  float* out = nullptr;         // [tokens][value_heads, d_v] of tokens in runs; may be null
  int64_t out_stride = 0;       // in floats
};

// The outcome of an Advance or a Compose. While quiet() is false, all memory named in the call belongs to the daemon.
// Its end waits until nothing writes to that memory any more, however long the daemon takes.
class Composition {
 public:
  Composition(Composition&&) noexcept = default;
  Composition& operator=(Composition&& other) noexcept {
    if (this == &other) return *this;
    std::destroy_at(this);  // members end in the reverse order
    return *std::construct_at(this, std::move(other));
  }
  ~Composition() = default;

  // kNone: done. Otherwise no state was changed, unless it is kCancelled, kTimedOut or kDaemonUnavailable: then states
  // and outputs may hold anything. Compute without the cache, or without what segments() says is lost.
  MissReason reason() const { return reason_; }
  // One reason a segment of the request, in order; kNone: no miss.
  const std::vector<MissReason>& segments() const { return segments_; }

  // True once nothing reads or writes the memory any more: the daemon answered, confirmed that it has ceased, or is
  // dead.
  bool quiet() const;
  bool WaitQuiet(std::chrono::milliseconds timeout);

 private:
  friend class Model;
  Composition() = default;
  static Composition Missed(size_t segments, MissReason reason);
  // Waits for the answer of a call that has been started.
  void Conclude(internal::Deadline deadline);

  MissReason reason_ = MissReason::kNone;
  std::vector<MissReason> segments_;
  // These members keep memory in place while the daemon may write to it. `call_` is last: it is destroyed first, and
  // waits until nothing writes any more.
  std::shared_ptr<const internal::ModelHandle> model_;
  std::shared_ptr<internal::LeaseHold> lease_;
  std::shared_ptr<internal::RegionMemory> region_;
  std::shared_ptr<internal::ComposeCall> call_;  // null: nothing was asked
  internal::CreatorProcess creator_;
};

}  // namespace ashlar
