// SPDX-License-Identifier: Apache-2.0
// Prober: estimates what a lookup of a prompt would find, without leases and without changing anything.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "proto/outcome.h"
#include "storage/history/explanation.h"
#include "storage/ids.h"
#include "storage/lookup/match.h"
#include "storage/objects/object_finder.h"
#include "storage/objects/object_table.h"
#include "storage/prefix/cover.h"
#include "storage/prefix/prefixes.h"
#include "storage/prefix/stored_prefixes.h"
#include "storage/slice.h"

namespace ashlar::storage {

// How much of a prompt a lookup would find.
struct Probed {
  static constexpr size_t kTiers = PromotionCost::kSources;
  uint64_t prefix_tokens = 0;             // tokens of the exact prefix from which the prompt would resume
  uint64_t segment_tokens = 0;            // tokens of interiors after it; seams are computed
  std::array<uint64_t, kTiers> tokens{};  // the same, by the tier of their nearest copies (TierKind)
  Nanos fetch = 0;                        // time to load and land their objects; 0: not known
};

// The work of one Cache::StartProbe, in slices; what the cache has may change between them. It takes the cover that a
// lookup would take (Search), with these differences: headers are not verified, a span counts only if the prompt
// contains all of it, and nothing is probed that has not paid lately (PromotionCost::Pays).
class Prober {
 public:
  // `level` is where the engine lands from. `head` and `tail` are the seams of the model. The queries and `prompt` (may
  // be null) must outlive the object. `refused`: a lookup would miss everything.
  Prober(ObjectTable& table, const ObjectFinder& finder, const Prefixes& prefixes, const Clock& clock, TenantId tenant,
         size_t level, std::span<const Query> queries, const PrefixText* prompt, uint64_t head, uint64_t tail,
         bool refused);
  Prober(const Prober&) = delete;
  Prober& operator=(const Prober&) = delete;

  // One step per object. Returns false if more is left.
  bool Run(Slice& slice);
  const Probed& result() const { return probed_; }  // after the last slice

 private:
  enum class Stage : uint8_t { kAsk, kBlocks, kSegments, kChoose, kDone };
  // Objects that are used together: their loads, and their tokens by tier.
  struct Part {
    PromotionCost::Load load;
    std::array<uint64_t, Probed::kTiers> tokens{};
    Part& operator+=(const Part& other);
  };

  void AddCandidates(bool own);
  Part PartOf(const Query& query, uint64_t tokens) const;
  Part PartOf(const Prefixes::Candidate& candidate) const;
  bool SumBlocks(bool own, Slice& slice);
  void ExcludeSlow();
  void Choose();

  ObjectTable& table_;
  const ObjectFinder& finder_;
  const Prefixes& prefixes_;
  const StoredPrefixes stored_;
  const TenantId tenant_;
  const size_t level_;
  const std::span<const Query> queries_;
  const PrefixText* const prompt_;
  const uint64_t head_, tail_;
  Stage stage_;
  size_t next_ = 0;                              // index of the next query
  uint64_t begin_ = 0;                           // its position in the prompt
  std::vector<Prefixes::Candidate> candidates_;  // one per depth, ascending
  std::array<std::vector<Part>, 2> blocks_;      // shared and own: element i is the sum of the first i blocks
  std::vector<CoverSegment> segments_;
  std::vector<Part> of_segments_;
  Probed probed_;
};

}  // namespace ashlar::storage
