// SPDX-License-Identifier: Apache-2.0
#include "daemon/observe/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "daemon/observe/follow.h"
#include "daemon/observe/metric_children.h"
#include "daemon/observe/process_metrics.h"
#include "daemon/observe/scrub_metrics.h"
#include "daemon/runtime/log.h"
#include "proto/version.h"

namespace ashlar::daemon {
namespace {

using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;
using prometheus::Histogram;
using prometheus::Labels;
using storage::TenantId;

// 1 s to a week. Short ages mean that the budget is too small.
const Histogram::BucketBoundaries kAges = {1, 5, 15, 60, 300, 900, 3600, 6 * 3600, 24 * 3600, 7 * 24 * 3600};

// Tokens that a resumed prompt skips, from a short system prompt to a long conversation.
const Histogram::BucketBoundaries kDepths = {64, 256, 1024, 4096, 16384, 65536, 262144, 1048576};

// Whose states a prompt resumes from: the namespace's or one conversation's.
enum class PrefixSource : uint8_t { kTree, kOwn };
absl::string_view Name(PrefixSource source) {
  return source == PrefixSource::kOwn ? "own" : "tree";
}

template <typename... Values>
using Counters = Children<Counter, Values...>;

double Seconds(storage::Nanos nanos) {
  return static_cast<double>(nanos) * 1e-9;
}

}  // namespace

struct Metrics::Impl {
  explicit Impl(const std::vector<std::string>& tenant_names) : tenants(tenant_names) {
    GaugeFamily("ashlar_build_info", "Always 1; the label version is the release").Add({{"version", Version()}}).Set(1);
    for (const std::string& tenant : tenants) {
      const Labels labels = {{"tenant", tenant}};
      landed_bytes.push_back(&landed_family.Add(labels));
      saved.push_back(&saved_family.Add(labels));
      checksum_failures.push_back(&checksum_family.Add(labels));
      memory_refusals.push_back(&memory_family.Add(labels));
      const auto gauge = [&](const char* state) { return &page_family.Add({{"tenant", tenant}, {"state", state}}); };
      pages.push_back({gauge("free"), gauge("idle"), gauge("shared"), gauge("private")});
      shared_segments.push_back(&segment_family.Add(labels));
      admitted.push_back(&admitted_family.Add(labels));
      reclaimed.push_back(&reclaimed_family.Add(labels));
      last_reclaimed.push_back(0);
      for (const char* outcome : {"in_time", "late"}) prefetched_family.Add({{"tenant", tenant}, {"outcome", outcome}});
      prompts.push_back(&prompt_family.Add(labels));
      prompt_tokens.push_back(&prompt_token_family.Add(labels));
      prefixes.push_back({&checkpoint_family.Add(labels), &prefix_byte_family.Add(labels), &history_family.Add(labels),
                          &span_family.Add(labels), &span_saved_family.Add(labels)});
    }
    // Created at 0, because Prometheus sees no increase in a counter that starts at 1.
    for (const char* reason : {"too_many", "unknown_user", "version"}) {
      for (const char* socket : {"rpc", "session"}) refused_family.Add({{"socket", socket}, {"reason", reason}});
    }
  }

  Family<Counter>& CounterFamily(const char* name, const char* help) {
    return prometheus::BuildCounter().Name(name).Help(help).Register(*registry);
  }
  Family<Gauge>& GaugeFamily(const char* name, const char* help) {
    return prometheus::BuildGauge().Name(name).Help(help).Register(*registry);
  }
  Family<Histogram>& HistogramFamily(const char* name, const char* help) {
    return prometheus::BuildHistogram().Name(name).Help(help).Register(*registry);
  }
  Gauge& SingleGauge(const char* name, const char* help) { return GaugeFamily(name, help).Add({}); }

  const std::vector<std::string> tenants;
  std::shared_ptr<prometheus::Registry> registry = std::make_shared<prometheus::Registry>();
  Family<Counter>& refused_family =
      CounterFamily("ashlar_connections_rejected_total", "Rejected connections, by listening socket and reason");

