// SPDX-License-Identifier: Apache-2.0
#include "daemon/engine/composition_plan.h"

#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.pb.h"
#include "daemon/engine/request_fields.h"
#include "daemon/engine/shared_places.h"
#include "kernels/layer_shape.h"
#include "proto/invalid.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

using Access = SharedPlaces::Access;

// Reads the fields that name the call, its model and its lease.
absl::StatusOr<CompositionPlan> ReadNames(const v1::AdvanceRequest& request, const Session& session) {
  CompositionPlan plan{.number = request.number()};
  plan.model = session.FindModel(request.model());
  if (plan.model == nullptr) return Invalid("model: unknown handle ", request.model());
  if (request.lease().empty()) return plan;
  const auto lease = ReadLease("lease", request.lease());
  if (!lease.ok()) return lease.status();
  plan.lease = *lease;
  return plan;
}

absl::Status NotAfter(const std::string& field, uint32_t segment) {
  return Invalid(field, ".segment: must come after segment ", segment);
}

// Appends an interior, which must follow the earlier ones. The first one may be a prefix; the lease lists it after all
// segments.
absl::Status AddInterior(const std::string& field, const v1::LandSegment& segment, CompositionPlan& plan) {
  std::vector<storage::Composition::Interior>& interiors = plan.composition.interiors;
  if (plan.lease == storage::LeaseId{}) return Invalid("lease: empty; expected the lease that holds the segments");
  if (segment.first_position() > kMaxPosition)
    return Invalid(field, ".first_position: out of range; expected at most ", kMaxPosition);
  if (segment.rotary_shift() != 0) return Invalid(field, ".rotary_shift: must be 0; only Land takes a shift");
  if (interiors.size() > 1 && segment.segment() <= interiors.back().segment) {
    return NotAfter(field, interiors.back().segment);
  }
  interiors.push_back({segment.segment(), segment.first_position()});
  plan.fields.push_back(field);
  return absl::OkStatus();
}

absl::StatusOr<storage::StatePlace> ReadState(const std::string& field, const v1::StatePlace& place,
                                              const kernels::LinearShape& shape, SharedPlaces& places) {
  storage::StatePlace state{.dtype = static_cast<DType>(place.dtype())};
  switch (place.dtype()) {
    case static_cast<uint32_t>(DType::kF32):
    case static_cast<uint32_t>(DType::kF16):
    case static_cast<uint32_t>(DType::kBF16):
      break;
    default:
      return Invalid(field, ".dtype: expected f32, f16 or bf16");
  }
  const uint64_t element = ElementBytes(state.dtype), heads = static_cast<uint64_t>(shape.heads);
  const absl::StatusOr<std::byte*> data =
      places.Block(field, place.region(), place.offset(), heads * shape.d_k * shape.d_v * element, element);
  if (!data.ok()) return data.status();
  state.data = *data;
  if (state.dtype != DType::kF16) {
    if (place.exponents_offset() != 0)
      return Invalid(field, ".exponents_offset: must be 0; only f16 states have exponents");
    return state;
  }
  const absl::StatusOr<std::byte*> exponents =
      places.Block(absl::StrCat(field, ".exponents"), place.region(), place.exponents_offset(), heads * sizeof(int32_t),
                   alignof(int32_t));
  if (!exponents.ok()) return exponents.status();
  state.exponents = reinterpret_cast<int32_t*>(*exponents);
  return state;
}

// One input or output field of per-token rows.
struct TokenField {
  const char* name;
  bool given;
  const v1::TokenRows& rows;
  int64_t width;  // floats per token; 0 if the family has none
  bool needed;
  Access access;
};

// Returns null if the field is absent.
absl::StatusOr<float*> ReadRows(const TokenField& field, uint64_t tokens, SharedPlaces& places) {
  if (!field.given) {
    if (field.needed && field.width > 0 && tokens > 0) return Invalid(field.name, ": missing");
    return nullptr;
  }
  if (field.width == 0) return Invalid(field.name, ": must be absent; the layer's family has no such input");
  if (tokens == 0) return Invalid(field.name, ": must be absent; the request has no tokens");
  return places.Rows(field.name, field.rows.region(), field.rows.offset(), field.rows.stride(), tokens,
                     static_cast<uint64_t>(field.width) * sizeof(float), field.access);
}

int64_t InFloats(uint64_t stride) {
  return static_cast<int64_t>(stride / sizeof(float));
}

