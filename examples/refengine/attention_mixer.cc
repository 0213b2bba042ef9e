// SPDX-License-Identifier: Apache-2.0
// Blocked attention: a block of queries passes over blocks of keys with two matrix products and a running softmax, so
// that scores never leave the cache. Query heads that share a key head share its blocks.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "examples/refengine/matrix.h"
#include "examples/refengine/mixers.h"
#include "examples/refengine/rows.h"

namespace ashlar::refengine {
namespace {

constexpr int64_t kQueryBlock = 64;  // tokens, times the query heads of one key head
constexpr int64_t kKeyBlock = 512;

float* SlotOf(const kernels::PagedSlots& slots, int64_t position, int32_t head) {
  return static_cast<float*>(slots.base) + slots.page_table[position / slots.page_tokens] * slots.page_stride +
         position % slots.page_tokens * slots.token_stride + head * slots.head_stride;
}

}  // namespace

int64_t AttentionMixer::query_dim() const {
  const AttentionConfig& attention = machine_.model.config().attention;
  return int64_t{attention.query_heads} * attention.head_dim;
}

int64_t AttentionMixer::kv_dim() const {
  const AttentionConfig& attention = machine_.model.config().attention;
  return int64_t{attention.kv_heads} * attention.head_dim;
}

void AttentionMixer::Run(int32_t layer, const Pass& pass, const float* normed, float* residual,
                         const Sequence& sequence, Profile* profile) {
  const int32_t d_model = machine_.model.config().d_model;
  const AttentionWeights& weights = machine_.model.weights().layers[layer].attention;
  const int64_t rows = pass.rows();
  projected_ = projected_memory_.Get(rows * columns());
  mixed_ = mixed_memory_.Get(rows * query_dim());
  {
    const Stopwatch watch(profile, Part::kProjections);
    MatMul({.m = rows,
            .n = columns(),
            .k = d_model,
            .a = normed,
            .a_stride = d_model,
            .b = weights.input.data(),
            .b_stride = columns(),
            .c = projected_,
            .c_stride = columns()},
           machine_.workers);
  }
  {
    const Stopwatch watch(profile, Part::kAttention);
    RotateAndStore(layer, pass, sequence);
    if (sequence.shared().empty()) {
      GatherRows(layer, pass, sequence);
      Attend(pass);
    } else if (pass.rows() > 0) {
      AttendInPlace(layer, pass, sequence);
    }
  }
  const Stopwatch watch(profile, Part::kProjections);
  MatMul({.m = rows,
          .n = d_model,
          .k = query_dim(),
          .a = mixed_,
          .a_stride = query_dim(),
          .b = weights.output.data(),
          .b_stride = d_model,
          .c = residual,
          .c_stride = d_model,
          .accumulate = true},
         machine_.workers);
}

// Normalises and rotates queries and keys in place; keys and values are written to their pages. For shared keys the
// kernels rotate the queries for each span. Angles are in fp64: in fp32 they err by 0.001 rad at position 32 k.
void AttentionMixer::RotateAndStore(int32_t layer, const Pass& pass, const Sequence& sequence) {
  const ModelConfig& config = machine_.model.config();
  const AttentionConfig& attention = config.attention;
  const AttentionWeights& weights = machine_.model.weights().layers[layer].attention;
  const std::vector<double>& frequencies = machine_.model.frequencies();
  const int64_t pairs = frequencies.size();
  const int32_t index = config.kind_index(layer), dim = attention.head_dim;
  const kernels::PagedSlots key_slots = sequence.pool().Keys(index, sequence.page_table().data());
  const kernels::PagedSlots value_slots = sequence.pool().Values(index, sequence.page_table().data());
  float* angles = angles_memory_.Get(pass.rows() * 2 * pairs);
  ForRows(machine_.workers, pass.rows(), [&](int64_t row) {
    float* cosines = angles + row * 2 * pairs;
    float* sines = cosines + pairs;
    const int64_t position = pass.positions[row];
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const double angle = static_cast<double>(position) * frequencies[pair];
      cosines[pair] = static_cast<float>(std::cos(angle));
      sines[pair] = static_cast<float>(std::sin(angle));
    }
    float* query = projected_ + row * columns();
    for (int32_t head = 0; head < attention.query_heads; ++head, query += dim) {
      RmsNorm(query, weights.q_norm.data(), config.norm_epsilon, dim, query);
      if (sequence.shared().empty()) RotateHalfSplit(query, cosines, sines, pairs);
    }
    float* key = projected_ + row * columns() + 2 * query_dim();
    for (int32_t head = 0; head < attention.kv_heads; ++head, key += dim) {
      RmsNorm(key, weights.k_norm.data(), config.norm_epsilon, dim, key);
      RotateHalfSplit(key, cosines, sines, pairs);
      std::memcpy(SlotOf(key_slots, position, head), key, dim * sizeof(float));
      std::memcpy(SlotOf(value_slots, position, head), key + kv_dim(), dim * sizeof(float));
    }
  });
}

