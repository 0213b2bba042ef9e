// SPDX-License-Identifier: Apache-2.0
// EncodePlan, DecodePlan: a plan as a string of bytes, by which a scheduler passes its lookup to the processes that
// land it.
//
//   magic "ASPL" | version u32 | bytes u64 | fields | XXH3-64 of all before it
//
// Little endian, fixed order; each list follows its count. The lease, not the bytes, gives access. The bytes name the
// objects to request from the daemon, and each process checks the daemon's answer.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/key.h"

namespace ashlar::engine {

inline constexpr uint32_t kPlanVersion = 1;

struct PlannedLanding {
  uint32_t tensor_parallel_size = 1;
  NamespaceId ns{};
  std::array<uint8_t, 16> lease{};  // all zero: nothing was found
  uint64_t tokens = 0;              // tokens of the prompt
  std::vector<uint64_t> segment_lengths;
  uint64_t prefix_tokens = 0;      // 0: no prefix was landed
  std::vector<uint32_t> segments;  // segments to land, ascending
  std::vector<uint64_t> captures;  // depths at which the daemon asks for states, ascending
  bool operator==(const PlannedLanding&) const = default;
};

std::string EncodePlan(const PlannedLanding& plan);
// Accepts exactly what EncodePlan makes. INVALID_ARGUMENT begins with the field's name: "version: 2, and this build
// reads 1 only".
absl::StatusOr<PlannedLanding> DecodePlan(std::span<const uint8_t> bytes);

}  // namespace ashlar::engine
