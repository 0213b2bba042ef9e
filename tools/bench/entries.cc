// SPDX-License-Identifier: Apache-2.0
// `ashlar-bench entries`: the cost of the cache's own book-keeping with a million objects.
//
// All calls are made through the façade that the daemon uses (storage/cache.h), on one thread as in the daemon. No
// bytes move: the objects are headers alone, in a tier that has only the first bytes of each extent, where lookups
// verify the header.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "proto/limits.h"
#include "storage/cache.h"
#include "storage/transfer/mover.h"
#include "tools/bench/bench.h"

namespace ashlar::bench {
namespace {

constexpr storage::SessionId kSession = 1;
constexpr storage::TenantId kTenant = 1;
constexpr uint32_t kParts = 4;
constexpr uint64_t kBlock = 1000;  // operations of one kind, before others must follow

void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "ashlar-bench entries: %s\n", what);
  std::abort();
}

// Numbers of extents; memory only for the header of the object that begins there.
class NumberTier final : public storage::Tier {
 public:
  static constexpr size_t kHeaderBytes = 512;

  explicit NumberTier(uint32_t extents) : extents_(extents), bytes_(extents * kHeaderBytes) {
    headers_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    Require(headers_ != MAP_FAILED, "no memory for the headers");
    std::memset(headers_, 1, bytes_);  // so that it does not count as the cache's growth
    for (uint32_t extent = extents; extent-- > 0;) free_.push_back(extent);
  }
  ~NumberTier() override { munmap(headers_, bytes_); }
  NumberTier(const NumberTier&) = delete;
  NumberTier& operator=(const NumberTier&) = delete;

  TierKind kind() const override { return TierKind::kDram; }
  absl::StatusOr<storage::Slot> Allocate(storage::TenantId tenant, uint64_t extents) override {
    Require(extents == 1, "an object of more than one extent");
    if (free_.empty()) return absl::ResourceExhaustedError("all extents are used");
    storage::Slot slot{.tenant = tenant, .runs = {{.first = free_.back(), .count = 1}}};
    free_.pop_back();
    return slot;
  }
  void Free(storage::Slot slot) override { free_.push_back(slot.runs.front().first); }
  storage::TierUsage Usage(storage::TenantId /*tenant*/) const override { return Usage(); }
  storage::TierUsage Usage() const override {
    const uint64_t used = (extents_ - free_.size()) * limits::kExtentBytes;
    return {.capacity_bytes = extents_ * limits::kExtentBytes, .used_bytes = used, .held_bytes = used};
  }
  std::byte* Address(uint32_t /*arena*/, uint32_t extent) const override {
    return static_cast<std::byte*>(headers_) + extent * kHeaderBytes;
  }

 private:
  const uint64_t extents_;
  const size_t bytes_;
  void* headers_ = nullptr;
  std::vector<uint32_t> free_;
};

class SteadyClock final : public storage::Clock {
 public:
  storage::Nanos Now() const override {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  }
};

// Completes immediately, on the calling thread.
class AtOnce final : public storage::Executor {
 public:
  bool Run(storage::TenantId, std::function<void()> work, std::function<void()> done) override {
    work();
    done();
    return true;
  }
  void Post(storage::TenantId, std::function<void()> event) override { event(); }
};

class OneThread final : public kernels::Workers {
 public:
  int Size() const override { return 1; }
  void Run(int64_t count, Body body, void* context) override {
    for (int64_t i = 0; i < count; ++i) body(context, i);
  }
};

storage::Query QueryOf(int32_t number) {
  return {.key = MakeKey({}, ObjectKind::kSegment, {&number, 1}), .tokens = 1};
}

// Parts without bytes: heads whose transitions are zero.
ObjectHeader PlanOf(const storage::Query& query) {
  ObjectHeader plan{.key = query.key, .tokens = query.tokens};
  for (uint32_t layer = 0; layer < kParts; ++layer) {
    plan.parts.push_back({.layer = layer, .form = PartForm::kTransitionZero, .units = 1});
  }
  plan.bytes = EncodedHeaderBytes(kParts);
  return plan;
}

// A line of /proc/self/status, in bytes.
uint64_t StatusBytes(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(name + ":", 0) == 0) return std::stoull(line.substr(name.size() + 1)) * 1024;
  }
  return 0;
}

// Evicts earlier data from the CPU's caches.
class Sweep {
 public:
  void operator()() { std::fill(memory_.begin(), memory_.end(), ++round_); }

 private:
  std::vector<uint8_t> memory_ = std::vector<uint8_t>(size_t{512} << 20);
  uint8_t round_ = 0;
};