// Copies all keys and values that this pass can see from their pages, head by head, so that blocks of them are
// matrices.
void AttentionMixer::GatherRows(int32_t layer, const Pass& pass, const Sequence& sequence) {
  const AttentionConfig& attention = machine_.model.config().attention;
  const int32_t index = machine_.model.config().kind_index(layer);
  const int32_t dim = attention.head_dim, page_tokens = sequence.pool().page_tokens();
  positions_ = pass.rows() == 0 ? 0 : pass.positions.back() + 1;
  const int64_t floats = attention.kv_heads * positions_ * dim;
  keys_ = rows_memory_.Get(2 * floats);
  values_ = keys_ + floats;
  const kernels::PagedSlots sources[] = {sequence.pool().Keys(index, sequence.page_table().data()),
                                         sequence.pool().Values(index, sequence.page_table().data())};
  float* const targets[] = {keys_, values_};
  kernels::ParallelFor(machine_.workers, (positions_ + page_tokens - 1) / page_tokens, [&](int64_t page) {
    const int64_t end = std::min(positions_, (page + 1) * page_tokens);
    for (int32_t which = 0; which < 2; ++which) {
      for (int32_t head = 0; head < attention.kv_heads; ++head) {
        for (int64_t position = page * page_tokens; position < end; ++position) {
          std::memcpy(targets[which] + (head * positions_ + position) * dim, SlotOf(sources[which], position, head),
                      dim * sizeof(float));
        }
      }
    }
  });
}

void AttentionMixer::Attend(const Pass& pass) {
  std::vector<Block> blocks;
  for (const TokenRun& run : pass.runs) {
    for (int64_t begin = run.begin; begin < run.end; begin += kQueryBlock) {
      for (int32_t kv_head = 0; kv_head < machine_.model.config().attention.kv_heads; ++kv_head) {
        blocks.push_back({begin, std::min(run.end, begin + kQueryBlock), run.position + begin - run.begin, kv_head});
      }
    }
  }
  // The longest first: a later block sees more keys.
  std::reverse(blocks.begin(), blocks.end());
  std::atomic<size_t> next{0};
  kernels::ParallelFor(machine_.workers, static_cast<int64_t>(lanes_.size()), [&](int64_t lane) {
    for (size_t i = next++; i < blocks.size(); i = next++) AttendBlock(blocks[i], lanes_[lane]);
  });
}

void AttentionMixer::AttendBlock(const Block& block, Lane& lane) {
  const AttentionConfig& attention = machine_.model.config().attention;
  const int64_t dim = attention.head_dim, group = attention.query_heads / attention.kv_heads;
  const int64_t tokens = block.end - block.begin, rows = group * tokens;
  float* queries = lane.queries.Get(group * kQueryBlock * dim);
  float* scores = lane.scores.Get(group * kQueryBlock * kKeyBlock);
  float* accumulated = lane.accumulated.Get(group * kQueryBlock * dim);
  float* max = lane.max.Get(group * kQueryBlock);
  float* sum = lane.sum.Get(group * kQueryBlock);
  for (int64_t row = 0; row < rows; ++row) {  // [group, tokens, dim]
    const int64_t head = block.kv_head * group + row / tokens;
    std::memcpy(queries + row * dim, projected_ + (block.begin + row % tokens) * columns() + head * dim,
                dim * sizeof(float));
  }
  std::fill(max, max + rows, -std::numeric_limits<float>::infinity());
  std::fill(sum, sum + rows, 0.0f);
  std::fill(accumulated, accumulated + rows * dim, 0.0f);

  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const int64_t seen = block.position + tokens;  // keys that the block's last query sees
  for (int64_t first = 0; first < seen; first += kKeyBlock) {
    const int64_t count = std::min(kKeyBlock, seen - first);
    const int64_t offset = (block.kv_head * positions_ + first) * dim;
    MatMul({.m = rows,
            .n = count,
            .k = dim,
            .a = queries,
            .a_stride = dim,
            .b = keys_ + offset,
            .b_stride = dim,
            .b_transposed = true,
            .c = scores,
            .c_stride = kKeyBlock,
            .scale = scale});
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t visible = std::clamp<int64_t>(block.position + row % tokens + 1 - first, 0, count);
      const float rescale = OnlineSoftmax(scores + row * kKeyBlock, visible, count, max[row], sum[row]);
      if (rescale != 1.0f) Scale(accumulated + row * dim, rescale, dim);
    }
    MatMul({.m = rows,
            .n = dim,
            .k = count,
            .a = scores,
            .a_stride = kKeyBlock,
            .b = values_ + offset,
            .b_stride = dim,
            .c = accumulated,
            .c_stride = dim,
            .accumulate = true});
  }
  Finish(block, accumulated, sum);
}

// Divides by the softmax's sum and applies the output gate.
void AttentionMixer::Finish(const Block& block, const float* accumulated, const float* sum) {
  const AttentionConfig& attention = machine_.model.config().attention;
  const int64_t dim = attention.head_dim, group = attention.query_heads / attention.kv_heads;
  const int64_t tokens = block.end - block.begin;
  for (int64_t row = 0; row < group * tokens; ++row) {
    const int64_t head = block.kv_head * group + row / tokens, token = block.begin + row % tokens;
    float* out = mixed_ + token * query_dim() + head * dim;
    std::memcpy(out, accumulated + row * dim, dim * sizeof(float));
    SigmoidGate(out, projected_ + token * columns() + query_dim() + head * dim, 1.0f / sum[row], dim);
  }
}

}  // namespace ashlar::refengine
