// SPDX-License-Identifier: Apache-2.0
// Search: one lookup, divided into slices.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "storage/ids.h"
#include "storage/lookup/match.h"
#include "storage/lookup/matcher.h"
#include "storage/prefix/cover.h"
#include "storage/prefix/prefixes.h"
#include "storage/slice.h"

namespace ashlar::storage {

// The work of one Cache::Lookup. The cache may change between slices. The search holds the objects it has found, so
// they stay in place. An object published meanwhile is found if its query has not been processed yet. A drain that
// starts later does not refuse the search. The last slice grants the lease; if the session has ended by then, or is at
// its limit, everything is missed.
class Search {
 public:
  // Arguments as in Cache::Lookup. `matcher`, the queries and `prompt` (may be null) must outlive the search. `tenant`
  // is empty for an unknown session. `refused`: everything is missed for that reason.
  Search(Matcher& matcher, SessionId session, std::optional<TenantId> tenant, std::span<const Query> queries,
         const PrefixText* prompt, HasSpace has_space, const LeaseId& name, MissReason refused);
  ~Search();  // an unfinished search leaves what it holds to LeaseTable::Settle
  Search(const Search&) = delete;
  Search& operator=(const Search&) = delete;

  // One step per lookup, including a prefix's objects. Returns false if more is left. Waits for memory that a tier gets
  // from the system, if the slice can wait.
  bool Run(Slice& slice);
  // Returns the result, once, after the last slice. Its objects are valid as long as its lease.
  Match Take() { return std::move(match_); }

 private:
  enum class Stage : uint8_t { kBegin, kWeigh, kPeek, kChoose, kHold, kFind, kAnswer, kAnswerPrefix, kSettle, kDone };

  // One function per stage. Returns false at the end of the slice; otherwise `stage_` is the next stage.
  bool Begin(Slice& slice);
  bool Weigh(Slice& slice);
  bool Peek(Slice& slice);
  bool Choose();
  bool Hold(Slice& slice);
  bool Find(Slice& slice);
  bool Answer(Slice& slice);
  bool AnswerPrefix(Slice& slice);
  bool Settle(Slice& slice);

  bool GoTo(Stage stage);  // returns true
  // Ends the prefix stages (a prefix was chosen or none exists) and starts with the segments.
  bool PrefixIsKnown();
  // Returns true if the slice now waits for the memory that the query's object will be promoted to.
  bool WaitsForMemory(const Query& query, Slice& slice);
  bool SumBlocks(bool own, Slice& slice);
  PromotionCost::Load LoadOf(const Prefixes::Candidate& candidate) const;
  void ExcludeSlow();
  void LetPrefixGo();
  void DropPrefix(MissReason instead);
  void Grant();
  void RefuseAll(MissReason reason, bool counted);

  Matcher& matcher_;
  const SessionId session_;
  const TenantId tenant_;
  const std::span<const Query> queries_;
  const PrefixText* const prompt_;
  const HasSpace has_space_;
  const LeaseId name_;
  MissReason refused_;

  Stage stage_ = Stage::kBegin;
  size_t next_ = 0;     // index among the items of the stage
  uint64_t begin_ = 0;  // position of the next query in the prompt
  size_t listed_ = 0;   // objects in all shards that the queries may find
  Nanos needed_at_ = 0;
  const std::shared_ptr<bool> may_wait_ = std::make_shared<bool>(true);  // the system has not refused memory
  Matcher::Verified verified_;

  std::vector<CoverSegment> segments_;  // as far as known without using them
  std::vector<Prefixes::Candidate> candidates_;
  // Of the shared blocks and the conversation's own: element i is the load of the first i blocks.
  std::array<std::vector<PromotionCost::Load>, 2> blocks_;
  Prefixes::Candidate chosen_;
  std::vector<Query> of_prefix_;  // objects that the chosen candidate needs
  LeasedObjects objects_;         // held objects of of_prefix_
  Matcher::Others others_;        // other shards of these
  FoundPrefix prefix_;

  LeasedObjects found_;  // one per query, then the prefix's objects
  Matcher::Others of_found_;
  Matcher::Others lost_;  // found first, but lost before the end
  bool any_ = false;      // any object is held
  Match match_;
};

}  // namespace ashlar::storage