// One cache, always full: every new object replaces one that the policy evicts.
class FullCache {
 public:
  FullCache(uint32_t entries, storage::EvictionMode eviction)
      : tier_(entries),
        cache_({.objects = {.eviction = eviction}}, {.memory = {&tier_}}, mover_, executor_, clock_, nullptr) {
    cache_.OpenSession(kSession, kTenant);
  }
  ~FullCache() {
    cache_.CloseSession(kSession, [] {});
  }

  // False: it is not stored.
  bool Match(const storage::Query& query) {
    const storage::Match match = cache_.Lookup(kSession, {&query, 1});
    cache_.Release(kSession, match.lease);
    CheckUsed();
    return match.found[0].reason == MissReason::kNone;
  }

  // Like an engine that computes what another one has already published.
  void Touch(const ObjectHeader& plan) {
    Require(cache_.Reserve(kSession, plan).outcome == ReserveOutcome::kAlreadyPresent, "an object is not there");
    CheckUsed();
  }

  storage::ReservationId Reserve(const ObjectHeader& plan) {
    const storage::Cache::Reservation reservation = cache_.Reserve(kSession, plan);
    Require(reservation.outcome == ReserveOutcome::kGranted, "nothing was evicted for a new object");
    CheckUsed();
    return reservation.id;
  }

  void Publish(storage::ReservationId reservation) {
    cache_.Publish(kSession, reservation, {}, [](PublishOutcome outcome) {
      Require(outcome == PublishOutcome::kPublished, "an object was not published");
    });
    CheckUsed();
  }

  uint64_t peak_used_bytes() const { return peak_used_bytes_; }
  uint64_t capacity_bytes() const { return tier_.Usage().capacity_bytes; }

 private:
  // The bytes allocated in the tier equal those of the cache's objects, and do not exceed the capacity.
  void CheckUsed() {
    const storage::TierUsage usage = tier_.Usage();
    const storage::Cache::Stats stats = cache_.stats();
    Require((stats.objects + stats.reservations) * limits::kExtentBytes == usage.used_bytes, "extents were lost");
    Require(usage.used_bytes <= usage.capacity_bytes, "more is used than there is");
    peak_used_bytes_ = std::max(peak_used_bytes_, usage.used_bytes);
  }

  NumberTier tier_;
  SteadyClock clock_;
  AtOnce executor_;
  OneThread workers_;
  storage::Mover mover_{kernels::Reference(), workers_, executor_, tier_};
  storage::Cache cache_;
  uint64_t peak_used_bytes_ = 0;
};

// Nanoseconds an operation.
struct Round {
  double hash_lookup = 0, match = 0, touch = 0, evict = 0;
};

class Rounds {
 public:
  Rounds(FullCache& cache, uint32_t entries, int32_t next, uint64_t seed)
      : cache_(cache), entries_(entries), next_(next), random_(seed) {
    for (int32_t number = 0; number < next_; ++number) queries_.push_back(QueryOf(number));
    KeepWhatIsThere();
  }

  // Uses every entry once with each operation, in random order; then a tenth is evicted.
  Round Run() {
    std::shuffle(queries_.begin(), queries_.end(), random_);
    Round round;
    uint64_t found = 0, matched = 0;
    sweep_();
    round.hash_lookup = Seconds([&] {
      for (const storage::Query& query : queries_) found += table_.contains(query.key) ? 1 : 0;
    });
    Require(found == entries_, "the hash table lost a key");
    sweep_();
    round.match = Seconds([&] {
      for (const storage::Query& query : queries_) matched += cache_.Match(query) ? 1 : 0;
    });
    Require(matched == entries_, "an object that must be there was missed");
    sweep_();
    for (size_t first = 0; first < queries_.size(); first += kBlock) round.touch += TouchBlock(first);
    sweep_();
    const size_t evicted = std::max<size_t>(entries_ / 10, kBlock);
    for (size_t first = 0; first < evicted; first += kBlock) round.evict += EvictBlock();
    KeepWhatIsThere();
    for (double* seconds : {&round.hash_lookup, &round.match, &round.touch}) *seconds *= 1e9 / entries_;
    round.evict *= 1e9 / static_cast<double>(evicted);
    return round;
  }

 private:
  double TouchBlock(size_t first) {
    std::vector<ObjectHeader> plans;
    for (size_t i = first; i < first + kBlock; ++i) plans.push_back(PlanOf(queries_[i]));
    return Seconds([&] {
      for (const ObjectHeader& plan : plans) cache_.Touch(plan);
    });
  }