  Counters<ObjectKind, TierKind> hits{
      CounterFamily("ashlar_hits_total", "Objects found by lookups"), tenants, {"kind", "tier"}};
  Counters<ObjectKind, TierKind> hit_tokens{
      CounterFamily("ashlar_hit_tokens_total", "Tokens of objects found by lookups"), tenants, {"kind", "tier"}};
  Counters<ObjectKind, MissReason> misses{
      CounterFamily("ashlar_misses_total", "Objects missed by lookups and landings, by reason"),
      tenants,
      {"kind", "reason"}};
  Counters<ObjectKind, MissReason> miss_tokens{
      CounterFamily("ashlar_miss_tokens_total", "Tokens of objects missed by lookups and landings, by reason"),
      tenants,
      {"kind", "reason"}};
  Counters<ObjectKind, MissReason, TierKind, PolicyKind> evictions{
      CounterFamily("ashlar_evictions_total", "Evicted objects and reservations"),
      tenants,
      {"kind", "reason", "tier", "policy"}};
  Counters<ObjectKind, MissReason, TierKind, PolicyKind> evicted_bytes{
      CounterFamily("ashlar_evicted_bytes_total", "Bytes of evicted objects and reservations"),
      tenants,
      {"kind", "reason", "tier", "policy"}};
  Counters<ObjectKind, ReserveOutcome> reserved{
      CounterFamily("ashlar_reservations_total", "Publish reservations requested by engines, by outcome"),
      tenants,
      {"kind", "outcome"}};
  Counters<ObjectKind> published{
      CounterFamily("ashlar_published_objects_total", "Published objects"), tenants, {"kind"}};
  Counters<ObjectKind> published_bytes{
      CounterFamily("ashlar_published_bytes_total", "Bytes of published objects"), tenants, {"kind"}};

  Family<Counter>& prompt_family =
      CounterFamily("ashlar_prefix_lookups_total", "Prompts looked up for models with exact prefixes");
  Family<Counter>& prompt_token_family = CounterFamily("ashlar_prefix_lookup_tokens_total", "Tokens of these prompts");
  std::vector<Counter*> prompts, prompt_tokens;
  Children<Histogram, PrefixSource> resumed{
      HistogramFamily("ashlar_prefix_resumed_tokens", "Tokens that a resumed prompt skips"), tenants, {"source"}};
  Counters<CommitOutcome, PrefixSource> commits{
      CounterFamily("ashlar_prefix_commits_total", "States committed by engines, by outcome"),
      tenants,
      {"outcome", "source"}};
  Family<Gauge>& checkpoint_family = GaugeFamily("ashlar_prefix_checkpoints", "Exact states kept for resuming prompts");
  Family<Gauge>& prefix_byte_family =
      GaugeFamily("ashlar_prefix_bytes", "Bytes of exact states and of the keys and values before them");
  Family<Gauge>& history_family = GaugeFamily("ashlar_prefix_history_bytes", "Bytes of the records of earlier prompts");
  Family<Gauge>& span_family = GaugeFamily("ashlar_prefix_spans", "Spans kept in place of exact states");
  Family<Gauge>& span_saved_family =
      GaugeFamily("ashlar_prefix_span_saved_bytes", "Bytes saved by spans compared with exact states");
  struct PrefixGauges {
    Gauge *checkpoints, *bytes, *history, *spans, *span_saved;
  };
  std::vector<PrefixGauges> prefixes;  // per tenant

  // Only evicted and expired objects count, not corrupt or unpublished ones.
  Children<Histogram, TierKind, PolicyKind> eviction_ages{
      HistogramFamily("ashlar_eviction_age_seconds", "Time from an object's publication to its eviction or expiry"),
      tenants,
      {"tier", "policy"}};
  Children<Histogram, TierKind, PolicyKind> eviction_idle{
      HistogramFamily("ashlar_eviction_idle_seconds", "Time from an object's last use to its eviction or expiry"),
      tenants,
      {"tier", "policy"}};
  StatusBoard board;
  std::vector<Tallies> tallies = std::vector<Tallies>(tenants.size());

  Family<Counter>& saved_family =
      CounterFamily("ashlar_saved_seconds_total", "Compute time saved by hits, by the engines' declared rates");
  Family<Counter>& landed_family = CounterFamily("ashlar_landed_bytes_total", "Bytes landed in engines' pages");
  Family<Counter>& checksum_family =
      CounterFamily("ashlar_checksum_failures_total", "Corrupt copies found and dropped");
  Family<Counter>& memory_family = CounterFamily(
      "ashlar_allocation_failures_total", "Arenas within the tenant's budget that the system could not allocate");
  std::vector<Counter*> landed_bytes, saved, checksum_failures, memory_refusals;

