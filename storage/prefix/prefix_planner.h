// SPDX-License-Identifier: Apache-2.0
// PrefixPlanner: decides on exact prefixes: what prompts share, where they may resume, where to checkpoint, and what is
// kept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "storage/policy/reuse_model.h"
#include "storage/prefix/checkpoint_budget.h"
#include "storage/prefix/checkpoint_plan.h"
#include "storage/prefix/overlap_plans.h"
#include "storage/prefix/prefix_entry.h"
#include "storage/prefix/prefix_history.h"

namespace ashlar::storage {

struct PrefixPlannerOptions {
  uint64_t capacity_bytes = 0;
  uint64_t history_bytes = uint64_t{64} << 20;  // knowledge of prompts; twice that if the kept part takes more
  uint64_t capture_tokens = 1;   // engines can checkpoint inside a prompt at multiples of it; at ends always
  size_t most_checkpoints = 32;  // requested per prompt
  size_t most_placed = 8;        // checkpoints at predicted divergence points; at most most_checkpoints
  uint64_t seed = 1;
};

// The planner of one namespace. Its tree remembers more prefixes than are kept: those that prompts passed or would have
// resumed from. So an evicted prefix still counts as wanted, and a branch is recognized when its second prompt comes,
// however much later.
//
// The planner answers three questions together. *Which* prefixes deserve a checkpoint: points where prompts diverge
// (Marconi §4.1), ends of requests and, in new text, points where later prompts will probably diverge (Sparse Prefix
// Caching §4, by a model of earlier divergences). *Where inside an edge*: a dynamic program places as many as pay for
// themselves at the going price per byte. *Which are evicted*: the cheapest by checkpoint_budget.h, whose price uses
// the likelihood of reuse from reuse_model.h. One thread only.
class PrefixPlanner {
 public:
  using Tree = PrefixHistory::Tree;

  // `background`: learns and plans outside Lookup (overlap_plans.h).
  PrefixPlanner(const PrefixCosts& costs, const PrefixPlannerOptions& options,
                OverlapPlans::Background background = {});

  struct Match {
    uint64_t resume = 0;                  // tokens that need not be computed
    uint64_t shared = 0;                  // tokens shared with any known earlier prompt
    std::vector<uint64_t> resumable;      // depths kept by states, ascending
    std::vector<PrefixNode*> kept;        // their nodes; valid until the next Commit or Lookup
    std::vector<uint64_t> checkpoint_at;  // depths in (resume, end of the prompt] worth capturing, ascending
    // Spans that reach into the prompt: states can be rebuilt at every depth after `begin`, up to `depth`.
    struct Span {
      PrefixNode* end = nullptr;  // prefix that the span keeps
      uint64_t begin = 0, depth = 0;
    };
    std::vector<Span> spans;
    PrefixNode* lease = nullptr;   // the prefix to resume from; stays until Commit or Release
    PrefixNode* missed = nullptr;  // the deepest known prefix, if it is deeper than `resume` and not kept
  };
  // Handles and learns from a request. Its match must be ended once, by Commit or Release. `rebuilds`: the engine can
  // also resume from spans.
  Match Lookup(std::span<const int32_t> prompt, bool rebuilds = false);
  // The prompt was computed. `tokens` are the prompt followed by the decoded tokens. Offers the checkpoints at
  // `captured` (ascending, in (0, tokens.size()]) and at the end, and returns how many are kept. Ends the lease. If
  // `span` reaches the end from a depth kept by states and takes fewer bytes than states would, the end is kept by the
  // span.
  struct SpanOffer {
    uint64_t begin = 0;
    uint64_t bytes = 0;
  };
  size_t Commit(Match match, std::span<const int32_t> tokens, uint64_t prompt, std::span<const uint64_t> captured,
                const std::optional<SpanOffer>& span = {});
  // The same without a lookup: the shared part is what is known of the tokens now.
  size_t Commit(std::span<const int32_t> tokens, uint64_t prompt, std::span<const uint64_t> captured,
                const std::optional<SpanOffer>& span = {});
  void Release(Match match);

