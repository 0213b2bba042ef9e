// SPDX-License-Identifier: Apache-2.0
#include "examples/rag/fidelity.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace ashlar::rag {

using refengine::RecurrentState;
using refengine::ReplacedTransitions;
using refengine::Sequence;
using refengine::Step;

double RelativeL2(std::span<const float> a, std::span<const float> b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  const double error = std::sqrt(difference / norm);
  return std::isfinite(error) ? error : std::numeric_limits<double>::infinity();  // NaN is not close
}

Layer0Fidelity::Layer0Fidelity(const Runtime& runtime, kernels::Workers& workers, int64_t longest_prompt)
    : runtime_(runtime),
      engine_(runtime.model, runtime.kernels, workers, {.pass_tokens = longest_prompt}),
      identity_(runtime.model.config(), ReplacedTransitions::With::kIdentity),
      zero_(runtime.model.config(), ReplacedTransitions::With::kZero) {}

absl::StatusOr<std::vector<std::vector<float>>> Layer0Fidelity::States(Sequence& sequence, std::vector<Step> chain,
                                                                       const std::vector<bool>& wanted) {
  std::vector<RecurrentState> snapshots(chain.size());
  for (size_t i = 0; i < chain.size(); ++i) {
    if (!wanted[i]) continue;
    snapshots[i] = RecurrentState(runtime_.model.config());
    chain[i].snapshot = &snapshots[i];
  }
  const absl::Status status = engine_.Advance(sequence, chain, {.on_layer = [](int32_t layer) { return layer == 0; }});
  if (!absl::IsCancelled(status)) return status.ok() ? absl::InternalError("a model of one layer") : status;
  std::vector<std::vector<float>> states;
  for (size_t i = 0; i < chain.size(); ++i) {
    if (!wanted[i]) continue;
    const std::span<const float> state = snapshots[i].State(0);
    states.emplace_back(state.begin(), state.end());
  }
  return states;
}

double Layer0Fidelity::WorstHead(const std::vector<std::vector<float>>& states,
                                 const std::vector<std::vector<float>>& truth) const {
  const auto& linear = runtime_.model.config().linear;
  const size_t head_floats = size_t{1} * linear.d_k * linear.d_v;
  double worst = 0;
  for (size_t i = 0; i < truth.size(); ++i) {
    for (int32_t h = 0; h < linear.value_heads; ++h) {
      worst = std::max(worst, RelativeL2(std::span(states[i]).subspan(h * head_floats, head_floats),
                                         std::span(truth[i]).subspan(h * head_floats, head_floats)));
    }
  }
  return worst;
}

absl::StatusOr<std::optional<Layer0Error>> Layer0Fidelity::Measure(const RagPrompt& prompt, SetPrompt& set,
                                                                   refengine::KvPages& pool) {
  // The same cuts are made in the whole prompt.
  std::vector<bool> wanted;
  std::vector<Step> whole;
  uint64_t position = 0;
  for (const Step& step : set.chain) {
    const uint64_t count = static_cast<uint64_t>(step.count());
    whole.push_back(Step::Compute(std::span(prompt.tokens).subspan(position, count)));
    position += count;
    wanted.push_back(!step.cached.empty() && !step.checkpoint);
  }
  if (std::find(wanted.begin(), wanted.end(), true) == wanted.end()) return std::nullopt;

  Sequence sequence(runtime_.model.config(), pool);
  const auto truth = States(sequence, whole, wanted);
  if (!truth.ok()) return truth.status();
  auto error_with = [&](const ReplacedTransitions* replaced) -> absl::StatusOr<double> {
    std::vector<Step> chain = set.chain;
    std::vector<refengine::LayerTables> layers;
    layers.reserve(chain.size());
    for (size_t i = 0; i < chain.size() && replaced != nullptr; ++i) {
      if (!wanted[i]) continue;
      chain[i].cached = layers.emplace_back((*replaced)(chain[i].cached)).layers();
    }
    set.sequence->Rewind(0, RecurrentState(runtime_.model.config()));
    const auto states = States(*set.sequence, chain, wanted);
    if (!states.ok()) return states.status();
    return WorstHead(*states, *truth);
  };
  Layer0Error error;
  for (auto [target, replaced] : {std::pair<double*, const ReplacedTransitions*>{&error.ashlar, nullptr},
                                  {&error.naive, &identity_},
                                  {&error.zero_transition, &zero_}}) {
    const absl::StatusOr<double> value = error_with(replaced);
    if (!value.ok()) return value.status();
    *target = *value;
  }
  return error;
}

}  // namespace ashlar::rag
