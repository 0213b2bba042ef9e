// SPDX-License-Identifier: Apache-2.0
// Names of families, element types and state orders, for test vectors, figures and tests.
#pragma once

#include <string>

#include "kernels/dtype.h"
#include "kernels/linear.h"

namespace ashlar::kernels::testing {

inline constexpr Family kFamilies[] = {Family::kRetnet, Family::kLightning, Family::kMamba2, Family::kMamba1,
                                       Family::kGla,    Family::kDeltanet,  Family::kGdn,    Family::kKda};

inline std::string Name(Family family) {
  static constexpr const char* kNames[] = {"retnet", "lightning", "mamba2", "mamba1", "gla", "deltanet", "gdn", "kda"};
  return kNames[static_cast<size_t>(family) - 1];
}

inline std::string Name(DType dtype) {
  static constexpr const char* kNames[] = {"fp32", "fp16", "bf16", "e4m3", "e5m2"};
  return kNames[static_cast<size_t>(dtype) - 1];
}

inline std::string Name(StateOrder order) {
  return order == StateOrder::kKeyFirst ? "key_first" : "value_first";
}

}  // namespace ashlar::kernels::testing
