// SPDX-License-Identifier: Apache-2.0
#include "daemon/observe/router_metrics.h"

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>

#include "daemon/observe/follow.h"

namespace ashlar::daemon {

struct RouterMetrics::Impl {
  explicit Impl(prometheus::Registry& registry)
      : gauges(registry),
        plan_family(prometheus::BuildCounter()
                        .Name("ashlar_prefill_plans_total")
                        .Help("Planned cold prompts: distributed among engines, or local to the requesting one")
                        .Register(registry)),
        segment_family(prometheus::BuildCounter()
                           .Name("ashlar_prefill_segments_total")
                           .Help("Cold segments of plans, by the worker that computes them")
                           .Register(registry)),
        assignment_family(prometheus::BuildCounter()
                              .Name("ashlar_prefill_assignments_total")
                              .Help("Segments assigned to other engines, by outcome")
                              .Register(registry)) {}

  struct Gauges {
    explicit Gauges(prometheus::Registry& its_registry) : registry(its_registry) {}
    prometheus::Gauge& Add(const char* name, const char* help) {
      return prometheus::BuildGauge().Name(name).Help(help).Register(registry).Add({});
    }
    prometheus::Registry& registry;
    prometheus::Gauge& workers = Add("ashlar_prefill_workers", "Engines on this node that offer prefill");
    prometheus::Gauge& given =
        Add("ashlar_prefill_assigned_segments", "Segments assigned to these engines and not yet computed");
    prometheus::Gauge& plans = Add("ashlar_prefill_plans_in_progress", "Unfinished plans of engines on this node");
    prometheus::Gauge& pending =
        Add("ashlar_prefill_pending_segments", "Segments that other engines compute for these plans");
  } gauges;

  prometheus::Family<prometheus::Counter>&plan_family, &segment_family, &assignment_family;
  prometheus::Counter& shared = plan_family.Add({{"outcome", "distributed"}});
  prometheus::Counter& alone = plan_family.Add({{"outcome", "local"}});
  prometheus::Counter& own = segment_family.Add({{"worker", "requester"}});
  prometheus::Counter& here = segment_family.Add({{"worker", "local"}});
  prometheus::Counter& elsewhere = segment_family.Add({{"worker", "remote"}});
  prometheus::Counter& arrived = assignment_family.Add({{"outcome", "completed"}});
  prometheus::Counter& failed = assignment_family.Add({{"outcome", "failed"}});
  prometheus::Counter& late = assignment_family.Add({{"outcome", "timed_out"}});
  prometheus::Counter& given_back = assignment_family.Add({{"outcome", "returned"}});
};

RouterMetrics::RouterMetrics(prometheus::Registry& registry) : impl_(std::make_unique<Impl>(registry)) {}
RouterMetrics::~RouterMetrics() = default;

void RouterMetrics::Set(const RouterFigures& figures) {
  Impl& impl = *impl_;
  impl.gauges.workers.Set(static_cast<double>(figures.workers));
  impl.gauges.given.Set(static_cast<double>(figures.given));
  impl.gauges.plans.Set(static_cast<double>(figures.plans));
  impl.gauges.pending.Set(static_cast<double>(figures.pending));
  Follow(impl.shared, figures.planned - figures.alone);
  Follow(impl.alone, figures.alone);
  Follow(impl.own, figures.own_segments);
  Follow(impl.here, figures.here_segments);
  Follow(impl.elsewhere, figures.elsewhere_segments);
  Follow(impl.arrived, figures.arrived);
  Follow(impl.failed, figures.failed);
  Follow(impl.late, figures.late);
  Follow(impl.given_back, figures.given_back);
}

}  // namespace ashlar::daemon
