// SPDX-License-Identifier: Apache-2.0
// Test vectors as a file holds them: JSON in the form that vectors_test.cc describes.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "kernels/linear.h"
#include "kernels/rotation.h"

namespace ashlar::kernels::testing {

// One head of a linear layer. Matrices are row-major and k-first: states [d_k, d_v]; transitions [d_k, d_k], mamba1's
// elementwise [d_k, d_v].
struct LinearVector {
  struct Segment {
    int64_t tokens = 0;
    std::vector<double> transition, state;
  };
  Family family = Family::kGdn;
  int32_t d_k = 0, d_v = 0;
  int64_t tokens = 0;
  std::vector<double> q, k, v;      // [tokens, d_k], [tokens, d_k], [tokens, d_v]
  std::vector<double> gate, beta;   // as g and beta of TokenInputs; empty if the family has none
  std::vector<double> decay_table;  // as LinearShape::decay_table
  std::vector<double> initial_state, final_state;
  std::vector<double> outputs;    // [tokens, d_v]
  std::vector<Segment> segments;  // sorted; contain all tokens
};

// Keys of one head that occur in a prompt twice or more, and one query over all of them.
struct RopeVector {
  struct Landed {
    int64_t start = 0;
    std::vector<double> keys;  // [rows, dim]
  };
  // Points into `frequencies`.
  Rotation rotation() const { return {.style = style, .rotary_dim = rotary_dim, .frequencies = frequencies.data()}; }

  RopeStyle style = RopeStyle::kNone;
  int32_t rotary_dim = 0;
  std::vector<double> frequencies;
  int32_t dim = 0, value_dim = 0;
  int64_t rows = 0;
  std::vector<double> unrotated, zero_based;  // [rows, dim]
  std::vector<double> values;                 // [rows, value_dim]
  std::vector<Landed> landed;
  std::vector<double> query;  // [dim], unrotated
  int64_t query_position = 0;
  std::vector<double> attention;  // [value_dim], scores scaled by 1/√dim
};

struct VectorsFile {
  std::vector<LinearVector> linear;
  std::vector<RopeVector> rope;
};

// The vectors, or an error that names the field: "linear[3].tokens[7].beta: not a number". Either section may be
// missing or empty; other sections are ignored.
std::variant<VectorsFile, std::string> ParseVectors(const std::string& text);

}  // namespace ashlar::kernels::testing
