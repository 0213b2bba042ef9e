// SPDX-License-Identifier: Apache-2.0
#include "client/engine/plan_advance.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <variant>

#include "client/engine/near_memory.h"
#include "client/engine/status.h"
#include "client/engine/token_rows.h"
#include "kernels/layer_shape.h"

namespace ashlar::engine {
namespace {

Status CheckAdvance(const CacheState& cache, const kernels::LinearShape& shape, const LayerAdvance& advance) {
  if (Status status = CheckState(advance.state, "advance.state"); !status.ok()) return status;
  if (Status status = CheckHeadStride(advance.state, shape, "advance.state"); !status.ok()) return status;
  const bool outputs = advance.out != nullptr;
  if (Status status = CheckRows(shape, advance.inputs, outputs, "advance.inputs"); !status.ok()) return status;
  if (Status status = CheckOutStride(shape, advance, "advance"); !status.ok()) return status;
  if (advance.copies == nullptr && advance.copy_count > 0) return Invalid("advance.copies: null");
  if (Status near = CheckNear(cache.region, advance, "advance"); !near.ok()) return near;
  for (uint32_t i = 0; i < advance.copy_count; ++i) {
    const std::string field = absl::StrCat("advance.copies[", i, "].state");
    if (Status status = CheckState(advance.copies[i].state, field); !status.ok()) return status;
    if (Status status = CheckHeadStride(advance.copies[i].state, shape, field); !status.ok()) return status;
  }
  return {};
}

}  // namespace

kernels::Queue& PlanAdvance::queue() {
  if (queue_ == nullptr) queue_ = kernels::Host().MakeQueue(cache_.workers.get());
  return *queue_;
}

const PlanAdvance::Rebuilt& PlanAdvance::RebuiltPrefix(uint32_t layer, const MappedTuple& checkpoint) {
  const auto [entry, made] = rebuilt_.try_emplace(layer);
  Rebuilt& rebuilt = entry->second;
  if (!made) return rebuilt;
  const auto& linear = std::get<LinearLayer>(cache_.layout().layers[layer]);
  const kernels::LinearShape shape = kernels::ShapeOf(linear);
  rebuilt.state.resize(uint64_t{linear.value_heads} * linear.d_k * linear.d_v);
  const SpanInputs inputs(linear, *match_->prefix_span(), layer);
  const kernels::SeamStep steps[] = {{.interior = &checkpoint.view},
                                     {.begin = 0, .end = static_cast<int64_t>(match_->prefix_span()->tokens)}};
  std::vector<void*> heads = HeadsOf({.data = rebuilt.state.data()}, shape);
  kernels::Host()
      .AdvanceSeam({.shape = shape, .steps = steps, .inputs = inputs.inputs(), .state = {.heads = heads.data()}},
                   queue())
      .Wait();
  for (void* const head : heads) rebuilt.heads.push_back({.form = TransitionForm::kZero, .state = head});
  rebuilt.conv_tail = inputs.ConvTail(checkpoint.conv_tail);
  return rebuilt;
}

Status PlanAdvance::View(uint32_t step, uint32_t layer, StepView* out) {
  if (revision_ != plan_.revision()) {
    heads_.clear();
    rebuilt_.clear();
    revision_ = plan_.revision();
  }
  const std::span<const Step> steps = plan_.steps();
  if (step >= steps.size() || steps[step].kind == StepKind::kCompute) return Invalid("step: ", step, " is not cached");
  if (const absl::Status status = cache_.CheckHasState(layer); !status.ok()) return ToStatus(status);
  const bool prefix = steps[step].segment == Step::kPrefix;
  const auto* const tuples = prefix ? match_->prefix_states() : match_->tuples(steps[step].segment);
  if (tuples == nullptr) return MakeStatus(Code::kFailedPrecondition, "released");
  const MappedTuple& mapped = (*tuples)[layer];
  if (prefix && match_->prefix_span() != nullptr) {
    const Rebuilt& rebuilt = RebuiltPrefix(layer, mapped);
    *out = {{.heads = rebuilt.heads.data()}, rebuilt.conv_tail.empty() ? nullptr : rebuilt.conv_tail.data()};
  } else {
    *out = {mapped.view, mapped.conv_tail};
  }
  return {};
}

Status PlanAdvance::GetTuple(uint32_t step, uint32_t layer, Tuple* out) {
  StepView view;
  if (Status status = landing_.ReachLayer(layer, false); !status.ok()) return status;
  if (Status status = View(step, layer, &view); !status.ok()) return status;
  const auto* const opaque = std::get_if<OpaqueLayer>(&cache_.layout().layers[layer]);
  const uint32_t count =
      opaque != nullptr ? OpaqueUnits(*opaque) : std::get<LinearLayer>(cache_.layout().layers[layer]).value_heads;
  std::vector<Head>& heads = heads_[{step, layer}];
  heads.clear();
  for (uint32_t i = 0; i < count; ++i) {
    const kernels::HeadTuple& head = view.tuple.heads[i];
    heads.push_back({.form = head.form,
                     .rank = head.rank,
                     .transition = head.transition,
                     .state = head.state,
                     .state_exponent = head.state_exponent});
  }
  *out = {.heads = heads.data(),
          .head_count = count,
          .transition_dtype = view.tuple.transition_dtype,
          .state_dtype = view.tuple.state_dtype,
          .position = static_cast<uint64_t>(view.tuple.position),
          .conv_tail = view.conv_tail};
  return {};
}

Status PlanAdvance::AdvanceLayer(const LayerAdvance& given) {
  if (given.layer < cache_.layout().layers.size()) {
    const auto* const opaque = std::get_if<OpaqueLayer>(&cache_.layout().layers[given.layer]);
    if (opaque != nullptr && opaque->state_bytes > 0) return Restore(given, *opaque);
  }
  const auto linear = cache_.LinearAt(given.layer);
  if (!linear.ok()) return Invalid("advance.", linear.status().message());
  const kernels::LinearShape shape = kernels::ShapeOf(**linear);
  if (Status status = CheckAdvance(cache_, shape, given); !status.ok()) return status;
  const ReadyRows ready(shape, given.inputs);
  LayerAdvance advance = given;
  advance.inputs = ready.rows();
  SetOutStride(shape, advance);
  std::vector<ChainPiece> pieces;
  if (Status status = CutChain(plan_.steps(), text_.token_count(), advance, pieces); !status.ok()) return status;
  if (advance.begin < text_.token_count()) {
    if (Status status = landing_.ReachLayer(advance.layer, true); !status.ok()) return status;
  }
  return AdvancePieces(**linear, advance, pieces);
}

Status PlanAdvance::AdvancePieces(const LinearLayer& layer, const LayerAdvance& advance,
                                  std::span<const ChainPiece> pieces) {
  std::vector<kernels::TupleView> views(pieces.size());
  size_t cached = 0, interiors = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i].cached == nullptr) continue;
    StepView view;
    if (Status status = View(pieces[i].step, advance.layer, &view); !status.ok()) return status;
    views[i] = view.tuple;
    ++cached;
    interiors += pieces[i].cached->kind == StepKind::kInterior;
  }
  const kernels::LinearShape shape = kernels::ShapeOf(layer);
  if (cache_.compose == ComposeBy::kProcess || compose_here_ || interiors == 0) {
    if (!pieces.empty()) AdvanceHere(shape, advance, pieces, views, queue());
    return cached > 0 ? CheckLease() : Status();
  }
  if (pieces.front().cached != nullptr && pieces.front().cached->kind == StepKind::kCheckpoint) {
    // States that replace the running ones are only copied.
    LayerAdvance first = advance;
    first.inputs = {};
    AdvanceHere(shape, first, pieces.first(1), views, queue());
    pieces = pieces.subspan(1);
  }
  std::vector<uint32_t> lost;
  if (DaemonAdvance(cache_, *match_, layer, advance).Run(pieces, lost)) {
    ++cache_.daemon_advances;
    return {};
  }
  compose_here_ = true;
  return plan_.Abandon(lost);
}

