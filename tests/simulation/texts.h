// SPDX-License-Identifier: Apache-2.0
// The segments of all simulations: their plans, the sources that engines publish, and the results of composing them.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "storage/testing/engine.h"
#include "storage/transfer/transfer.h"

namespace ashlar::simulation {

using storage::TenantId;

inline constexpr int kTenants = 2;  // numbers 1 and 2
inline constexpr uint64_t kTexts = 7;
inline constexpr uint64_t kBundle[] = {3, 4};  // texts that are the shards of one key

// One text of one tenant. Tenants have the same texts with different numbers in them.
using Text = std::pair<TenantId, uint64_t>;
inline uint64_t ContentOf(const Text& text) {
  return text.first * 100 + text.second;
}

// Created once per process, like the sources that engines publish; neither ever changes.
const std::map<Text, ObjectHeader>& Plans();
std::vector<Text> BundleOf(const Text& text);
inline bool IsOf(const ObjectHeader& header, const Text& text) {
  const ObjectHeader& plan = Plans().at(text);
  return header.key == plan.key && header.shard == plan.shard;
}

// Returns the source that an engine publishes. Most engines share memory, because filling it takes longer than
// publishing from it; every eighth one has separate memory, which is freed with its last reference.
storage::PublishSource SourceOf(const Text& text, uint64_t publish);

// All heads' states of a linear layer before a composition; and the expected states after composing the texts'
// interiors in order, computed by the reference from what was published.
std::vector<float> StateBefore();
const std::vector<float>& StateAfter(uint32_t layer, const std::vector<Text>& texts);

}  // namespace ashlar::simulation