absl::Status ReadTokenRows(const v1::AdvanceRequest& request, SharedPlaces& places,
                           storage::Composition::Layer& layer) {
  const kernels::LinearShape& shape = layer.shape;
  const int64_t keys = int64_t{shape.key_heads} * shape.d_k, values = int64_t{shape.heads} * shape.d_v;
  const int64_t gates = int64_t{shape.heads} * kernels::GateWidth(shape);
  const int64_t betas = int64_t{shape.heads} * kernels::BetaWidth(shape);
  kernels::TokenInputs& inputs = layer.inputs;
  if (request.tokens() > limits::kMaxTokensPerComposition) {
    return Invalid("tokens: too many; expected at most ", limits::kMaxTokensPerComposition);
  }
  inputs.tokens = static_cast<int64_t>(request.tokens());
  const auto input = [&](const TokenField& field, const float*& data, int64_t& stride) {
    const absl::StatusOr<float*> rows = ReadRows(field, request.tokens(), places);
    if (!rows.ok()) return rows.status();
    data = *rows;
    stride = InFloats(field.rows.stride());
    return absl::OkStatus();
  };
  const TokenField fields[] = {
      {"q", request.has_q(), request.q(), keys, request.has_out(), Access::kRead},
      {"k", request.has_k(), request.k(), keys, true, Access::kRead},
      {"v", request.has_v(), request.v(), values, true, Access::kRead},
      {"g", request.has_g(), request.g(), gates, true, Access::kRead},
      {"beta", request.has_beta(), request.beta(), betas, true, Access::kRead},
  };
  const float** const data[] = {&inputs.q, &inputs.k, &inputs.v, &inputs.g, &inputs.beta};
  int64_t* const strides[] = {&inputs.q_stride, &inputs.k_stride, &inputs.v_stride, &inputs.g_stride,
                              &inputs.beta_stride};
  for (size_t i = 0; i < std::size(fields); ++i) {
    if (absl::Status status = input(fields[i], *data[i], *strides[i]); !status.ok()) return status;
  }
  const absl::StatusOr<float*> out =
      ReadRows({"out", request.has_out(), request.out(), values, false, Access::kWrite}, request.tokens(), places);
  if (!out.ok()) return out.status();
  layer.out = *out;
  layer.out_stride = InFloats(request.out().stride());
  return absl::OkStatus();
}

absl::Status ReadRun(const std::string& field, const v1::TokenRun& run, uint64_t tokens, int64_t behind,
                     storage::Composition::Step& step) {
  if (run.end() > tokens) return Invalid(field, ".run.end: out of range; the request has ", tokens, " tokens");
  if (run.begin() >= run.end()) return Invalid(field, ".run.begin: must be less than run.end");
  step.begin = static_cast<int64_t>(run.begin());
  step.end = static_cast<int64_t>(run.end());
  if (step.begin < behind) return Invalid(field, ".run.begin: overlaps an earlier run; runs must be in order");
  return absl::OkStatus();
}

absl::Status ReadSteps(const v1::AdvanceRequest& request, SharedPlaces& places, CompositionPlan& plan) {
  storage::Composition::Layer& layer = plan.composition.layers.front();
  if (request.steps_size() == 0) return Invalid("steps: empty");
  if (static_cast<uint64_t>(request.steps_size()) > limits::kMaxStepsPerComposition) {
    return Invalid("steps: too many; expected at most ", limits::kMaxStepsPerComposition);
  }
  int64_t behind = 0;
  for (int i = 0; i < request.steps_size(); ++i) {
    const v1::AdvanceStep& given = request.steps(i);
    const std::string field = absl::StrCat("steps[", i, "]");
    storage::Composition::Step step;
    absl::Status status;
    if (given.has_segment()) {
      step.interior = plan.composition.interiors.size();
      status = AddInterior(absl::StrCat(field, ".segment"), given.segment(), plan);
    } else if (given.has_run()) {
      status = ReadRun(field, given.run(), request.tokens(), behind, step);
      behind = step.end;
    } else {
      status = Invalid(field, ": empty; expected a segment or a run");
    }
    if (!status.ok()) return status;
    if (given.has_checkpoint()) {
      auto checkpoint = ReadState(absl::StrCat(field, ".checkpoint"), given.checkpoint(), layer.shape, places);
      if (!checkpoint.ok()) return checkpoint.status();
      step.checkpoint = *checkpoint;
    }
    layer.steps.push_back(step);
  }
  if (behind == 0 && request.tokens() > 0) return Invalid("tokens: no step has a run, so the tokens are unused");
  return absl::OkStatus();
}

