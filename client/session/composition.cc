// SPDX-License-Identifier: Apache-2.0
// The composition service: Model::Advance.
#include <algorithm>
#include <utility>
#include <variant>

#include "ashlar/v1/cache.pb.h"
#include "client/session/compose_call.h"
#include "client/session/model.h"
#include "client/session/rpc.h"

namespace ashlar {

// A daemon without space reports it in its reply or by ABORTED. gRPC itself returns RESOURCE_EXHAUSTED if it ends a
// call for lack of memory, whatever the daemon has done.
namespace {

MissReason ReasonOf(const absl::Status& status) {
  if (absl::IsAborted(status)) return MissReason::kBusy;
  return absl::IsResourceExhausted(status) ? MissReason::kDaemonUnavailable : internal::ToMissReason(status);
}

}  // namespace

Composition Composition::Missed(size_t segments, MissReason reason) {
  Composition composition;
  composition.reason_ = reason;
  composition.segments_.assign(segments, reason);
  return composition;
}

void Composition::Conclude(internal::Deadline deadline) {
  const absl::StatusOr<v1::CompositionReply> reply = call_->WaitReply(deadline);
  const size_t asked = segments_.size();
  reason_ = reply.ok() ? internal::ToMissReason(reply->miss_reason()) : ReasonOf(reply.status());
  if (reply.ok() && static_cast<size_t>(reply->segments_size()) == asked) {
    std::ranges::transform(reply->segments(), segments_.begin(), [](uint32_t r) { return internal::ToMissReason(r); });
  } else if (reply.ok()) {
    reason_ = MissReason::kDaemonUnavailable;  // the daemon answered for other segments
  } else {
    segments_.assign(asked, reason_);
  }
}

namespace {

using internal::ModelBinding;
using internal::RegionMemory;

// Writes places inside one region into messages.
class Places {
 public:
  Places(const RegionMemory& region, uint64_t id) : region_(region), id_(id) {}

  bool all_inside() const { return all_inside_; }

  void Set(const RunningState& state, const LinearLayer& linear, v1::StatePlace* place) {
    const uint64_t heads = linear.value_heads;
    const uint64_t bytes = heads * linear.d_k * linear.d_v * ElementBytes(state.dtype);
    place->set_region(id_);
    place->set_offset(OffsetOf(state.data, bytes));
    place->set_dtype(static_cast<uint32_t>(state.dtype));
    if (state.exponents != nullptr) {
      place->set_exponents_offset(OffsetOf(state.exponents, heads * sizeof(int32_t)));
    }
  }

  // Skips a null pointer. The daemon knows the extent of the rows.
  void Set(const float* data, int64_t stride, v1::TokenRows* (v1::AdvanceRequest::*field)(),
           v1::AdvanceRequest& request) {
    if (data == nullptr) return;
    v1::TokenRows* rows = (request.*field)();
    rows->set_region(id_);
    rows->set_offset(OffsetOf(data, sizeof(float)));
    rows->set_stride(static_cast<uint64_t>(stride) * sizeof(float));
  }

 private:
  uint64_t OffsetOf(const void* data, uint64_t bytes) {
    const std::optional<uint64_t> offset = region_.OffsetOf(static_cast<const std::byte*>(data), bytes);
    all_inside_ &= offset.has_value();
    return offset.value_or(0);
  }