  // For the owner of the bytes. `gone` is called for every prefix whose checkpoint is evicted; pages on the path to it
  // without other users are then useless too.
  void WhenGone(std::function<void(PrefixNode&)> gone);
  // The owner of the bytes has lost what keeps the prefix; its dependent spans are lost too. Ignored if it is not kept.
  void Lost(std::span<const int32_t> prefix);
  void Lost(PrefixNode& node);
  // Checkpoints or spans of one text that an earlier run left on the disk. Sorted by depth.
  struct Found {
    uint64_t depth = 0;
    std::optional<SpanOffer> span;
  };
  enum class Recovery : uint8_t {
    kKnown,     // the prefix was already kept
    kKept,      // the prefix is now kept
    kDeclined,  // worth less than the checkpoints that would have to be evicted, or useless without its base
  };
  // Adds them in one pass over the text; one outcome each.
  std::vector<Recovery> Recover(std::span<const int32_t> tokens, std::span<const Found> found);

  enum class Kept : uint8_t { kNot, kByStates, kBySpan };
  Kept IsKept(std::span<const int32_t> prefix) const;
  static Kept IsKept(const PrefixNode& node);
  static bool IsEnd(const PrefixEntry& entry);  // whether a request ended there

  const PrefixCosts& costs() const { return costs_; }
  const CheckpointBudget& budget() const { return budget_; }
  const Tree& tree() const { return history_.tree(); }  // used for inspection only
  size_t nodes() const { return tree().nodes(); }
  uint64_t history_tokens() const { return tree().tokens(); }
  uint64_t history_bytes() const { return tree().bytes() + overlaps_.bytes(); }

 private:
  static constexpr RequestTime kLeastRefresh = 20;  // requests between two refreshes
  static constexpr size_t kSweep = 64;              // entries checked per request, and leaves that cannot be erased
  static constexpr size_t kRefreshed = 16;          // one in this many has its price recomputed
  static constexpr size_t kHanging = 64;            // spans per base; a lookup compares with each
  // The m-th predicted point must be worth this multiple of the going price, times m²: few are right, and the best one
  // most often.
  static constexpr double kPlacedMargin = 4;
  // Guesses are placed while the checkpoints of one prompt take at most this fraction of the free space.
  static constexpr uint64_t kAmple = 128;

  // `passed` are the nodes that are prefixes of the prompt.
  static std::vector<Match::Span> Spans(const Tree::Reached& reached, std::span<PrefixNode* const> passed);
  // Keeps the end of a text, by a span if that is worth it.
  bool AdmitEnd(PrefixNode& end, const std::optional<SpanOffer>& span);
  static bool MayBear(const PrefixNode& base);  // whether a span may depend on it
  void LearnParting(PrefixEntry& edge, uint64_t depth);
  // `passed`: candidates that the prompt passed; it resumes from `resume` (null: from the start) at `depth`.
  void Credit(std::span<PrefixNode* const> passed, PrefixNode* resume, uint64_t depth);
  void Use(PrefixNode& node);
  void MakeCandidate(PrefixNode& node, ReuseKind kind);
  void Continue(PrefixNode& end);  // the last turn of a conversation ends here
  std::vector<uint64_t> Wanted(std::span<PrefixNode* const> passed, uint64_t resume, size_t most);
  std::vector<uint64_t> Placed(const CheckpointPlan::Prompt& prompt);

  // `shared`: empty means what is known of the tokens now.
  size_t Keep(std::span<const int32_t> tokens, uint64_t prompt, std::span<const uint64_t> captured,
              const std::optional<SpanOffer>& span, std::optional<uint64_t> shared);
  void Trim();
  bool DropOldest();  // false if it is kept or leased
  void Sweep();

  const PrefixCosts costs_;
  const PrefixPlannerOptions options_;
  std::function<void(PrefixNode&)> gone_;
  PrefixHistory history_;
  ReuseModel reuse_;
  OverlapPlans overlaps_;
  CheckpointBudget budget_;
  RequestTime now_ = 0, refreshed_ = 0;
  size_t swept_ = 0;  // number checked since the last Refresh
};

}  // namespace ashlar::storage
