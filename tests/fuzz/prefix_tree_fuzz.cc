// SPDX-License-Identifier: Apache-2.0
// The prefix tree, and the planner over it: a byte string is a list of operations. The tree must be what a list of
// sequences is; what the planner keeps must sum up, within its capacity.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "storage/prefix/prefix_planner.h"
#include "storage/testing/prefix_recount.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/input.h"

namespace {

using namespace ashlar::storage;
using Tokens = std::vector<int32_t>;

constexpr size_t kMostKnown = 64, kMostOperations = 256;  // bounds the time of an input

class TreeInput : public ashlar::fuzz::Input {
 public:
  using Input::Input;
  // A number of first tokens of a known sequence, then runs of a few tokens each.
  Tokens Sequence(const std::vector<Tokens>& known) {
    Tokens tokens;
    const uint8_t shape = Byte();
    if (!known.empty() && (shape & 1) != 0) {
      const Tokens& some = known[Byte() % known.size()];
      tokens.assign(some.begin(), some.begin() + static_cast<ptrdiff_t>(std::min<size_t>(Byte(), some.size())));
    }
    for (int runs = shape >> 6; runs > 0; --runs) {
      const uint8_t run = Byte();
      tokens.insert(tokens.end(), run >> 3, run & 7);
    }
    return tokens;
  }
};

size_t Common(const Tokens& a, const Tokens& b) {
  return static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

// Returns all nodes' prefixes, from the tree's own edges, and checks the nodes' own descriptions.
std::set<Tokens> Prefixes(const PrefixTree<int>& tree) {
  std::set<Tokens> prefixes;
  uint64_t tokens = 0;
  std::vector<std::pair<PrefixTree<int>::Node*, Tokens>> open = {{&tree.root(), {}}};
  while (!open.empty()) {
    const auto [node, prefix] = open.back();
    open.pop_back();
    FUZZ_EXPECT(node->depth() == prefix.size());
    node->ForEachChild([&, parent = node, before = prefix](PrefixTree<int>::Node& child) {
      FUZZ_EXPECT(child.parent() == parent && child.begin() == parent->depth() && !child.edge().empty());
      tokens += child.edge().size();
      Tokens whole = before;
      whole.insert(whole.end(), child.edge().begin(), child.edge().end());
      open.emplace_back(&child, std::move(whole));
    });
    if (node->parent() != nullptr) FUZZ_EXPECT(prefixes.insert(prefix).second);
  }
  FUZZ_EXPECT(prefixes.size() == tree.nodes() && tokens == tree.tokens());
  return prefixes;
}

void Tree(TreeInput input) {
  PrefixTree<int> tree;
  std::set<Tokens> model;
  std::vector<Tokens> known;
  for (size_t step = 0; !input.empty() && step < kMostOperations; ++step) {
    const bool inserts = input.Byte() % 3 != 0 && known.size() < kMostKnown;
    const Tokens tokens = input.Sequence(known);
    size_t depth = 0;
    for (const Tokens& other : model) depth = std::max(depth, Common(other, tokens));
    const auto reached = tree.Walk(tokens);
    FUZZ_EXPECT(reached.depth == depth);
    FUZZ_EXPECT(reached.node->depth() <= depth && (reached.inside == nullptr) == (reached.node->depth() == depth));
    if (inserts) {
      const auto inserted = tree.Insert(tokens);
      const Tokens split(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(depth));
      FUZZ_EXPECT(inserted.parted.has_value() == (depth > 0 && !model.contains(split)));
      FUZZ_EXPECT(inserted.added == (depth < tokens.size()) && inserted.node->depth() == tokens.size());
      if (depth > 0) model.insert(split);
      if (!tokens.empty()) model.insert(tokens);
      known.push_back(tokens);
    } else if (reached.node->parent() != nullptr && reached.node->children() < 2) {
      model.erase(Tokens(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(reached.node->depth())));
      reached.node->leaf() ? tree.Remove(*reached.node) : tree.Merge(*reached.node);
    }
    FUZZ_EXPECT(Prefixes(tree) == model);
  }
}

void Cache(TreeInput input) {
  const uint8_t shape = input.Byte();
  const PrefixCosts costs{.page_tokens = (shape & 1) != 0 ? 16u : 1u,
                          .page_bytes = (shape & 1) != 0 ? 160u : 10u,
                          .checkpoint_bytes = 100,
                          .flops_per_token = 1,
                          .flops_per_square = 0.01};
  const uint64_t capacity = uint64_t{input.Byte()} * 32, capture = (shape & 2) != 0 ? 8 : 1;
  const bool spans = (shape & 4) != 0;
  PrefixPlanner planner(costs, {.capacity_bytes = capacity, .history_bytes = 6000, .capture_tokens = capture});
  std::vector<Tokens> known;
  std::vector<std::pair<Tokens, PrefixPlanner::Match>> running;
  for (size_t step = 0; !input.empty() && step < kMostOperations; ++step) {
    const uint8_t operation = input.Byte();
    if (operation % 2 == 0 && running.size() < 8) {
      Tokens prompt = input.Sequence(known);
      if (known.size() < kMostKnown) known.push_back(prompt);
      PrefixPlanner::Match match = planner.Lookup(prompt, spans);
      for (const PrefixPlanner::Match::Span& span : match.spans) {
        FUZZ_EXPECT(span.begin < span.depth && span.depth <= match.resume && span.depth <= span.end->depth());
      }
      FUZZ_EXPECT(match.resume <= match.shared && match.shared <= prompt.size());
      FUZZ_EXPECT((match.lease == nullptr) == (match.resume == 0));
      uint64_t before = match.resume;
      for (const uint64_t at : match.checkpoint_at) {
        FUZZ_EXPECT(at > before && at <= prompt.size() && at % capture == 0);
        before = at;
      }
      running.emplace_back(std::move(prompt), std::move(match));
    } else if (!running.empty()) {
      auto [tokens, match] = std::move(running[operation / 4 % running.size()]);
      running.erase(running.begin() + static_cast<ptrdiff_t>(operation / 4 % running.size()));
      const size_t prompt = tokens.size();
      tokens.insert(tokens.end(), operation >> 5, 1);
      std::vector<uint64_t> captured = match.checkpoint_at;
      std::optional<PrefixPlanner::SpanOffer> span;
      if (spans && prompt > 1 && tokens.size() > prompt) {
        span = {.begin = prompt - 1, .bytes = operation};
        captured.push_back(prompt - 1);
      }
      std::ranges::sort(captured);
      if ((operation & 2) != 0)
        planner.Release(match);
      else
        FUZZ_EXPECT(planner.Commit(match, tokens, prompt, captured, span) <= captured.size() + 1);
    }
    const PrefixRecount count = Recount(planner.tree().root(), costs);
    FUZZ_EXPECT(count.needs_hold && count.bytes == planner.budget().bytes() &&
                planner.budget().peak_bytes() <= capacity);
    FUZZ_EXPECT(count.kept.size() == planner.budget().checkpoints() + planner.budget().spans());
    FUZZ_EXPECT(count.spans_hold && count.spans == planner.budget().spans() && count.nodes.size() == planner.nodes());
    for (const auto& [tokens, match] : running) FUZZ_EXPECT(match.lease == nullptr || match.lease->data.kept);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Tree(TreeInput(data, size));
  Cache(TreeInput(data, size));
  return 0;
}
