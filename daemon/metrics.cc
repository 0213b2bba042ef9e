#include "daemon/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <array>
#include <bit>
#include <exception>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/log.h"

namespace ashlar::daemon {
namespace {

using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;
using prometheus::Histogram;
using prometheus::Labels;
using storage::TenantId;

// 10 µs to 10 s: a look-up takes tens of microseconds, the landing of a long prompt a good part of a second.
const Histogram::BucketBoundaries kSeconds = {1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3, 10};

// A counter's children by (tenant, kind, third label), made when first counted.
class Counters {
 public:
  Counters(Family<Counter>& family, const std::vector<std::string>& tenants, std::string third = "")
      : family_(family), tenants_(tenants), third_(std::move(third)) {}

  void Add(TenantId tenant, ObjectKind kind, uint8_t value, absl::string_view name, uint64_t amount) {
    Counter*& child = children_[{tenant, kind, value}];
    if (child == nullptr) {
      Labels labels = {{"tenant", tenants_.at(tenant)}, {"kind", std::string(Name(kind))}};
      if (!third_.empty()) labels[third_] = std::string(name);
      child = &family_.Add(labels);
    }
    child->Increment(static_cast<double>(amount));
  }
  void Add(TenantId tenant, ObjectKind kind, uint64_t amount) { Add(tenant, kind, 0, "", amount); }

 private:
  Family<Counter>& family_;
  const std::vector<std::string>& tenants_;
  const std::string third_;
  std::map<std::tuple<TenantId, ObjectKind, uint8_t>, Counter*> children_;
};

}  // namespace

absl::string_view Name(RpcMethod method) {
  static constexpr std::array<absl::string_view, kRpcMethods> kNames = {
      "OpenModel", "DeclarePages", "Match",       "Reserve", "Publish", "Abandon",   "Land",
      "Quiesce",   "Release",      "AttachLease", "Advance", "Compose", "CloseModel"};
  return kNames[static_cast<size_t>(method)];
}

struct Metrics::Impl {
  explicit Impl(const std::vector<std::string>& tenant_names) : tenants(tenant_names) {
    for (const std::string& tenant : tenants) {
      const Labels labels = {{"tenant", tenant}};
      landed_bytes.push_back(&landed_family.Add(labels));
      checksum_failures.push_back(&checksum_family.Add(labels));
      memory_refusals.push_back(&memory_family.Add(labels));
      const Labels dram = {{"tenant", tenant}, {"tier", std::string(Name(TierKind::kDram))}};
      used.push_back(&used_family.Add(dram));
      held.push_back(&held_family.Add(dram));
      capacity.push_back(&capacity_family.Add(dram));
      region_bytes.push_back(&region_family.Add(labels));
    }
    for (size_t i = 0; i < kRpcMethods; ++i) {
      const std::string name(Name(static_cast<RpcMethod>(i)));
      rpc_seconds[i] = &rpc_seconds_family.Add({{"method", name}}, kSeconds);
    }
  }

  Family<Counter>& CounterFamily(const char* name, const char* help) {
    return prometheus::BuildCounter().Name(name).Help(help).Register(*registry);
  }
  Family<Gauge>& GaugeFamily(const char* name, const char* help) {
    return prometheus::BuildGauge().Name(name).Help(help).Register(*registry);
  }
  Gauge& SingleGauge(const char* name, const char* help) { return GaugeFamily(name, help).Add({}); }

  const std::vector<std::string> tenants;
  std::shared_ptr<prometheus::Registry> registry = std::make_shared<prometheus::Registry>();

  Counters hits{CounterFamily("ashlar_hits_total", "Segments found by look-ups"), tenants, "tier"};
  Counters hit_tokens{CounterFamily("ashlar_hit_tokens_total", "Tokens of segments found"), tenants, "tier"};
  Counters misses{CounterFamily("ashlar_misses_total", "Segments missed by look-ups and landings"), tenants, "reason"};
  Counters miss_tokens{CounterFamily("ashlar_miss_tokens_total", "Tokens of segments missed"), tenants, "reason"};
  Counters evictions{CounterFamily("ashlar_evictions_total", "Objects and reservations that left the cache"), tenants,
                     "reason"};
  Counters evicted_bytes{CounterFamily("ashlar_evicted_bytes_total", "Bytes that left the cache"), tenants, "reason"};
  Counters reserved{CounterFamily("ashlar_reserve_outcomes_total", "Objects that engines asked to publish"), tenants,
                    "outcome"};
  Counters published{CounterFamily("ashlar_published_total", "Objects published"), tenants};
  Counters published_bytes{CounterFamily("ashlar_published_bytes_total", "Bytes of objects published"), tenants};

