// SPDX-License-Identifier: Apache-2.0
// Search: one look-up, cut into slices.
#pragma once

#include <cstddef>
#include <cstdint>
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

// The work of one Cache::Lookup. Anything may happen to the cache between slices. The search holds the objects that it
// has found, so they stay in place; an object published meanwhile is found if the search has not passed its query yet.
// A drain that begins after the search does not refuse it. The last slice grants the lease; if the session has ended by
// then, or has no room any more, everything is missed.
class Search {
 public:
  // As Cache::Lookup. `matcher`, the queries and `prompt` (null: none) must outlive it. `tenant`: none for a session
  // that is unknown. `refused`: everything is missed for that reason.
  Search(Matcher& matcher, SessionId session, std::optional<TenantId> tenant, std::span<const Query> queries,
         const PrefixText* prompt, HasRoom has_room, const LeaseId& name, MissReason refused);
  ~Search();  // of one that is given up: what it held is given back by LeaseTable::Settle
  Search(const Search&) = delete;
  Search& operator=(const Search&) = delete;

  // A step for each look-up, of a prefix's objects, too. False: there is more to do.
  bool Run(Slice& slice);
  // Returns the answer, once, after the last slice. Its objects stay valid as long as its lease.
  Match Take() { return std::move(match_); }

 private:
  enum class Stage : uint8_t { kBegin, kPeek, kChoose, kHold, kFind, kAnswer, kAnswerPrefix, kSettle, kDone };

  // One function for each stage. False: the slice is over; else `stage_` is the next stage.
  bool Begin(Slice& slice);
  bool Peek(Slice& slice);
  bool Choose();
  bool Hold(Slice& slice);
  bool Find(Slice& slice);
  bool Answer(Slice& slice);
  bool AnswerPrefix(Slice& slice);
  bool Settle(Slice& slice);

  bool GoTo(Stage stage);  // true
  bool PrefixIsKnown();    // or that there is none: the segments are next
  void LetPrefixGo();
  void DropPrefix(MissReason instead);
  void Grant();
  void RefuseAll(MissReason reason, bool counted);

  Matcher& matcher_;
  const SessionId session_;
  const TenantId tenant_;
  const std::span<const Query> queries_;
  const PrefixText* const prompt_;
  const HasRoom has_room_;
  const LeaseId name_;
  MissReason refused_;

  Stage stage_ = Stage::kBegin;
  size_t next_ = 0;     // of what the stage goes through
  uint64_t begin_ = 0;  // of the next query in the prompt
  size_t listed_ = 0;   // objects that the queries may find, in all shards
  Nanos needed_at_ = 0;
  Matcher::Verified verified_;

  std::vector<CoverSegment> segments_;  // as far as can be seen without using them
  std::vector<Prefixes::Candidate> candidates_;
  Prefixes::Candidate chosen_;
  std::vector<Query> of_prefix_;  // the objects that the chosen candidate needs
  LeasedObjects objects_;         // of this, what is held so far
  Matcher::Others others_;        // other shards of these
  FoundPrefix prefix_;

  LeasedObjects found_;  // one a query, then the prefix's objects
  Matcher::Others of_found_;
  Matcher::Others lost_;  // found, and gone before the answer
  bool any_ = false;      // is held
  Match match_;
};

}  // namespace ashlar::storage
