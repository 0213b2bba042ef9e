// SPDX-License-Identifier: Apache-2.0
// `ashlar-bench prefix`: what the prefix tree and the planner over it cost. A prompt is walked against comparing its
// tokens alone; requests and evictions among a million nodes, against a look-up in a hash table of as many.
#include <malloc.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "storage/prefix/prefix_planner.h"
#include "tools/bench/bench.h"

namespace ashlar::bench {
namespace {

using storage::PrefixEntry;
using storage::PrefixNode;
using Tokens = std::vector<int32_t>;
using Tree = storage::PrefixTree<PrefixEntry>;

constexpr size_t kPromptTokens = 131'072;
constexpr size_t kWalkedSets = 64;  // of one prompt, its copy and its tree: 1 MiB and more each, beyond any cache
constexpr double kWalkBar = 3, kEvictBar = 20;

void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "ashlar-bench prefix: %s\n", what);
  std::abort();
}

Tokens RandomTokens(size_t count, std::mt19937_64& random) {
  Tokens tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 150'000);
  return tokens;
}

struct WalkedSet {
  Tokens prompt, known;
  std::unique_ptr<Tree> tree;
};

// Nanoseconds of a walk, and of comparing the same tokens; sets in turn, so that none is in the processor's caches.
void Walks(size_t edge, const Options& options, std::mt19937_64& random, nlohmann::json& figures) {
  std::vector<WalkedSet> sets(options.quick ? kWalkedSets / 4 : kWalkedSets);
  for (WalkedSet& set : sets) {
    set.known = set.prompt = RandomTokens(kPromptTokens, random);
    set.tree = std::make_unique<Tree>();
    PrefixNode* node = &set.tree->root();
    for (size_t at = 0; at < kPromptTokens; at += edge) {
      node = &set.tree->Append(*node, std::span(set.known).subspan(at, edge));
    }
  }
  std::vector<double> walks, compares, ratios;
  size_t turn = 0;
  for (int round = 0; round < options.repetitions; ++round) {
    std::vector<double> walked, compared;
    for (size_t i = 0; i < sets.size() / 2; ++i) {
      const WalkedSet& one = sets[turn++ % sets.size()];
      compared.push_back(Seconds([&] {
        Require(std::memcmp(one.prompt.data(), one.known.data(), kPromptTokens * sizeof(int32_t)) == 0,
                "copies differ");
      }));
      const WalkedSet& other = sets[turn++ % sets.size()];
      size_t passed = 0;
      walked.push_back(Seconds([&] {
        const auto reached = other.tree->Walk(other.prompt, [&](PrefixNode&) { ++passed; });
        Require(reached.depth == kPromptTokens, "a known prompt was not found");
      }));
      Require(passed == kPromptTokens / edge, "a node was not passed");
    }
    if (turn % (2 * sets.size()) == 0) ++turn;  // sets that were compared are walked in the next round
    walks.push_back(Median(walked) * 1e9);
    compares.push_back(Median(compared) * 1e9);
    ratios.push_back(walks.back() / compares.back());
  }
  const double ratio = Median(ratios);
  std::printf("%10zu %12.0f %12.0f %8.2f\n", edge, Median(walks), Median(compares), ratio);
  figures["walks"].push_back({{"prompt_tokens", kPromptTokens},
                              {"edge_tokens", edge},
                              {"walk_ns", Median(walks)},
                              {"memcmp_ns", Median(compares)},
                              {"ratio", ratio},
                              {"bar", kWalkBar}});
}