  Family<Counter>& landed_family = CounterFamily("ashlar_landed_bytes_total", "Bytes of objects landed");
  Family<Counter>& checksum_family =
      CounterFamily("ashlar_checksum_failures_total", "Copies found corrupt and dropped");
  Family<Counter>& memory_family = CounterFamily(
      "ashlar_memory_refusals_total", "Arenas within the tenant's budget that the machine had no memory for");
  std::vector<Counter*> landed_bytes, checksum_failures, memory_refusals;

  Family<Gauge>& used_family = GaugeFamily("ashlar_tier_used_bytes", "Bytes in slots");
  Family<Gauge>& held_family = GaugeFamily("ashlar_tier_held_bytes", "Bytes in arenas, used or not");
  Family<Gauge>& capacity_family = GaugeFamily("ashlar_tier_capacity_bytes", "The tenant's budget");
  Family<Gauge>& region_family = GaugeFamily("ashlar_region_bytes", "Regions of the tenant's sessions");
  std::vector<Gauge*> used, held, capacity, region_bytes;

  Gauge& objects = SingleGauge("ashlar_objects", "Objects in the cache");
  Gauge& object_bytes = SingleGauge("ashlar_object_bytes", "Bytes of objects in the cache");
  Gauge& leases = SingleGauge("ashlar_leases", "Leases that are held");
  Gauge& reservations = SingleGauge("ashlar_reservations", "Reservations that wait for their publish");
  Gauge& landings = SingleGauge("ashlar_landings", "Landings in flight");
  Gauge& compositions = SingleGauge("ashlar_compositions", "Compositions in flight");
  Gauge& sessions = SingleGauge("ashlar_sessions", "Sessions of engines, those that drain included");

  Family<Gauge>& queue_family = GaugeFamily("ashlar_queue_depth", "Work that waits in a bounded queue");
  Gauge& metadata_queue = queue_family.Add({{"queue", "metadata"}});
  Gauge& worker_queue = queue_family.Add({{"queue", "workers"}});
  Family<Counter>& rejection_family =
      CounterFamily("ashlar_queue_rejections_total", "Work refused because a bounded queue was full");
  Counter& metadata_rejections = rejection_family.Add({{"queue", "metadata"}});
  Counter& worker_rejections = rejection_family.Add({{"queue", "workers"}});

  Family<Histogram>& rpc_seconds_family = prometheus::BuildHistogram()
                                              .Name("ashlar_rpc_duration_seconds")
                                              .Help("From the arrival of a call to its last answer")
                                              .Register(*registry);
  std::array<Histogram*, kRpcMethods> rpc_seconds{};
  Family<Counter>& rpc_family = CounterFamily("ashlar_rpcs_total", "Calls answered, by status");

  Counter& connections_refused =
      CounterFamily("ashlar_connections_refused_total", "RPC connections beyond the number that their user may have")
          .Add({});

  Family<Counter>& composition_family =
      CounterFamily("ashlar_compositions_total", "Compositions, by what became of them");
  Histogram& composition_seconds = prometheus::BuildHistogram()
                                       .Name("ashlar_composition_duration_seconds")
                                       .Help("From a composition's admission to its end, of those that were done")
                                       .Register(*registry)
                                       .Add({}, kSeconds);

  std::unique_ptr<prometheus::Exposer> exposer;  // last: it stops answering before what it shows goes
};

Metrics::Metrics(const std::vector<std::string>& tenants) : impl_(std::make_unique<Impl>(tenants)) {}
Metrics::~Metrics() = default;

absl::Status Metrics::Serve(const std::string& address) {
  try {
    impl_->exposer = std::make_unique<prometheus::Exposer>(address, 1);
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat("cannot serve metrics on ", address, ": ", error.what()));
  }
  impl_->exposer->RegisterCollectable(impl_->registry);
  return absl::OkStatus();
}

int Metrics::port() const {
  return impl_->exposer == nullptr ? 0 : impl_->exposer->GetListeningPorts().at(0);
}

void Metrics::Hit(TenantId tenant, ObjectKind kind, TierKind tier, uint64_t tokens) {
  impl_->hits.Add(tenant, kind, static_cast<uint8_t>(tier), Name(tier), 1);
  impl_->hit_tokens.Add(tenant, kind, static_cast<uint8_t>(tier), Name(tier), tokens);
}