Status PlanAdvance::Restore(const LayerAdvance& advance, const OpaqueLayer& layer) {
  if (advance.state.data == nullptr) return Invalid("advance.state.data: null");
  if (Status near = CheckNear(cache_.region, advance, "advance"); !near.ok()) return near;
  const std::span<const Step> steps = plan_.steps();
  const uint64_t prefix = steps.empty() || steps[0].kind != StepKind::kCheckpoint ? 0 : steps[0].end;
  if (advance.begin != 0 || advance.end != prefix || prefix == 0) {
    return Invalid("advance.end: [", advance.begin, ", ", advance.end, "); layer ", advance.layer,
                   " is opaque; expected the cached prefix, [0, ", prefix, ")");
  }
  if (advance.inputs.tokens > 0) return Invalid("advance.inputs.tokens: expected 0 for an opaque layer");
  if (advance.copy_count > 0) return Invalid("advance.copies: expected none for an opaque layer");
  if (Status status = landing_.ReachLayer(advance.layer, true); !status.ok()) return status;
  StepView view;
  if (Status status = View(0, advance.layer, &view); !status.ok()) return status;
  const uint64_t unit = OpaqueUnitBytes(layer);
  for (uint64_t begin = 0; begin < layer.state_bytes; begin += unit) {
    std::memcpy(static_cast<std::byte*>(advance.state.data) + begin, view.tuple.heads[begin / unit].state,
                std::min(unit, layer.state_bytes - begin));
  }
  return CheckLease();
}

Status PlanAdvance::CheckLease() {
  return !landing_.in_progress() && !match_->valid() ? plan_.Abandon() : Status();
}

}  // namespace ashlar::engine
