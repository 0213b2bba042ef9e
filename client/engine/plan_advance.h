// SPDX-License-Identifier: Apache-2.0
// PlanAdvance: passes a plan's cached steps to kernels: the engine's, the library's in this process, or the daemon's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "ashlar/engine.h"
#include "client/engine/cache_state.h"
#include "client/engine/layer_run.h"
#include "client/engine/leased_match.h"
#include "client/engine/plan_landing.h"
#include "client/engine/prompt_text.h"
#include "client/engine/request_plan.h"
#include "kernels/kernels.h"

namespace ashlar::engine {

class PlanAdvance {
 public:
  PlanAdvance(CacheState& cache, const PromptText& text, const LeasedMatch& match, RequestPlan& plan,
              PlanLanding& landing)
      : cache_(cache), text_(text), match_(match), plan_(plan), landing_(landing) {}

  // The tuple of a cached step. kPending: its layer has not landed.
  Status GetTuple(uint32_t step, uint32_t layer, Tuple* out);
  // Waits for a layer and advances it.
  Status AdvanceLayer(const LayerAdvance& advance);

 private:
  struct StepView {
    kernels::TupleView tuple;
    const void* conv_tail = nullptr;
  };
  // A prefix's state and tail in one layer, rebuilt from its span.
  struct Rebuilt {
    std::vector<float> state;
    std::vector<kernels::HeadTuple> heads;
    std::vector<std::byte> conv_tail;
  };

  // The view of a step that is not computed, in a layer that has landed. kFailedPrecondition: released.
  Status View(uint32_t step, uint32_t layer, StepView* out);
  const Rebuilt& RebuiltPrefix(uint32_t layer, const MappedTuple& checkpoint);
  // Copies the cached prefix's state of an opaque layer.
  Status Restore(const LayerAdvance& advance, const OpaqueLayer& layer);
  // Advances a linear layer by pieces of the chain, of which the cached ones have landed.
  Status AdvancePieces(const LinearLayer& layer, const LayerAdvance& advance, std::span<const ChainPiece> pieces);
  // After the verdict no other check detects that the lease ended while tuples were read.
  Status CheckLease();
  kernels::Queue& queue();

  CacheState& cache_;
  const PromptText& text_;
  const LeasedMatch& match_;
  RequestPlan& plan_;
  PlanLanding& landing_;
  bool compose_here_ = false;  // the daemon failed to compose
  uint64_t revision_ = 0;      // revision of the plan to which the steps and layers below belong
  std::map<std::pair<uint32_t, uint32_t>, std::vector<Head>> heads_;
  std::map<uint32_t, Rebuilt> rebuilt_;
  std::unique_ptr<kernels::Queue> queue_;
};

}  // namespace ashlar::engine
