// SPDX-License-Identifier: Apache-2.0
// The inputs of a composition beside cached tuples: an engine's running states, and the tokens between interiors.
//
// The caller has checked that all pointers here lie inside memory that `keep` keeps mapped, that outputs overlap
// nothing else, that runs ascend inside the inputs, that objects and layers are of one namespace, and that a GPU's
// bounds hold. Storage itself
// checks that the tuples' shapes fit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/gpu.h"
#include "kernels/kernels.h"
#include "proto/outcome.h"

namespace ashlar::storage {

// The states of all heads of one layer, one behind the other.
struct StatePlace {
  std::byte* data = nullptr;  // [heads][d_k, d_v] or [heads][d_v, d_k], in the shape's order
  DType dtype = DType::kF32;
  int32_t* exponents = nullptr;  // [heads], of fp16
};

struct Composition {
  struct Interior {
    uint32_t segment = 0;         // in the match
    uint64_t first_position = 0;  // where the segment's token 0 stands
  };
  struct Step {
    std::optional<size_t> interior;  // index into `interiors`; none: the run [begin, end)
    int64_t begin = 0, end = 0;
    std::optional<StatePlace> checkpoint;  // out
  };
  struct Layer {
    uint32_t layer = 0;          // index into layout.layers
    kernels::LinearShape shape;  // its tables live as long as `keep`
    StatePlace state;            // in and out
    std::vector<Step> steps;     // of AdvanceSeam. None: Compose, of all interiors in order
    kernels::TokenInputs inputs;
    float* out = nullptr;
    int64_t out_stride = 0;  // in floats
  };
  std::vector<Interior> interiors;    // in the prompt's order
  std::vector<Layer> layers;          // run one after another
  const kernels::Gpu* gpu = nullptr;  // in whose memory all states, inputs and outputs lie; null: the processor's
  std::shared_ptr<const void> keep;
};

// Bounds of one layer of a composition on a GPU: pointers, that pass through a queue's ring, and what the GPU keeps
// between its kernels, 4 bytes for each number of a state or checkpoint of 16-bit floats with exponents.
inline constexpr uint64_t kMaxGpuPointerBytes = 8 << 20;
inline constexpr uint64_t kMaxGpuScratchBytes = 256 << 20;
uint64_t GpuPointerBytes(const Composition::Layer& layer, size_t interiors);
uint64_t GpuScratchBytes(const Composition::Layer& layer);

struct CompositionVerdict {
  // kNone: done. Otherwise the states are as they were, unless it is kCancelled, which may come in the middle.
  MissReason outcome = MissReason::kNone;
  std::vector<MissReason> interiors;  // which of them cannot be had, and why; as many as were asked for
};

}  // namespace ashlar::storage
