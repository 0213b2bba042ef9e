// SPDX-License-Identifier: Apache-2.0
#include "examples/rag/daemon_advancer.h"

namespace ashlar::rag {

DaemonAdvancer::DaemonAdvancer(engine::Request& request, const refengine::ModelConfig& config) : request_(request) {
  const engine::Plan& plan = request.plan();
  const bool resumes = plan.step_count > 0 && plan.steps[0].kind == engine::StepKind::kCheckpoint;
  position_.assign(static_cast<size_t>(config.layers()), resumes ? plan.steps[0].end : 0);
}

bool DaemonAdvancer::Advance(int32_t layer, const kernels::AdvanceSeamArgs& args) {
  const engine::Plan& plan = request_.plan();
  uint64_t& position = position_[static_cast<size_t>(layer)];
  engine::LayerAdvance asked{.layer = static_cast<uint32_t>(layer), .begin = position};
  std::vector<engine::StateCopy> copies;
  uint32_t at = 0;
  for (const kernels::SeamStep& step : args.steps) {
    if (step.interior != nullptr) {
      while (plan.steps[at].begin < position) ++at;
      position = plan.steps[at].end;
    } else {
      position += static_cast<uint64_t>(step.end - step.begin);
    }
    // Heads of a state are consecutive.
    if (step.checkpoint != nullptr) copies.push_back({position, {.data = step.checkpoint->heads[0]}});
  }
  const kernels::TokenInputs& rows = args.inputs;
  asked.end = position;
  asked.inputs = {static_cast<uint64_t>(rows.tokens),
                  rows.q,
                  rows.k,
                  rows.v,
                  rows.g,
                  rows.beta,
                  rows.q_stride,
                  rows.k_stride,
                  rows.v_stride,
                  rows.g_stride,
                  rows.beta_stride};
  asked.state.data = args.state.heads[0];
  asked.out = args.out;
  asked.out_stride = args.out_stride;
  asked.copies = copies.data();
  asked.copy_count = static_cast<uint32_t>(copies.size());
  return request_.Advance(asked).ok();
}

}  // namespace ashlar::rag
