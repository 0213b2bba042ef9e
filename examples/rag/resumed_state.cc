#include "examples/rag/resumed_state.h"

#include <algorithm>
#include <cstring>
#include <variant>
#include <vector>

namespace ashlar::rag {

refengine::RecurrentState ResumedState(const Runtime& runtime, const Layout& layout, const Match& match) {
  const refengine::ModelConfig& config = runtime.model.config();
  refengine::RecurrentState resumed(config);
  const MappedSpan* const span = match.prefix_span();
  for (int32_t layer = 0; layer < config.layers(); ++layer) {
    if (config.is_attention(layer)) continue;
    const MappedTuple& checkpoint = (*match.prefix_states())[layer];
    const std::span<float> state = resumed.State(config.kind_index(layer));
    const std::span<float> window = resumed.ConvWindow(config.kind_index(layer));
    std::vector<void*> heads;
    for (int32_t head = 0; head < config.linear.value_heads; ++head) {
      heads.push_back(state.data() + head * config.linear.state_floats());
      std::memcpy(heads.back(), checkpoint.view.heads[head].state, config.linear.state_floats() * sizeof(float));
    }
    if (span == nullptr) {
      std::memcpy(window.data(), checkpoint.conv_tail, window.size_bytes());
      continue;
    }
    const SpanInputs inputs(std::get<LinearLayer>(layout.layers[layer]), *span, static_cast<uint32_t>(layer));
    const kernels::SeamStep run{.begin = 0, .end = static_cast<int64_t>(span->tokens)};
    runtime.kernels
        .AdvanceSeam({.shape = runtime.model.linear_shape(layer),
                      .steps = {&run, 1},
                      .inputs = inputs.inputs(),
                      .state = {.heads = heads.data()}},
                     runtime.queue)
        .Wait();
    const std::vector<std::byte> tail = inputs.ConvTail(checkpoint.conv_tail);
    std::memcpy(window.data(), tail.data(), tail.size());
  }
  return resumed;
}

}  // namespace ashlar::rag
