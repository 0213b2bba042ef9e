// The inputs of a composition beside cached tuples: an engine's running states, and the tokens between interiors.
//
// The caller has checked that all pointers here lie inside memory that `keep` keeps mapped, that outputs overlap
// nothing else, that runs ascend inside the inputs, and that objects and layers are of one namespace. Storage itself
// checks that the tuples' shapes fit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

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
  std::vector<Interior> interiors;  // in the prompt's order
  std::vector<Layer> layers;        // run one after another
  std::shared_ptr<const void> keep;
};

struct CompositionVerdict {
  // kNone: done. Otherwise the states are as they were, unless it is kCancelled, which may come in the middle.
  MissReason outcome = MissReason::kNone;
  std::vector<MissReason> interiors;  // which of them cannot be had, and why; as many as were asked for
};

}  // namespace ashlar::storage