void Metrics::Miss(TenantId tenant, ObjectKind kind, MissReason reason, uint64_t tokens) {
  impl_->misses.Add(tenant, kind, static_cast<uint8_t>(reason), Name(reason), 1);
  impl_->miss_tokens.Add(tenant, kind, static_cast<uint8_t>(reason), Name(reason), tokens);
}

void Metrics::Evicted(TenantId tenant, ObjectKind kind, const storage::Ghost& ghost) {
  const MissReason why = ghost.reason;
  impl_->evictions.Add(tenant, kind, static_cast<uint8_t>(why), Name(why), 1);
  impl_->evicted_bytes.Add(tenant, kind, static_cast<uint8_t>(why), Name(why), ghost.bytes);
  if (why == MissReason::kChecksumFailed) impl_->checksum_failures.at(tenant)->Increment();
}

void Metrics::Published(TenantId tenant, ObjectKind kind, uint64_t bytes) {
  impl_->published.Add(tenant, kind, 1);
  impl_->published_bytes.Add(tenant, kind, bytes);
}

void Metrics::Landed(TenantId tenant, uint64_t bytes) {
  impl_->landed_bytes.at(tenant)->Increment(static_cast<double>(bytes));
}

void Metrics::NoMemory(TenantId tenant, absl::string_view why) {
  Counter& refusals = *impl_->memory_refusals.at(tenant);
  refusals.Increment();
  // A full machine refuses every reservation: the first is news, and then each power of two.
  const auto count = static_cast<uint64_t>(refusals.Value());
  if (!std::has_single_bit(count)) return;
  Log(LogLevel::kWarning, "no memory within the budget",
      {{"tenant", impl_->tenants.at(tenant)}, {"error", std::string(why)}, {"refusals", count}});
}

void Metrics::Reserved(TenantId tenant, ObjectKind kind, ReserveOutcome outcome) {
  impl_->reserved.Add(tenant, kind, static_cast<uint8_t>(outcome), Name(outcome), 1);
}

void Metrics::Composed(TenantId tenant, MissReason outcome, storage::Nanos elapsed) {
  const std::string name(outcome == MissReason::kNone ? "done" : Name(outcome));
  impl_->composition_family.Add({{"tenant", impl_->tenants.at(tenant)}, {"outcome", name}}).Increment();
  // Those that end early, most of them at once, would hide how long the work takes.
  if (outcome == MissReason::kNone) impl_->composition_seconds.Observe(static_cast<double>(elapsed) * 1e-9);
}

void Metrics::Set(const Levels& levels) {
  for (size_t i = 0; i < levels.dram.size(); ++i) {
    impl_->used.at(i)->Set(static_cast<double>(levels.dram[i].used_bytes));
    impl_->held.at(i)->Set(static_cast<double>(levels.dram[i].held_bytes));
    impl_->capacity.at(i)->Set(static_cast<double>(levels.dram[i].capacity_bytes));
  }
  for (size_t i = 0; i < levels.region_bytes.size(); ++i) {
    impl_->region_bytes.at(i)->Set(static_cast<double>(levels.region_bytes[i]));
  }
  impl_->objects.Set(static_cast<double>(levels.objects));
  impl_->object_bytes.Set(static_cast<double>(levels.object_bytes));
  impl_->leases.Set(static_cast<double>(levels.leases));
  impl_->reservations.Set(static_cast<double>(levels.reservations));
  impl_->landings.Set(static_cast<double>(levels.landings));
  impl_->compositions.Set(static_cast<double>(levels.compositions));
  impl_->sessions.Set(static_cast<double>(levels.sessions));
  impl_->metadata_queue.Set(static_cast<double>(levels.metadata_queue));
  impl_->worker_queue.Set(static_cast<double>(levels.worker_queue));
  const auto advance = [](Counter& counter, uint64_t total) {
    counter.Increment(static_cast<double>(total) - counter.Value());
  };
  advance(impl_->metadata_rejections, levels.metadata_queue_rejections);
  advance(impl_->worker_rejections, levels.worker_queue_rejections);
}

void Metrics::RpcFinished(RpcMethod method, absl::StatusCode code, double seconds) {
  impl_->rpc_seconds[static_cast<size_t>(method)]->Observe(seconds);
  impl_->rpc_family.Add({{"method", std::string(Name(method))}, {"code", absl::StatusCodeToString(code)}}).Increment();
}

void Metrics::ConnectionRefused() {
  impl_->connections_refused.Increment();
}

}  // namespace ashlar::daemon
