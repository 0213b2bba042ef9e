// SPDX-License-Identifier: Apache-2.0
// `ashlar-bench prefix`: the cost of the prefix tree and its planner. Walking a prompt is compared with comparing its
// tokens only; requests and evictions among a million nodes with lookups in a hash table of the same size.
#include <malloc.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
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

// Nanoseconds of a walk, and of comparing the same tokens. Sets are used in turns, so that none is in the CPU's caches.
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
    if (turn % (2 * sets.size()) == 0) ++turn;  // sets that were compared are traversed in the next round
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

// Prompts of about 8,000 tokens: documents of many lengths, each asked about twice. The second prompt shares any part
// of the document, or all of it before another question, so that prompts diverge at thousands of different depths and
// distances from the end.
class LongRequests {
 public:
  explicit LongRequests(uint64_t seed) : random_(seed) {}
  Tokens Next() {
    if (random_() % 2 == 0 && !open_.empty()) {
      const size_t which = random_() % open_.size();
      std::swap(open_[which], open_.back());
      Tokens tokens = std::move(open_.back());
      open_.pop_back();
      if (random_() % 2 == 0) tokens.resize(1 + random_() % tokens.size());
      Append(tokens, 8 + random_() % 200);
      return tokens;
    }
    Tokens document;
    Append(document, 2000 + random_() % 12'000);
    if (open_.size() < kOpen) open_.push_back(document);
    Append(document, 8 + random_() % 200);
    return document;
  }

 private:
  static constexpr size_t kOpen = 256;  // documents that are asked about once more
  void Append(Tokens& tokens, size_t count) {
    for (size_t i = 0; i < count; ++i) tokens.push_back(static_cast<int32_t>(random_() % 150'000));
  }
  std::mt19937_64 random_;
  std::vector<Tokens> open_;
};

// Evicts earlier data from the CPU's caches.
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

// Times the store's admission of a checkpoint, with and without an eviction: it samples some checkpoints, prices them,
// and evicts one.
void TimeEvictions(size_t entries, std::mt19937_64& random, Round& round) {
  Tree tree;
  storage::ReuseModel reuse;
  const uint64_t each = kCosts.checkpoint_bytes + kCosts.page_bytes;
  const size_t timed = std::max<size_t>(entries / 50, 1000);
  storage::CheckpointBudget store(kCosts, (entries + timed) * each, reuse, random());
  std::vector<PrefixNode*> ample, tight;
  for (size_t i = 0; i < entries + 2 * timed; ++i) {
    const Tokens tokens = {static_cast<int32_t>(i % 4096), static_cast<int32_t>(i), 0, 0, 0, 0, 0, 0};
    const auto inserted = tree.Insert(tokens);
    if (inserted.parted) inserted.parted->node->data.needs = inserted.parted->behind->data.needs > 0 ? 1 : 0;
    inserted.node->data.kind = storage::ReuseKind::kRequestEnd;
    inserted.node->data.used = i;
    if (i >= entries) {
      (i < entries + timed ? ample : tight).push_back(inserted.node);
    } else {
      Require(store.Admit(*inserted.node, i), "there was no space for a checkpoint");
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
  round.admit = admit(ample);
  Require(store.evictions() == 0, "there was space");
  round.evict = admit(tight) - round.admit;
  Require(store.evictions() == timed && admitted == 2 * timed, "a new checkpoint did not take an old one's place");
}

size_t Heap() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

nlohmann::json Spread(const char* operation, std::vector<double> micros) {
  std::ranges::sort(micros);
  double sum = 0;
  for (const double each : micros) sum += each;
  const double mean = sum / static_cast<double>(micros.size());
  const double p50 = micros[micros.size() / 2], p99 = micros[micros.size() * 99 / 100], longest = micros.back();
  std::printf("%8s %10.1f %10.1f %10.1f %10.1f\n", operation, mean, p50, p99, longest);
  return {{"op", operation}, {"mean_us", mean}, {"p50_us", p50}, {"p99_us", p99}, {"longest_us", longest}};
}

double CpuSeconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// The planner's work outside its thread, run between requests.
class Background {
 public:
  storage::OverlapPlans::Background Queue() {
    return [this](std::function<void()> work, std::function<void()> done) {
      jobs_.emplace_back(std::move(work), std::move(done));
      return true;
    };
  }
  // Returns the number of jobs run.
  size_t RunAll() {
    const auto jobs = std::exchange(jobs_, {});
    for (const auto& [work, done] : jobs) {
      work();
      done();
    }
    return jobs.size();
  }

 private:
  std::vector<std::pair<std::function<void()>, std::function<void()>>> jobs_;
};

// Times single requests with long prompts, in CPU time so that other processes do not count, once the planner has seen
// thousands of different overlaps.
void LongPrompts(storage::PrefixPlanner& planner, Background& background, const Options& options,
                 std::mt19937_64& random, nlohmann::json& figures) {
  LongRequests requests(random());
  const size_t known = options.quick ? 2000 : 16'000, timed = options.quick ? 500 : 4000;
  std::vector<double> lookups, commits, plans;
  uint64_t tokens = 0;
  for (size_t i = 0; i < known + timed; ++i) {
    const Tokens prompt = requests.Next();
    storage::PrefixPlanner::Match match;
    const double begin = CpuSeconds();
    match = planner.Lookup(prompt);
    const double found = CpuSeconds();
    const std::vector<uint64_t> captured = match.checkpoint_at;
    planner.Commit(std::move(match), prompt, prompt.size(), captured);
    const double end = CpuSeconds();
    const bool planned = background.RunAll() > 0;
    if (i < known) continue;
    if (planned) plans.push_back((CpuSeconds() - end) * 1e6);
    lookups.push_back((found - begin) * 1e6);
    commits.push_back((end - found) * 1e6);
    tokens += prompt.size();
  }
  std::printf("prompts of %llu tokens, among %zu nodes, after %zu such prompts, µs:\n%8s %10s %10s %10s %10s\n",
              static_cast<unsigned long long>(tokens / timed), planner.nodes(), known, "op", "mean", "p50", "p99",
              "longest");
  figures["long_prompts"] = {{"nodes", planner.nodes()}, {"prompt_tokens", tokens / timed}, {"requests_before", known}};
  figures["long_prompts"]["cases"] = {Spread("lookup", lookups), Spread("commit", commits), Spread("planning", plans)};
}

void Cached(size_t entries, const Options& options, std::mt19937_64& random, nlohmann::json& figures) {
  const size_t heap = Heap();
  // Half of the nodes are checkpoints that are kept.
  Background background;
  storage::PrefixPlanner planner(kCosts,
                                 {.capacity_bytes = entries / 2 * (kCosts.checkpoint_bytes + 3 * kCosts.page_bytes),
                                  .history_bytes = UINT64_MAX,
                                  .capture_tokens = 16,
                                  .seed = random()},
                                 background.Queue());
  Requests requests(random());
  const auto commit = [&](const storage::PrefixPlanner::Match& match, const Tokens& tokens) {
    planner.Commit(match, tokens, tokens.size(), match.checkpoint_at);
  };
  while (planner.nodes() < entries) {
    const Tokens tokens = requests.Next();
    commit(planner.Lookup(tokens), tokens);
    background.RunAll();
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
    background.RunAll();
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
  LongPrompts(planner, background, options, random, figures);
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
