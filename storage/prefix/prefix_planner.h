// SPDX-License-Identifier: Apache-2.0
// PrefixPlanner: exact reuse of prefixes. It knows what prompts share, where they may resume, where to checkpoint, and
// what is kept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "absl/container/btree_set.h"
#include "storage/policy/reuse_model.h"
#include "storage/prefix/checkpoint_budget.h"
#include "storage/prefix/checkpoint_plan.h"
#include "storage/prefix/overlap_model.h"
#include "storage/prefix/prefix_entry.h"

namespace ashlar::storage {

struct PrefixPlannerOptions {
  uint64_t capacity_bytes = 0;
  uint64_t history_bytes = uint64_t{64} << 20;  // of what is known of prompts; twice that where what is kept takes more
  uint64_t capture_tokens = 1;   // engines can checkpoint inside a prompt at multiples of it; at ends always
  size_t most_checkpoints = 32;  // that a request is asked for
  size_t most_placed = 8;        // of these, where prompts are expected to part
  uint64_t seed = 1;
};

// The planner of one namespace. Its tree remembers more prefixes than are kept: those that were passed, or would have
// been resumed from. So a prefix that was given up still counts as wanted, and a branch is known when its second prompt
// comes, however long after.
//
// The planner answers three questions together. *Which* prefixes deserve a checkpoint: points where prompts part
// (Marconi §4.1), ends of requests, and, in new text, points where later prompts are likely to part (Sparse Prefix
// Caching §4, by a model of where earlier prompts did). *Where inside an edge*: a dynamic program places as many as pay
// at the going price of a byte. *Which leave*: the cheapest by checkpoint_budget.h, whose price takes the likelihood of
// reuse from reuse_model.h. One thread.
class PrefixPlanner {
 public:
  PrefixPlanner(const PrefixCosts& costs, const PrefixPlannerOptions& options);

  struct Match {
    uint64_t resume = 0;                  // tokens that need not be computed
    uint64_t shared = 0;                  // with any earlier prompt that is known
    std::vector<uint64_t> resumable;      // depths that are kept by states, rising
    std::vector<PrefixNode*> kept;        // their nodes, until the next call of Commit or Lookup
    std::vector<uint64_t> checkpoint_at;  // depths in (resume, prompt's end], rising, that are worth capturing
    // Spans that reach into the prompt: states can be rebuilt at every depth behind `begin`, up to `depth`.
    struct Span {
      PrefixNode* end = nullptr;  // that is kept by it
      uint64_t begin = 0, depth = 0;
    };
    std::vector<Span> spans;
    PrefixNode* lease = nullptr;  // the prefix to resume from stays until Commit or Release
  };
  // A request comes. Learns from it, too: once a request. Its match ends by Commit or Release, once. `rebuilds`:
  // its engine resumes from spans, too.
  Match Lookup(std::span<const int32_t> prompt, bool rebuilds = false);
  // The prompt was computed: `tokens` begin with the prompt, the decoded ones follow. Offers the checkpoints at
  // `captured` (rising in (0, tokens.size()]) and at the end, and returns how many of them are kept. Ends the lease. If
  // `span` reaches to the end from a depth that is kept by states, and takes less than states would, the end is kept by
  // the span.
  struct SpanOffer {
    uint64_t begin = 0;
    uint64_t bytes = 0;
  };
  size_t Commit(Match match, std::span<const int32_t> tokens, uint64_t prompt, std::span<const uint64_t> captured,
                const std::optional<SpanOffer>& span = {});
  // The same without a look-up before: what is known of the tokens by now is what they share.
  size_t Commit(std::span<const int32_t> tokens, uint64_t prompt, std::span<const uint64_t> captured,
                const std::optional<SpanOffer>& span = {});
  void Release(Match match);

  // For the owner of the bytes. `gone` is called for every prefix whose checkpoint is given up: pages of the edges on
  // the way to it that nobody needs any more are of no use either.
  void WhenGone(std::function<void(PrefixNode&)> gone);
  // Tells that the owner of the bytes has lost what the prefix is kept by; the spans that hang on it are lost too.
  // Harmless if it is not kept.
  void Lost(std::span<const int32_t> prefix);
  void Lost(PrefixNode& node);
  // Checkpoints, or spans, of one text that nobody committed: an earlier run left them on the disk. By their depths,
  // rising.
  struct Found {
    uint64_t depth = 0;
    std::optional<SpanOffer> span;
  };
  enum class Recovery : uint8_t {
    kKnown,     // the prefix was kept before
    kKept,      // it is now
    kDeclined,  // worth less than the checkpoints that would have to leave, or nothing without the states it hangs on
  };
  // Tells of them, in one pass over the text; one outcome each.
  std::vector<Recovery> Recover(std::span<const int32_t> tokens, std::span<const Found> found);

