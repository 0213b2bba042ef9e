// The inputs of a text's last tokens, from where the engine records them to where the daemon reads them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ashlar/client.h"
#include "examples/refengine/engine.h"

namespace ashlar::talk {

class SpanStaging {
 public:
  // Of a region, for so many tokens.
  static size_t Bytes(const refengine::ModelConfig& config, uint64_t tokens);

  // `at`: Bytes of a region. `dtype`: in which keys and values are offered.
  SpanStaging(const refengine::ModelConfig& config, std::byte* at, uint64_t tokens, DType dtype);
  SpanStaging(const SpanStaging&) = delete;
  SpanStaging& operator=(const SpanStaging&) = delete;

  // From now on the engine records what it computes from `begin` on.
  void Begin(uint64_t begin) { tape_.begin = static_cast<int64_t>(begin); }
  const refengine::SpanTape& tape() const { return tape_; }
  // Writes the first `tokens` recorded ones to the region, and says where.
  CapturedSpan Take(uint64_t tokens);

 private:
  struct Layer {
    uint32_t layer;
    std::vector<float> keys, values, gates, betas, conv_inputs;
  };

  const DType dtype_;
  const uint64_t tokens_;
  std::byte* const at_;
  std::vector<Layer> layers_;
  std::vector<refengine::SpanRows> rows_;
  refengine::SpanTape tape_;
};

}  // namespace ashlar::talk