  Children<Gauge, TierKind> used{
      GaugeFamily("ashlar_tier_used_bytes", "Bytes of the tenant's cached objects in the tier"), tenants, {"tier"}};
  Children<Gauge, TierKind, storage::PoolKind> pool_used{
      GaugeFamily("ashlar_pool_used_bytes", "Bytes of the tenant's pool in the tier: public or private"),
      tenants,
      {"tier", "pool"}};
  Children<Gauge, TierKind> held{
      GaugeFamily("ashlar_tier_allocated_bytes", "Bytes of the tenant's arenas in the tier, used or free"),
      tenants,
      {"tier"}};
  Children<Gauge, TierKind> capacity{
      GaugeFamily("ashlar_tier_capacity_bytes", "The tenant's budget in the tier"), tenants, {"tier"}};
  Family<Gauge>& degraded_family = GaugeFamily("ashlar_tier_degraded", "1 while the tier accepts no writes, else 0");
  Counter& log_dropped =
      CounterFamily("ashlar_log_lines_dropped_total", "Log lines dropped because stderr was not read").Add({});
  Counter& log_suppressed =
      CounterFamily("ashlar_log_lines_suppressed_total",
                    "Log lines suppressed by the limit per message and tenant; the log has a summary")
          .Add({});
  Counter& quarantined = CounterFamily("ashlar_ssd_quarantined_databases_total",
                                       "Damaged disk databases that were renamed and replaced by an empty one")
                             .Add({});
  HoldingsMetrics holdings{*registry, tenants};

  Family<Gauge>& page_family = GaugeFamily("ashlar_pages", "Pages allocated by the daemon, by state");
  Family<Gauge>& segment_family = GaugeFamily("ashlar_shared_segments", "Segments in pages allocated by the daemon");
  Family<Gauge>& admitted_family =
      GaugeFamily("ashlar_admitted_requests", "Requests that hold pages allocated by the daemon");
  Family<Counter>& reclaimed_family =
      CounterFamily("ashlar_reclaimed_segments_total", "Segments whose pages were reclaimed");
  struct PageGauges {
    Gauge *free, *idle, *shared, *own;
  };
  std::vector<PageGauges> pages;  // per tenant
  std::vector<Gauge*> shared_segments, admitted;
  std::vector<Counter*> reclaimed;
  std::vector<uint64_t> last_reclaimed;  // count of the current page pools
  Family<Counter>& copied_family = CounterFamily("ashlar_tier_copied_bytes_total", "Bytes copied between tiers");
  Family<Counter>& prefetched_family =
      CounterFamily("ashlar_prefetched_objects_total", "Objects promoted from lower tiers ahead of need, by outcome");
  Children<Counter, TierKind> tier_errors{
      CounterFamily("ashlar_tier_errors_total", "Failed reads and writes of copies"), tenants, {"tier"}};

  ProcessMetrics process{*registry};
  ClusterMetrics cluster{*registry};
  RouterMetrics router{*registry};
  ScrubMetrics scrub{*registry};
  Gauge& draining = SingleGauge("ashlar_draining", "1 while the daemon drains");
  Gauge& memory_only_objects = SingleGauge("ashlar_memory_only_objects", "Objects that only memory has");
  Gauge& memory_only_bytes = SingleGauge("ashlar_memory_only_bytes", "Bytes of objects that only memory has");
  Gauge& objects = SingleGauge("ashlar_objects", "Cached objects");
  Gauge& object_bytes = SingleGauge("ashlar_object_bytes", "Bytes of cached objects");
  Gauge& leases = SingleGauge("ashlar_leases", "Leases held by engines");
  Gauge& reservations = SingleGauge("ashlar_reservations_pending", "Reservations waiting for their publish");
  Gauge& landings = SingleGauge("ashlar_landings_in_progress", "Landings in progress");
  Gauge& compositions = SingleGauge("ashlar_compositions_in_progress", "Compositions in progress");
  Gauge& copies_under_way = SingleGauge("ashlar_tier_copies_in_progress", "Copies between tiers in progress");
  Gauge& sessions = SingleGauge("ashlar_sessions", "Sessions of engines, including draining ones");

  Family<Gauge>& queue_family = GaugeFamily("ashlar_queue_depth", "Tasks waiting in a bounded queue");
  Gauge& metadata_queue = queue_family.Add({{"queue", "metadata"}});
  Gauge& worker_queue = queue_family.Add({{"queue", "workers"}});
  Gauge& disk_queue = queue_family.Add({{"queue", "disk"}});
  Family<Counter>& rejection_family =
      CounterFamily("ashlar_queue_rejected_total", "Tasks rejected because a bounded queue was full");
  Counter& metadata_rejections = rejection_family.Add({{"queue", "metadata"}});
  Counter& worker_rejections = rejection_family.Add({{"queue", "workers"}});

