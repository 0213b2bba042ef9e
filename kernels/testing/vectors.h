// SPDX-License-Identifier: Apache-2.0
// Checks a back end against independent test vectors, computed by a program that shares no code with this project.
#pragma once

#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/testing/vectors_file.h"

namespace ashlar::kernels::testing {

// One comparison: the largest error over all heads, segments or keys that it covers.
struct VectorCheck {
  std::string operation;  // name in kernels.h
  std::string what;       // the compared result: "final state", "attention"
  std::string vectors;    // for example "gdn, 2 heads of 6 x 4, 26 tokens, key first" or "rope[1], half_split 4 of 10"
  double error = 0;       // relative, Frobenius; a transition's relative to ‖T‖, but at least to 0.1
  double bound = 0;
  bool passes() const { return error <= bound; }
};

// Every operation that the vectors cover, in both state orders, and all keys in all three forms.
std::vector<VectorCheck> CheckVectors(const VectorsFile& file, const Kernels& kernels);

// The two parts of CheckVectors.
std::vector<VectorCheck> CheckLinear(const std::vector<LinearVector>& vectors, const Kernels& kernels);
std::vector<VectorCheck> CheckRope(const std::vector<RopeVector>& vectors, const Kernels& kernels);

}  // namespace ashlar::kernels::testing