  enum class Kept : uint8_t { kNot, kByStates, kBySpan };
  Kept IsKept(std::span<const int32_t> prefix) const;
  static Kept IsKept(const PrefixNode& node);

  const PrefixCosts& costs() const { return costs_; }
  const CheckpointBudget& budget() const { return budget_; }
  const PrefixTree<PrefixEntry>& tree() const { return tree_; }  // to look at
  size_t nodes() const { return tree_.nodes(); }
  uint64_t history_tokens() const { return tree_.tokens(); }
  uint64_t history_bytes() const { return tree_.bytes(); }

 private:
  static constexpr RequestTime kLeastRefresh = 20;  // requests between two looks at all that goes on
  static constexpr size_t kSweep = 64;              // entries looked at a request, and leaves that cannot be erased
  static constexpr size_t kRefreshed = 16;          // one in so many of these has its price looked at
  static constexpr size_t kHanging = 64;            // spans from one depth: a look-up compares with each
  static constexpr double kPlacedMargin = 4;        // guesses pay so many times the going price: few are right

  struct Leaf {
    RequestTime visited;
    uint64_t serial;
    PrefixNode* node;
    bool operator<(const Leaf& other) const {
      return visited != other.visited ? visited < other.visited : serial < other.serial;
    }
  };

  // `passed`: the nodes that are prefixes of the prompt.
  static std::vector<Match::Span> Spans(const PrefixTree<PrefixEntry>::Reached& reached,
                                        std::span<PrefixNode* const> passed);
  // Keeps the end of a text, by a span if it is worth it.
  bool AdmitEnd(PrefixNode& end, const std::optional<SpanOffer>& span);
  static bool MayBear(const PrefixNode& base);  // whether a span may hang on it
  void LearnParting(PrefixEntry& edge, uint64_t depth);
  void Use(PrefixNode& node);
  void MakeCandidate(PrefixNode& node, ReuseKind kind);
  std::vector<uint64_t> Wanted(std::span<PrefixNode* const> passed, uint64_t resume, size_t most);
  std::vector<uint64_t> Placed(uint64_t resume, uint64_t shared, uint64_t prompt) const;

  using Tree = PrefixTree<PrefixEntry>;

  PrefixNode& NodeAt(std::span<const int32_t> prefix);
  // `shared`: none: what is known of the tokens by now.
  size_t Keep(std::span<const int32_t> tokens, uint64_t prompt, std::span<const uint64_t> captured,
              const std::optional<SpanOffer>& span, std::optional<uint64_t> shared);
  // Nodes for a text and for its beginnings of `cuts` tokens, all of which it visits.
  Tree::Inserted Extend(std::span<const int32_t> tokens, uint64_t prompt, std::span<const uint64_t> cuts = {});
  void AdoptSplit(const Tree::Made& made);
  void Adopt(PrefixNode& node);
  void Disown(PrefixNode& node);
  void Visit(PrefixNode& node);
  void Trim();
  bool DropOldest();  // false: it is kept, or leased
  void Sweep();

  // Assign the stored blocks' keys when an edge is split, or joined to the edge behind it.
  void SplitKeys(PrefixNode& node, PrefixNode& behind) const;
  void JoinKeys(PrefixNode& node) const;

  const PrefixCosts costs_;
  const PrefixPlannerOptions options_;
  std::function<void(PrefixNode&)> gone_;
  PrefixTree<PrefixEntry> tree_;
  ReuseModel reuse_;
  OverlapModel overlap_;
  CheckpointBudget budget_;
  RequestTime now_ = 0, refreshed_ = 0;
  std::vector<PrefixNode*> nodes_;  // all but the root
  size_t swept_ = 0;                // of them, since the last Refresh
  uint64_t serials_ = 0;
  absl::btree_set<Leaf> leaves_;  // oldest first
};

}  // namespace ashlar::storage
