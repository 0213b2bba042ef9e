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
                        .Help("Cold prompts that were planned, by whether others compute a part")
                        .Register(registry)),
        segment_family(prometheus::BuildCounter()
                           .Name("ashlar_prefill_segments_total")
                           .Help("Cold segments of plans, by the engine that was to compute them")
                           .Register(registry)),
        assignment_family(prometheus::BuildCounter()
                              .Name("ashlar_prefill_assignments_total")
                              .Help("Segments that others were to compute, by what became of it")
                              .Register(registry)) {}

  struct Gauges {
    explicit Gauges(prometheus::Registry& its_registry) : registry(its_registry) {}
    prometheus::Gauge& Add(const char* name, const char* help) {
      return prometheus::BuildGauge().Name(name).Help(help).Register(registry).Add({});
    }
    prometheus::Registry& registry;
    prometheus::Gauge& workers = Add("ashlar_prefill_workers", "Engines of this node that offer prefill");
    prometheus::Gauge& given = Add("ashlar_prefill_given_segments", "Segments that these have and have not computed");
    prometheus::Gauge& plans = Add("ashlar_prefill_open_plans", "Plans of engines of this node that have not ended");
    prometheus::Gauge& pending = Add("ashlar_prefill_pending_segments", "Segments that others compute for these plans");
  } gauges;

  prometheus::Family<prometheus::Counter>&plan_family, &segment_family, &assignment_family;
  prometheus::Counter& shared = plan_family.Add({{"outcome", "shared"}});
  prometheus::Counter& alone = plan_family.Add({{"outcome", "alone"}});
  prometheus::Counter& own = segment_family.Add({{"worker", "asker"}});
  prometheus::Counter& here = segment_family.Add({{"worker", "here"}});
  prometheus::Counter& elsewhere = segment_family.Add({{"worker", "elsewhere"}});
  prometheus::Counter& arrived = assignment_family.Add({{"outcome", "arrived"}});
  prometheus::Counter& failed = assignment_family.Add({{"outcome", "failed"}});
  prometheus::Counter& late = assignment_family.Add({{"outcome", "late"}});
  prometheus::Counter& given_back = assignment_family.Add({{"outcome", "given_back"}});
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