// Keeps the regions, and the model that owns the shapes' tables.
std::shared_ptr<const void> KeepAll(const SharedPlaces& places, const std::shared_ptr<const Model>& model) {
  using Kept = std::pair<std::shared_ptr<const void>, std::shared_ptr<const Model>>;
  return std::make_shared<Kept>(places.keep(), model);
}

absl::Status CheckGpuBounds(const CompositionPlan& plan) {
  if (plan.composition.gpu == nullptr) return absl::OkStatus();
  for (const storage::Composition::Layer& layer : plan.composition.layers) {
    if (storage::GpuPointerBytes(layer, plan.composition.interiors.size()) > storage::kMaxGpuPointerBytes) {
      return Invalid("steps: too many segments and checkpoints for one call on a GPU; split the call");
    }
    if (storage::GpuScratchBytes(layer) > storage::kMaxGpuScratchBytes) {
      return Invalid("steps: too many f16 checkpoints for one call on a GPU; split the call");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<kernels::LinearShape> LinearShapeAt(const std::string& field, const Layout& layout, uint32_t layer) {
  if (layer >= layout.layers.size())
    return Invalid(field, ": out of range; the layout has ", layout.layers.size(), " layers");
  const auto* linear = std::get_if<LinearLayer>(&layout.layers[layer]);
  if (linear == nullptr) return Invalid(field, ": ", layer, " is not a linear layer");
  return kernels::ShapeOf(*linear);
}

}  // namespace

absl::StatusOr<CompositionPlan> ReadAdvance(const v1::AdvanceRequest& request, const Session& session) {
  absl::StatusOr<CompositionPlan> plan = ReadNames(request, session);
  if (!plan.ok()) return plan;
  const auto shape = LinearShapeAt("layer", plan->model->layout, request.layer());
  if (!shape.ok()) return shape.status();
  SharedPlaces places(session);
  storage::Composition::Layer& layer = plan->composition.layers.emplace_back();
  layer.layer = request.layer();
  layer.shape = *shape;
  const auto state = ReadState("state", request.state(), *shape, places);
  if (!state.ok()) return state.status();
  layer.state = *state;
  if (absl::Status status = ReadTokenRows(request, places, layer); !status.ok()) return status;
  if (absl::Status status = ReadSteps(request, places, *plan); !status.ok()) return status;
  if (absl::Status status = places.CheckApart(); !status.ok()) return status;
  plan->composition.gpu = places.gpu();
  if (absl::Status status = CheckGpuBounds(*plan); !status.ok()) return status;
  plan->composition.keep = KeepAll(places, plan->model);
  return plan;
}

absl::Status CheckInteriors(const CompositionPlan& plan, const storage::Match& match) {
  for (size_t i = 0; i < plan.composition.interiors.size(); ++i) {
    const storage::Composition::Interior& interior = plan.composition.interiors[i];
    if (interior.segment >= match.found.size()) {
      return Invalid(plan.fields[i], ".segment: out of range; the match has ", match.found.size(), " segments");
    }
    const uint32_t first = plan.composition.interiors[0].segment;
    const bool behind_prefix = match.prefix.objects.Has(first);
    if (i == 1 && interior.segment <= first && !behind_prefix) return NotAfter(plan.fields[i], first);
    const storage::Found& found = match.found[interior.segment];
    if (found.reason != MissReason::kNone) continue;  // not composed; the verdict has the reason
    if (!plan.model->Has(*found.header)) return Invalid("model: differs from the model of the lease");
    if (found.header->kind == ObjectKind::kPrefixBlock)
      return Invalid(plan.fields[i], ".segment: a prefix block has no state to compose");
    if (found.header->kind == ObjectKind::kSpan)
      return Invalid(plan.fields[i], ".segment: a span cannot be composed; pass it as a run of tokens");
    if (found.header->kind != ObjectKind::kCheckpoint) continue;
    if (i > 0) return Invalid(plan.fields[i], ".segment: is a prefix; only the first interior may be one");
    if (interior.first_position != 0) return Invalid(plan.fields[i], ".first_position: must be 0 for a prefix");
  }
  return absl::OkStatus();
}

}  // namespace ashlar::daemon
