// SPDX-License-Identifier: Apache-2.0
// The inputs of a composition other than cached tuples: an engine's running states, and the tokens between interiors.
//
// The caller has checked that all pointers lie in memory that `keep` keeps mapped, that outputs overlap nothing else,
// that runs ascend inside the inputs, that objects and layers are of one namespace, and that a GPU's limits hold.
// Storage checks that the shapes of the tuples fit.
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

// The states of all heads of one layer, contiguous.
struct StatePlace {
  std::byte* data = nullptr;  // [heads][d_k, d_v] or [heads][d_v, d_k], in the shape's order
  DType dtype = DType::kF32;
  int32_t* exponents = nullptr;  // [heads], for fp16
};

struct Composition {
  struct Interior {
    uint32_t segment = 0;         // index in the match
    uint64_t first_position = 0;  // position of the segment's token 0
  };
  struct Step {
    std::optional<size_t> interior;  // index into `interiors`; empty: the run [begin, end)
    int64_t begin = 0, end = 0;
    std::optional<StatePlace> checkpoint;  // output
  };
  struct Layer {
    uint32_t layer = 0;          // index into layout.layers
    kernels::LinearShape shape;  // its tables must live as long as `keep`
    StatePlace state;            // input and output
    std::vector<Step> steps;     // steps of AdvanceSeam; empty: Compose, all interiors in order
    kernels::TokenInputs inputs;
    float* out = nullptr;
    int64_t out_stride = 0;  // floats
  };
  std::vector<Interior> interiors;    // ordered as in the prompt
  std::vector<Layer> layers;          // run one after another
  const kernels::Gpu* gpu = nullptr;  // GPU of all states, inputs and outputs; null for host memory
  std::shared_ptr<const void> keep;
};

// Limits of one layer of a composition on a GPU: pointers, which pass through a queue's ring, and scratch memory
// between kernels, 4 bytes per element of a 16-bit state or checkpoint with exponents.
inline constexpr uint64_t kMaxGpuPointerBytes = 8 << 20;
inline constexpr uint64_t kMaxGpuScratchBytes = 256 << 20;
uint64_t GpuPointerBytes(const Composition::Layer& layer, size_t interiors);
uint64_t GpuScratchBytes(const Composition::Layer& layer);

struct CompositionVerdict {
  // kNone: done. Otherwise the states are unchanged, except for kCancelled, which may happen halfway.
  MissReason outcome = MissReason::kNone;
  std::vector<MissReason> interiors;  // why interiors are missing, one entry per requested interior
};

}  // namespace ashlar::storage