// Requests of conversations, each a few turns over one of many instructions: two nodes or so each.
class Requests {
 public:
  explicit Requests(uint64_t seed) : random_(seed) {}
  Tokens Next() {
    constexpr size_t kInstructions = 32, kOwn = 24;
    const uint64_t which = random_() % 4096;
    Tokens tokens;
    for (size_t i = 0; i < kInstructions; ++i) tokens.push_back(static_cast<int32_t>(which * kInstructions + i));
    for (size_t i = 0; i < kOwn; ++i) tokens.push_back(static_cast<int32_t>(random_() % 150'000));
    return tokens;
  }

 private:
  std::mt19937_64 random_;
};

// Pushes what was used before out of the processor's caches.
void Sweep() {
  static std::vector<uint8_t> memory(size_t{256} << 20);
  static uint8_t round = 0;
  std::fill(memory.begin(), memory.end(), ++round);
}

double HashLookupNanos(size_t entries, std::mt19937_64& random) {
  absl::flat_hash_map<uint64_t, uint64_t> table;
  std::vector<uint64_t> keys(entries);
  for (uint64_t& key : keys) table.emplace(key = random(), key);
  std::shuffle(keys.begin(), keys.end(), random);
  Sweep();
  uint64_t found = 0;
  const double seconds = Seconds([&] {
    for (const uint64_t key : keys) found += table.contains(key) ? 1 : 0;
  });
  Require(found == entries, "the hash table lost a key");
  return seconds * 1e9 / static_cast<double>(entries);
}

constexpr storage::PrefixCosts kCosts{.page_tokens = 16,
                                      .page_bytes = 1 << 20,
                                      .checkpoint_bytes = 64 << 20,
                                      .flops_per_token = 1e10,
                                      .flops_per_square = 1e5};

struct Round {
  double hash_lookup = 0, lookup = 0, commit = 0, admit = 0, evict = 0;
};

// Times the store's admission of a checkpoint, with and without an eviction: it draws some checkpoints, prices them,
// and gives one up.
void TimeEvictions(size_t entries, std::mt19937_64& random, Round& round) {
  Tree tree;
  storage::ReuseModel reuse;
  const uint64_t each = kCosts.checkpoint_bytes + kCosts.page_bytes;
  const size_t timed = std::max<size_t>(entries / 50, 1000);
  storage::CheckpointBudget store(kCosts, (entries + timed) * each, reuse, random());
  std::vector<PrefixNode*> roomy, tight;
  for (size_t i = 0; i < entries + 2 * timed; ++i) {
    const Tokens tokens = {static_cast<int32_t>(i % 4096), static_cast<int32_t>(i), 0, 0, 0, 0, 0, 0};
    const auto inserted = tree.Insert(tokens);
    if (inserted.parted) inserted.parted->node->data.needs = inserted.parted->behind->data.needs > 0 ? 1 : 0;
    inserted.node->data.kind = storage::ReuseKind::kRequestEnd;
    inserted.node->data.used = i;
    if (i >= entries) {
      (i < entries + timed ? roomy : tight).push_back(inserted.node);
    } else {
      Require(store.Admit(*inserted.node, i), "there was no room for a checkpoint");
    }
  }
  size_t admitted = 0;
  const auto admit = [&](const std::vector<PrefixNode*>& nodes) {
    Sweep();
    const double seconds = Seconds([&] {
      for (PrefixNode* node : nodes) admitted += store.Admit(*node, entries + 2 * timed) ? 1 : 0;
    });
    return seconds * 1e9 / static_cast<double>(timed);
  };
  round.admit = admit(roomy);
  Require(store.evictions() == 0, "there was room");
  round.evict = admit(tight) - round.admit;
  Require(store.evictions() == timed && admitted == 2 * timed, "a new checkpoint did not take an old one's place");
}

size_t Heap() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

void Cached(size_t entries, const Options& options, std::mt19937_64& random, nlohmann::json& figures) {
  const size_t heap = Heap();
  // Half of the nodes are checkpoints that are kept.
  storage::PrefixPlanner planner(kCosts,
                                 {.capacity_bytes = entries / 2 * (kCosts.checkpoint_bytes + 3 * kCosts.page_bytes),
                                  .history_bytes = UINT64_MAX,
                                  .capture_tokens = 16,
                                  .seed = random()});
  Requests requests(random());
  const auto commit = [&](const storage::PrefixPlanner::Match& match, const Tokens& tokens) {
    planner.Commit(match, tokens, tokens.size(), match.checkpoint_at);
  };
  while (planner.nodes() < entries) {
    const Tokens tokens = requests.Next();
    commit(planner.Lookup(tokens), tokens);
  }
  const auto nodes = static_cast<double>(planner.nodes()), tokens = static_cast<double>(planner.history_tokens());
  const auto held = static_cast<double>(Heap() - heap), said = static_cast<double>(planner.history_bytes());
  std::printf(
      "%zu nodes, %.0f tokens, %zu checkpoints kept: %.0f bytes of heap a node, of which tokens %.0f; %.1f a token; "
      "accounted for: %.0f%%\n",
      planner.nodes(), tokens, planner.budget().checkpoints(), held / nodes, 4 * tokens / nodes, held / tokens,
      100 * said / held);
  figures["history"] = {{"nodes", planner.nodes()},
                        {"tokens", planner.history_tokens()},
                        {"checkpoints", planner.budget().checkpoints()},
                        {"heap_bytes", held},
                        {"accounted_bytes", said},
                        {"heap_bytes_per_node", held / nodes},
                        {"heap_bytes_per_token", held / tokens}};
  std::vector<Round> rounds;
  constexpr size_t kRequests = 2000;
  for (int i = 0; i < options.repetitions; ++i) {
    std::vector<Tokens> prompts;
    for (size_t k = 0; k < kRequests; ++k) prompts.push_back(requests.Next());
    std::vector<storage::PrefixPlanner::Match> matches(kRequests);
    Round round{.hash_lookup = HashLookupNanos(entries, random)};
    Sweep();
    round.lookup = Seconds([&] {
      for (size_t k = 0; k < kRequests; ++k) matches[k] = planner.Lookup(prompts[k]);
    });
    Sweep();
    round.commit = Seconds([&] {
      for (size_t k = 0; k < kRequests; ++k) commit(matches[k], prompts[k]);
    });
    for (double* seconds : {&round.lookup, &round.commit}) *seconds *= 1e9 / kRequests;
    TimeEvictions(entries, random, round);
    rounds.push_back(round);
  }
  figures["evictions"] = planner.budget().evictions();
  figures["refusals"] = planner.budget().refusals();
  std::printf("%8s %10s %10s %8s\n", "op", "ns", "hash ns", "ratio");
  const std::pair<const char*, double Round::*> operations[] = {
      {"lookup", &Round::lookup}, {"commit", &Round::commit}, {"admit", &Round::admit}, {"evict", &Round::evict}};
  for (const auto& [name, operation] : operations) {
    std::vector<double> times, hashes, ratios;
    for (const Round& round : rounds) {
      times.push_back(round.*operation);
      hashes.push_back(round.hash_lookup);
      ratios.push_back(times.back() / hashes.back());
    }
    figures["cases"].push_back({{"op", name},
                                {"nodes", entries},
                                {"ns_per_op", Median(times)},
                                {"hash_lookup_ns", Median(hashes)},
                                {"ratio", Median(ratios)}});
    if (operation == &Round::evict) figures["cases"].back()["bar"] = kEvictBar;
    std::printf("%8s %10.0f %10.0f %8.1f\n", name, Median(times), Median(hashes), Median(ratios));
  }
}

}  // namespace

absl::Status Prefix(const Options& options, nlohmann::json& figures) {
  const uint64_t seed = std::random_device()();
  std::mt19937_64 random(seed);
  figures["machine"] = Machine();
  figures["seed"] = seed;
  std::printf("%10s %12s %12s %8s\n", "edge", "walk ns", "memcmp ns", "ratio");
  for (const size_t edge : {kPromptTokens, size_t{512}, size_t{64}}) Walks(edge, options, random, figures);
  Cached(options.quick ? 20'000 : 1'000'000, options, random, figures);
  return absl::OkStatus();
}

}  // namespace ashlar::bench