  const RegionMemory& region_;
  const uint64_t id_;
  bool all_inside_ = true;
};

// `checkpoint`: the index of the prefix's checkpoint among the lease's objects.
void SetSegment(const LandSegment& segment, uint32_t checkpoint, v1::LandSegment* out) {
  out->set_segment(segment.segment == LandSegment::kPrefix ? checkpoint : segment.segment);
  out->set_first_position(segment.first_position);
  out->set_rotary_shift(segment.rotary_shift);  // the daemon refuses this field by name: only a Land has it
}

const LinearLayer* LinearAt(const Layout& layout, uint32_t layer) {
  return layer < layout.layers.size() ? std::get_if<LinearLayer>(&layout.layers[layer]) : nullptr;
}

bool DescribeAdvance(const LayerAdvance& advance, uint32_t checkpoint, const Layout& layout, Places& places,
                     v1::AdvanceRequest& request) {
  using Request = v1::AdvanceRequest;
  const LinearLayer* linear = LinearAt(layout, advance.layer);
  if (linear == nullptr) return false;
  request.set_layer(advance.layer);
  places.Set(advance.state, *linear, request.mutable_state());
  for (const AdvanceStep& step : advance.steps) {
    v1::AdvanceStep* out = request.add_steps();
    if (step.segment.has_value()) {
      SetSegment(*step.segment, checkpoint, out->mutable_segment());
    } else {
      out->mutable_run()->set_begin(static_cast<uint64_t>(step.begin));
      out->mutable_run()->set_end(static_cast<uint64_t>(step.end));
    }
    if (step.checkpoint.data != nullptr) places.Set(step.checkpoint, *linear, out->mutable_checkpoint());
  }
  const kernels::TokenInputs& inputs = advance.inputs;
  request.set_tokens(static_cast<uint64_t>(inputs.tokens));
  if (inputs.tokens == 0) return places.all_inside();
  places.Set(inputs.q, inputs.q_stride, &Request::mutable_q, request);
  places.Set(inputs.k, inputs.k_stride, &Request::mutable_k, request);
  places.Set(inputs.v, inputs.v_stride, &Request::mutable_v, request);
  places.Set(inputs.g, inputs.g_stride, &Request::mutable_g, request);
  places.Set(inputs.beta, inputs.beta_stride, &Request::mutable_beta, request);
  places.Set(advance.out, advance.out_stride, &Request::mutable_out, request);
  return places.all_inside();
}

}  // namespace

Composition Model::Advance(const Match* match, const LayerAdvance& advance) {
  const internal::Deadline deadline = reconnector_->CallDeadline();
  const auto segments = static_cast<size_t>(
      std::ranges::count_if(advance.steps, [](const AdvanceStep& step) { return step.segment.has_value(); }));
  const auto missed = [&](MissReason reason) { return Composition::Missed(segments, reason); };
  const absl::StatusOr<ModelBinding> binding = Bind();
  if (!binding.ok()) return missed(internal::ToMissReason(binding.status()));
  v1::AdvanceRequest request;
  request.set_model(binding->model->id());
  Composition composition = missed(MissReason::kNone);
  if (segments > 0) {
    if (match == nullptr || match->ns_ != opened_->ns()) return missed(MissReason::kInvalidRequest);
    if (match->connection_ != binding->connection || match->lease_ == nullptr) return missed(MissReason::kLeaseLost);
    composition.lease_ = match->lease_;
    request.set_lease(match->lease_->lease());
  }
  const std::shared_ptr<RegionMemory>& region = advance.region.memory_;
  if (region == nullptr) return missed(MissReason::kInvalidRequest);
  const std::optional<uint64_t> region_id = region->IdOn(*binding->connection);
  if (!region_id.has_value()) return missed(MissReason::kBusy);  // the daemon has no space for the region now
  Places places(*region, *region_id);
  const uint32_t checkpoint = match == nullptr ? LandSegment::kPrefix : match->checkpoint_number_;
  if (!DescribeAdvance(advance, checkpoint, layout(), places, request)) return missed(MissReason::kInvalidRequest);
  composition.model_ = binding->model;
  composition.region_ = region;
  composition.call_ = internal::ComposeCall::Start(binding->connection, request);
  if (composition.call_ == nullptr) return missed(MissReason::kBusy);
  composition.Conclude(deadline);
  return composition;
}

bool Composition::quiesced() const {
  if (creator_.InChild()) return false;
  return call_ == nullptr || call_->WaitQuiesced(internal::Deadline());
}

bool Composition::WaitQuiesced(std::chrono::milliseconds timeout) {
  if (creator_.InChild()) return false;
  return call_ == nullptr || call_->WaitQuiesced(internal::After(timeout));
}

}  // namespace ashlar
