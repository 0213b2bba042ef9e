// SPDX-License-Identifier: Apache-2.0
// Advancing one linear layer along a part of a prompt's chain, by kernels in this process or by the daemon.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ashlar/engine.h"
#include "client/engine/cache_state.h"
#include "client/engine/staging.h"
#include "client/engine/token_rows.h"
#include "client/session/client.h"
#include "kernels/kernels.h"
#include "kernels/layer_shape.h"

namespace ashlar::engine {

// A cached step, or a run of the inputs, and the place for a copy of the state after it.
struct ChainPiece {
  const Step* cached = nullptr;  // null: a run
  uint32_t step = 0;             // step of the plan, if cached
  uint64_t tokens = 0;           // tokens of a run
  const State* copy = nullptr;   // null: no copy
};

// Cuts [begin, end) of the chain at its steps and at the copies' positions. kInvalidArgument names the field.
Status CutChain(std::span<const Step> steps, uint64_t prompt_tokens, const LayerAdvance& advance,
                std::vector<ChainPiece>& pieces);

// Checks that each input of the family has at least one row per token, for `tokens` tokens, and that rows do not
// overlap. kInvalidArgument names the field, with prefix `field`.
Status CheckRows(const kernels::LinearShape& shape, const TokenRows& rows, bool outputs, const std::string& field);
// Checks one stride likewise, in floats; 0 means the row's width.
Status CheckRowStride(uint64_t tokens, int64_t stride, int64_t width, const std::string& field);
// Checks the outputs of a LayerAdvance or an AloneLayer.
template <typename Layer>
Status CheckOutStride(const kernels::LinearShape& shape, const Layer& layer, const std::string& field) {
  if (layer.out == nullptr) return {};
  return CheckRowStride(layer.inputs.tokens, layer.out_stride, RowWidths(shape).values, field + ".out_stride");
}
// The layer's outputs. Rows of consecutive tokens are dense unless the layer gives a stride.
template <typename Layer>
void SetOutStride(const kernels::LinearShape& shape, Layer& layer) {
  if (layer.out_stride == 0) layer.out_stride = RowWidths(shape).values;
}
Status CheckState(const State& state, const std::string& field);
// Checks the arguments of ComputeAlone. kInvalidArgument names the field.
Status CheckAlone(const LinearLayer& layer, const AloneLayer& alone);
kernels::TokenInputs InputsOf(const TokenRows& rows);

// Elements from one head to the next.
uint64_t HeadStride(const State& state, const kernels::LinearShape& shape);
// kInvalidArgument if heads overlap. It names the field, with prefix `field`.
Status CheckHeadStride(const State& state, const kernels::LinearShape& shape, const std::string& field);
// Returns the addresses of the heads of a state.
std::vector<void*> HeadsOf(const State& state, const kernels::LinearShape& shape);

// Advances by kernels in this process. `views`: one for each cached piece.
void AdvanceHere(const kernels::LinearShape& shape, const LayerAdvance& advance, std::span<const ChainPiece> pieces,
                 std::span<const kernels::TupleView> views, kernels::Queue& queue);

// Computes outputs and tuple from a zero state.
void ComputeAlone(const kernels::LinearShape& shape, const AloneLayer& alone, kernels::Queue& queue);

// Advances by the daemon, in as many calls as its limits require. Pieces are interiors and runs.
class DaemonAdvance {
 public:
  DaemonAdvance(CacheState& cache, const ashlar::Match& match, const LinearLayer& layer, const LayerAdvance& advance)
      : cache_(cache), match_(match), layer_(layer), shape_(kernels::ShapeOf(layer)), advance_(advance) {}

  // False: failed; states and outputs are then undefined. Adds segments that are unusable to `lost`.
  bool Run(std::span<const ChainPiece> pieces, std::vector<uint32_t>& lost);

 private:
  uint64_t StateBytes(const State& state) const;
  // Copies rows densely into memory that the daemon can read.
  float* Stage(const float* rows, int64_t stride, uint64_t first, uint64_t tokens, int64_t width,
               Staging::Held& held) const;
  RunningState Stage(const State& state, Staging::Held& held, bool with_content) const;
  void CopyOut(const RunningState& from, const State& to) const;
  kernels::TokenInputs StageInputs(uint64_t first, uint64_t tokens, Staging::Held& held) const;
  uint64_t StagedBytes(std::span<const ChainPiece> pieces, uint64_t tokens) const;
  bool RunPart(std::span<const ChainPiece> pieces, uint64_t first_token, uint64_t tokens, std::vector<uint32_t>& lost);

  CacheState& cache_;
  const ashlar::Match& match_;
  const LinearLayer& layer_;
  const kernels::LinearShape shape_;
  const LayerAdvance& advance_;
};

}  // namespace ashlar::engine
