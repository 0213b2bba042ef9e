// SPDX-License-Identifier: Apache-2.0
// The parts of one layer between its norm and its residual, for all rows of a pass: the two token mixers and the MLP.
// Each keeps scratch memory that grows to the largest pass and is then reused.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "examples/refengine/pass.h"
#include "kernels/kernels.h"

namespace ashlar::refengine {

// The objects that all parts of an engine share.
struct Machine {
  const Model& model;
  const kernels::Kernels& kernels;
  kernels::Workers& workers;
  kernels::Queue& queue;
};

// Adds the time it lives to one part of a profile.
class Stopwatch {
 public:
  Stopwatch(Profile* profile, Part part) : profile_(profile), part_(part), begin_(Clock::now()) {}
  ~Stopwatch() {
    if (profile_ != nullptr) (*profile_)[part_] += std::chrono::duration<double>(Clock::now() - begin_).count();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  Profile* profile_;
  Part part_;
  Clock::time_point begin_;
};

// Memory that is kept between calls; its contents are lost when it grows.
class Scratch {
 public:
  float* Get(int64_t floats) {
    if (floats > size_) {
      data_ = std::make_unique_for_overwrite<float[]>(floats);
      size_ = floats;
    }
    return data_.get();
  }

 private:
  std::unique_ptr<float[]> data_;
  int64_t size_ = 0;
};

// Calls fn(row) for all rows, in blocks, on all workers.
template <typename Fn>
void ForRows(kernels::Workers& workers, int64_t rows, Fn&& fn) {
  constexpr int64_t kBlock = 32;
  kernels::ParallelFor(workers, (rows + kBlock - 1) / kBlock, [&](int64_t block) {
    for (int64_t row = block * kBlock; row < std::min(rows, (block + 1) * kBlock); ++row) fn(row);
  });
}

// Gated delta net, or lightning's recurrence instead. `normed` and `residual` are [rows, d_model].
class LinearMixer {
 public:
  explicit LinearMixer(const Machine& machine) : machine_(machine) {}
  // False: the options' advancer failed.
  bool Run(int32_t layer, const Pass& pass, const float* normed, float* residual, RecurrentState& recurrent,
           const AdvanceOptions& options);

 private:
  void Convolve(int32_t layer, const Pass& pass, RecurrentState& recurrent);
  void SaveWindows(int32_t layer, const Pass& pass, RecurrentState& recurrent);
  void ComputeGates(const LinearWeights& weights, int64_t rows);
  void Rotate(int32_t layer, const Pass& pass);
  void Record(int32_t layer, const Pass& pass, const SpanTape& tape) const;
  void Capture(int32_t layer, const Pass& pass);
  void JoinCapture(int32_t layer, const TupleBuffers& buffers, float* transition, float* state, float* earlier);
  bool Advance(int32_t layer, const Pass& pass, RecurrentState& recurrent, SeamAdvancer* advancer);
  const float* ConvInput(const TokenRun& run, int32_t layer, const RecurrentState& recurrent, int64_t row) const;
  void CopyWindow(const TokenRun& run, int32_t layer, const RecurrentState& recurrent, int64_t end, float* out) const;
  kernels::TokenInputs Inputs(int64_t begin, int64_t end) const;
  int64_t columns() const { return machine_.model.config().linear.columns(); }

  const Machine& machine_;
  Scratch projected_memory_, convolved_memory_, gates_memory_, mixed_memory_, capture_memory_, window_memory_,
      angles_memory_;
  float* projected_ = nullptr;  // [rows, columns()]
  float* convolved_ = nullptr;  // [rows, conv_channels]
  float* gates_ = nullptr;      // [rows, gate_channels]: g, β
  float* mixed_ = nullptr;      // [rows, value_channels]
};

// Grouped-query attention over paged keys and values.
class AttentionMixer {
 public:
  explicit AttentionMixer(const Machine& machine) : machine_(machine), lanes_(machine.workers.Size()) {}
  void Run(int32_t layer, const Pass& pass, const float* normed, float* residual, const Sequence& sequence,
           Profile* profile);

 private:
  struct Block {         // queries of one run that share one head's keys
    int64_t begin, end;  // rows
    int64_t position;    // position of row `begin`
    int32_t kv_head;
  };
  struct Lane {
    Scratch queries, scores, accumulated, max, sum;
  };
  void RotateAndStore(int32_t layer, const Pass& pass, const Sequence& sequence);
  void GatherRows(int32_t layer, const Pass& pass, const Sequence& sequence);
  void Attend(const Pass& pass);
  void AttendInPlace(int32_t layer, const Pass& pass, const Sequence& sequence);
  void AttendBlock(const Block& block, Lane& lane);
  void Finish(const Block& block, const float* accumulated, const float* sum);
  int64_t query_dim() const;
  int64_t kv_dim() const;
  int64_t columns() const { return 2 * query_dim() + 2 * kv_dim(); }  // q, output gate, k, v

  const Machine& machine_;
  std::vector<Lane> lanes_;  // one per worker
  Scratch projected_memory_, rows_memory_, mixed_memory_, angles_memory_, lse_memory_;
  float* projected_ = nullptr;  // [rows, columns()]
  float* mixed_ = nullptr;      // [rows, query_dim()]
  float* keys_ = nullptr;       // [kv_heads, positions, head_dim], gathered from the pages
  float* values_ = nullptr;     // [kv_heads, positions, head_dim], gathered from the pages
  int64_t positions_ = 0;
};

class Mlp {
 public:
  explicit Mlp(const Machine& machine) : machine_(machine) {}
  void Run(int32_t layer, int64_t rows, const float* normed, float* residual);

 private:
  const Machine& machine_;
  Scratch gate_up_memory_;
};

}  // namespace ashlar::refengine