  // The policy chose which objects were evicted.
  void KeepWhatIsThere() {
    std::erase_if(queries_, [this](const storage::Query& query) { return !cache_.Match(query); });
    Require(queries_.size() == entries_, "there are fewer objects than there is space for");
    table_.clear();
    table_.reserve(entries_);
    for (size_t i = 0; i < entries_; ++i) table_.emplace(queries_[i].key, i);
  }

  // A block of new objects; only the reservation is timed.
  double EvictBlock() {
    std::vector<ObjectHeader> plans;
    for (size_t i = 0; i < kBlock; ++i) {
      queries_.push_back(QueryOf(next_++));
      plans.push_back(PlanOf(queries_.back()));
    }
    std::vector<storage::ReservationId> reservations(kBlock);
    const double seconds = Seconds([&] {
      for (size_t i = 0; i < kBlock; ++i) reservations[i] = cache_.Reserve(plans[i]);
    });
    for (const storage::ReservationId reservation : reservations) cache_.Publish(reservation);
    return seconds;
  }

  FullCache& cache_;
  const uint32_t entries_;
  int32_t next_;  // the number of the next new object
  std::mt19937_64 random_;
  std::vector<storage::Query> queries_;  // queries of the cached objects
  absl::flat_hash_map<Key, uint64_t> table_;
  Sweep sweep_;
};

void Report(const char* policy, uint32_t entries, const std::vector<Round>& rounds, nlohmann::json& figures) {
  const std::pair<const char*, double Round::*> operations[] = {
      {"match", &Round::match}, {"touch", &Round::touch}, {"evict", &Round::evict}};
  for (const auto& [name, operation] : operations) {
    std::vector<double> times, hash_lookups, ratios;
    for (const Round& round : rounds) {
      times.push_back(round.*operation);
      hash_lookups.push_back(round.hash_lookup);
      ratios.push_back(round.*operation / round.hash_lookup);
    }
    const double ns = Median(times), hash_ns = Median(hash_lookups), ratio = Median(ratios);
    figures["cases"].push_back({{"op", name},
                                {"policy", policy},
                                {"entries", entries},
                                {"ns_per_op", ns},
                                {"hash_lookup_ns", hash_ns},
                                {"ratio", ratio}});
    std::printf("%-6s %6s %10.0f %10.0f %8.1f\n", policy, name, ns, hash_ns, ratio);
  }
}

void Measure(storage::EvictionMode eviction, const char* policy, const Options& options, uint64_t seed,
             nlohmann::json& figures) {
  const uint32_t entries = options.quick ? 20'000 : 1'000'000;
  FullCache cache(entries, eviction);
  const uint64_t before = StatusBytes("VmRSS");
  // A tenth more than there is space for, because ghosts of evicted objects count too.
  const int32_t published = static_cast<int32_t>(entries + entries / 10);
  for (int32_t number = 0; number < published; ++number) cache.Publish(cache.Reserve(PlanOf(QueryOf(number))));
  // The peak of the process: it equals the cache's peak only for the first cache.
  if (!figures.contains("peak_rss_bytes")) {
    const uint64_t bytes_per_entry = (StatusBytes("VmRSS") - before) / entries, peak = StatusBytes("VmHWM");
    std::printf(
        "%u entries of %u parts: %lu bytes each; peak resident %.0f MiB, of which headers in the tier %.0f MiB\n",
        entries, kParts, bytes_per_entry, static_cast<double>(peak) / (1 << 20),
        static_cast<double>(entries * NumberTier::kHeaderBytes) / (1 << 20));
    std::printf("%-6s %6s %10s %10s %8s\n", "policy", "op", "ns", "hash ns", "ratio");
    figures["peak_rss_bytes"] = peak;
    figures["tier_header_bytes"] = entries * NumberTier::kHeaderBytes;
    figures["bytes_per_entry"] = bytes_per_entry;
  }
  Rounds measured(cache, entries, published, seed);
  std::vector<Round> rounds;
  for (int i = 0; i < options.repetitions; ++i) rounds.push_back(measured.Run());
  Report(policy, entries, rounds, figures);
  figures["peak_used_bytes"] = std::max(figures.value("peak_used_bytes", uint64_t{0}), cache.peak_used_bytes());
  figures["capacity_bytes"] = cache.capacity_bytes();
}

}  // namespace

absl::Status Entries(const Options& options, nlohmann::json& figures) {
  const uint64_t seed = std::random_device()();
  figures["machine"] = Machine();
  figures["seed"] = seed;
  figures["parts"] = kParts;
  Measure(storage::EvictionMode::kPrice, "price", options, seed, figures);
  Measure(storage::EvictionMode::kLru, "lru", options, seed, figures);
  return absl::OkStatus();
}

}  // namespace ashlar::bench