  static Histogram::BucketBoundaries TurnBounds() {
    Histogram::BucketBoundaries seconds;
    for (const storage::Nanos bound : EventLoop::TurnTimes::kBounds)
      seconds.push_back(static_cast<double>(bound) * 1e-9);
    return seconds;
  }
  Histogram& TurnHistogram(const char* name, const char* help) {
    return HistogramFamily(name, help).Add({}, TurnBounds());
  }
  Histogram& turn_seconds = TurnHistogram("ashlar_metadata_task_duration_seconds",
                                          "Duration of one task on the metadata thread, which answers lookups");
  Histogram& turn_cpu_seconds =
      TurnHistogram("ashlar_metadata_task_cpu_seconds", "CPU time of one task on the metadata thread");
  Gauge& longest_turn_seconds = SingleGauge("ashlar_metadata_task_longest_seconds",
                                            "Longest task on the metadata thread since the daemon started");
  Gauge& longest_turn_cpu_seconds =
      SingleGauge("ashlar_metadata_task_longest_cpu_seconds",
                  "Largest CPU time of a task on the metadata thread since the daemon started");

  CallMetrics calls{*registry};

  Family<Counter>& composition_family = CounterFamily("ashlar_compositions_total", "Compositions, by outcome");
  Histogram& composition_seconds = prometheus::BuildHistogram()
                                       .Name("ashlar_composition_duration_seconds")
                                       .Help("Time from the admission of a composition to its completion")
                                       .Register(*registry)
                                       .Add({}, kCallSeconds);
};

Metrics::Metrics(const std::vector<std::string>& tenants) : impl_(std::make_unique<Impl>(tenants)) {}
Metrics::~Metrics() = default;

std::string Metrics::Text(TenantLabel label) const {
  std::vector<prometheus::MetricFamily> families = impl_->registry->Collect();
  impl_->process.AddTo(families);
  return MetricsText(std::move(families), label);
}

void Metrics::Hit(TenantId tenant, ObjectKind kind, TierKind tier, uint64_t tokens) {
  impl_->hits.Add(tenant, kind, tier, 1);
  impl_->hit_tokens.Add(tenant, kind, tier, tokens);
  Tallies::Segments& tally = impl_->tallies.at(tenant).hits[tier];
  ++tally.segments;
  tally.tokens += tokens;
}

void Metrics::Miss(TenantId tenant, ObjectKind kind, MissReason reason, uint64_t tokens) {
  impl_->misses.Add(tenant, kind, reason, 1);
  impl_->miss_tokens.Add(tenant, kind, reason, tokens);
  Tallies::Segments& tally = impl_->tallies.at(tenant).misses[reason];
  ++tally.segments;
  tally.tokens += tokens;
  impl_->board.Missed(kind, reason, tokens);
}

void Metrics::Evicted(TenantId tenant, ObjectKind kind, const storage::Ghost& ghost) {
  const MissReason why = ghost.reason;
  impl_->evictions.Add(tenant, kind, why, ghost.tier, ghost.policy, 1);
  impl_->evicted_bytes.Add(tenant, kind, why, ghost.tier, ghost.policy, ghost.bytes);
  if (why == MissReason::kEvicted || why == MissReason::kExpired) {
    impl_->eviction_ages.Get(tenant, ghost.tier, ghost.policy, kAges).Observe(Seconds(ghost.lived));
    impl_->eviction_idle.Get(tenant, ghost.tier, ghost.policy, kAges).Observe(Seconds(ghost.idle));
  }
  Tallies::Objects& tally = impl_->tallies.at(tenant).evictions[{ghost.tier, ghost.policy, why}];
  ++tally.objects;
  tally.bytes += ghost.bytes;
  if (why == MissReason::kChecksumFailed) impl_->checksum_failures.at(tenant)->Increment();
}

void Metrics::Published(TenantId tenant, ObjectKind kind, uint64_t bytes) {
  impl_->published.Add(tenant, kind, 1);
  impl_->published_bytes.Add(tenant, kind, bytes);
}

void Metrics::Landed(TenantId tenant, uint64_t bytes) {
  impl_->landed_bytes.at(tenant)->Increment(static_cast<double>(bytes));
}

void Metrics::Copied(TenantId tenant, TierKind from, TierKind to, uint64_t bytes) {
  impl_->copied_family
      .Add({{"tenant", impl_->tenants.at(tenant)}, {"from", std::string(Name(from))}, {"to", std::string(Name(to))}})
      .Increment(static_cast<double>(bytes));
}

uint64_t Levels::admissions() const {
  uint64_t all = 0;
  for (const storage::PagePool::Levels& tenant : pages) all += tenant.admissions;
  return all;
}

bool Levels::drained() const {
  return !writing_behind && !cluster.transferring &&
         leases + reservations + landings + compositions + admissions() == 0;
}

void Metrics::Prefetched(TenantId tenant, bool in_time) {
  impl_->prefetched_family.Add({{"tenant", impl_->tenants.at(tenant)}, {"outcome", in_time ? "in_time" : "late"}})
      .Increment();
}

void Metrics::TierError(TenantId tenant, TierKind tier, const absl::Status& error) {
  Counter& errors = impl_->tier_errors.Get(tenant, tier);
  errors.Increment();
  const auto count = static_cast<uint64_t>(errors.Value());
  if (!std::has_single_bit(count))
    return;  // logged at powers of two as below, because a broken disk refuses everything
  Log(LogLevel::kError, "a tier has I/O errors",
      {{"tenant", impl_->tenants.at(tenant)},
       {"tier", std::string(Name(tier))},
       {"error", std::string(error.message())},
       {"errors", count}});
}

void Metrics::NoMemory(TenantId tenant, absl::string_view why) {
  Counter& refusals = *impl_->memory_refusals.at(tenant);
  refusals.Increment();
  // A full machine refuses every reservation: the first one is logged, then each power of two.
  const auto count = static_cast<uint64_t>(refusals.Value());
  if (!std::has_single_bit(count)) return;
  Log(LogLevel::kWarning, "cannot allocate memory within the tenant's budget",
      {{"tenant", impl_->tenants.at(tenant)}, {"error", std::string(why)}, {"refusals", count}});
}

void Metrics::Reserved(TenantId tenant, ObjectKind kind, ReserveOutcome outcome) {
  impl_->reserved.Add(tenant, kind, outcome, 1);
}

void Metrics::Prompted(TenantId tenant, uint64_t tokens) {
  impl_->prompts.at(tenant)->Increment();
  impl_->prompt_tokens.at(tenant)->Increment(static_cast<double>(tokens));
}

void Metrics::Resumed(TenantId tenant, bool own, uint64_t tokens, uint64_t) {
  impl_->resumed.Get(tenant, own ? PrefixSource::kOwn : PrefixSource::kTree, kDepths)
      .Observe(static_cast<double>(tokens));
}

void Metrics::Saved(TenantId tenant, double seconds) {
  impl_->saved.at(tenant)->Increment(seconds);
}

void Metrics::Committed(TenantId tenant, CommitOutcome outcome, bool own, uint64_t) {
  impl_->commits.Add(tenant, outcome, own ? PrefixSource::kOwn : PrefixSource::kTree, 1);
}

void Metrics::Composed(TenantId tenant, MissReason outcome, storage::Nanos elapsed) {
  const std::string name(outcome == MissReason::kNone ? "completed" : Name(outcome));
  impl_->composition_family.Add({{"tenant", impl_->tenants.at(tenant)}, {"outcome", name}}).Increment();
  // Failed compositions end early and would distort the histogram.
  if (outcome == MissReason::kNone) impl_->composition_seconds.Observe(static_cast<double>(elapsed) * 1e-9);
}

void Metrics::Set(const Levels& levels) {
  impl_->board.Set(ViewOf(levels, impl_->tallies));
  impl_->cluster.Set(levels.cluster);
  impl_->router.Set(levels.router);
  for (const auto& [of, count] : levels.refused_connections) {
    const auto& [socket, reason] = of;
    Follow(impl_->refused_family.Add({{"socket", socket}, {"reason", std::string(Name(reason))}}), count);
  }
  impl_->scrub.Set(levels.scrub);
  for (const auto& [tier, tenants] : levels.tiers) {
    const bool degraded = levels.degraded.contains(tier);
    impl_->degraded_family.Add({{"tier", std::string(Name(tier))}}).Set(degraded ? 1 : 0);
    for (TenantId tenant = 0; tenant < tenants.size(); ++tenant) {
      impl_->used.Get(tenant, tier).Set(static_cast<double>(tenants[tenant].used_bytes));
      impl_->held.Get(tenant, tier).Set(static_cast<double>(tenants[tenant].held_bytes));
      impl_->capacity.Get(tenant, tier).Set(static_cast<double>(tenants[tenant].capacity_bytes));
      impl_->tier_errors.Get(tenant, tier);  // created at 0, so that Prometheus sees the first increase
    }
  }
  for (const auto& [place, share] : levels.pools) {
    const auto& [tier, pool] = place;
    impl_->pool_used.Get(pool.tenant, tier, pool.kind).Set(static_cast<double>(share.used_bytes));
  }
  impl_->holdings.Set(levels.holdings);
  for (size_t i = 0; i < levels.pages.size(); ++i) {
    const storage::PagePool::Levels& pages = levels.pages[i];
    const Impl::PageGauges& gauges = impl_->pages.at(i);
    gauges.free->Set(static_cast<double>(pages.free));
    gauges.idle->Set(static_cast<double>(pages.idle));
    gauges.shared->Set(static_cast<double>(pages.shared));
    gauges.own->Set(static_cast<double>(pages.own));
    impl_->shared_segments.at(i)->Set(static_cast<double>(pages.segments));
    impl_->admitted.at(i)->Set(static_cast<double>(pages.admissions));
    uint64_t& last = impl_->last_reclaimed.at(i);
    // A page pool that has ended no longer counts.
    if (pages.reclaimed_segments > last) {
      impl_->reclaimed.at(i)->Increment(static_cast<double>(pages.reclaimed_segments - last));
    }
    last = pages.reclaimed_segments;
  }
  for (size_t i = 0; i < levels.prefixes.size(); ++i) {
    impl_->prefixes.at(i).checkpoints->Set(static_cast<double>(levels.prefixes[i].checkpoints));
    impl_->prefixes.at(i).bytes->Set(static_cast<double>(levels.prefixes[i].bytes));
    impl_->prefixes.at(i).history->Set(static_cast<double>(levels.prefixes[i].history_bytes));
    impl_->prefixes.at(i).spans->Set(static_cast<double>(levels.prefixes[i].spans));
    impl_->prefixes.at(i).span_saved->Set(static_cast<double>(levels.prefixes[i].span_saved_bytes));
  }
  impl_->objects.Set(static_cast<double>(levels.objects));
  impl_->object_bytes.Set(static_cast<double>(levels.object_bytes));
  impl_->leases.Set(static_cast<double>(levels.leases));
  impl_->reservations.Set(static_cast<double>(levels.reservations));
  impl_->landings.Set(static_cast<double>(levels.landings));
  impl_->compositions.Set(static_cast<double>(levels.compositions));
  impl_->sessions.Set(static_cast<double>(levels.sessions));
  impl_->draining.Set(levels.draining ? 1 : 0);
  impl_->memory_only_objects.Set(static_cast<double>(levels.memory_only_objects));
  impl_->memory_only_bytes.Set(static_cast<double>(levels.memory_only_bytes));
  impl_->metadata_queue.Set(static_cast<double>(levels.metadata_queue));
  impl_->worker_queue.Set(static_cast<double>(levels.worker_queue));
  impl_->disk_queue.Set(static_cast<double>(levels.disk_queue));
  impl_->copies_under_way.Set(static_cast<double>(levels.copies_under_way));
  Follow(impl_->log_dropped, levels.log_lines_dropped);
  Follow(impl_->log_suppressed, levels.log_lines_suppressed);
  Follow(impl_->quarantined, levels.quarantined);
  Follow(impl_->metadata_rejections, levels.metadata_queue_rejections);
  Follow(impl_->worker_rejections, levels.worker_queue_rejections);
}

void Metrics::TurnsTaken(const EventLoop::TurnTimes& times) {
  const auto add = [](const EventLoop::TurnTimes::Times& of, Histogram& seconds, Gauge& longest) {
    seconds.ObserveMultiple({of.turns.begin(), of.turns.end()}, static_cast<double>(of.sum) * 1e-9);
    longest.Set(std::max(longest.Value(), static_cast<double>(of.longest) * 1e-9));
  };
  add(times.elapsed, impl_->turn_seconds, impl_->longest_turn_seconds);
  add(times.cpu, impl_->turn_cpu_seconds, impl_->longest_turn_cpu_seconds);
}

void Metrics::Reloaded(bool accepted) {
  impl_->process.Reloaded(accepted);
}

const StatusBoard& Metrics::board() const {
  return impl_->board;
}

const Tallies& Metrics::tallies(TenantId tenant) const {
  return impl_->tallies.at(tenant);
}

CallMetrics& Metrics::calls() {
  return impl_->calls;
}

}  // namespace ashlar::daemon
