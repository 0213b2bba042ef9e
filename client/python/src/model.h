// SPDX-License-Identifier: Apache-2.0
// A model as the package's dataclasses describe it (ashlar/model.py), in the engine API's structs.
#pragma once

#include <nanobind/nanobind.h>

#include <deque>
#include <string>
#include <vector>

#include "ashlar/engine.h"
#include "client/python/src/arrays.h"

namespace ashlar::python {

// Numbers of one linear layer that arrays are checked against, on this process's shard.
struct LinearWidths {
  uint64_t heads = 0, keys = 0, values = 0, gates = 0, betas = 0;  // floats per token
  uint64_t state = 0, transition = 0;                              // elements of all heads
  uint64_t conv_tail_bytes = 0, conv_rows = 1;                     // rows of tokens, or of channels (conv_order)
  uint64_t decays = 0;                                             // number of log decays of all heads
  uint64_t conv_channels = 0;                                      // convolution inputs per token
  DType state_dtype = DType{}, conv_dtype = DType{};
  bool opaque = false;  // `state` is bytes, in an array of any type
};

// Owns all that `model` points to.
class ModelDescription {
 public:
  // Throws TypeError or ValueError naming the field.
  explicit ModelDescription(nb::handle model);
  ModelDescription(const ModelDescription&) = delete;
  ModelDescription& operator=(const ModelDescription&) = delete;

  const engine::Model& model() const { return model_; }
  // Throws ValueError unless the layer has a state.
  const LinearWidths& Linear(uint32_t layer, const std::string& name = "layer") const;

 private:
  const char* Keep(const std::string& name, nb::handle text);
  const double* KeepDoubles(const std::string& name, nb::handle numbers);
  const float* KeepFloats(const std::string& name, nb::handle numbers);
  engine::Rope ReadRope(const std::string& name, nb::handle given);
  engine::Layer ReadLayer(nb::handle given, uint32_t index);

  engine::Model model_;
  std::vector<engine::Layer> layers_;
  std::vector<LinearWidths> widths_;  // indexed by layer; zero for layers without a state
  std::deque<std::string> texts_;
  std::deque<std::vector<double>> doubles_;
  std::deque<std::vector<float>> floats_;
};

}  // namespace ashlar::python
