// SPDX-License-Identifier: Apache-2.0
#include "daemon/observe/cluster_metrics.h"

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>

#include <map>
#include <string>

#include "daemon/observe/follow.h"
#include "proto/outcome.h"

namespace ashlar::daemon {
namespace {

using prometheus::Family;

}  // namespace

struct ClusterMetrics::Impl {
  explicit Impl(prometheus::Registry& its_registry) : registry(its_registry) {
    constexpr auto kFirst = static_cast<int>(TakeOutcome::kTaken), kLast = static_cast<int>(TakeOutcome::kLate);
    for (int i = kFirst; i <= kLast; ++i) {
      const std::string outcome(Name(static_cast<TakeOutcome>(i)));
      for (const char* why : {"drain", "hot"}) made_family.Add({{"reason", why}, {"outcome", outcome}});
      received_family.Add({{"outcome", outcome}});
    }
  }

  Family<prometheus::Counter>& CounterFamily(const char* name, const char* help) {
    return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
  }
  Family<prometheus::Gauge>& GaugeFamily(const char* name, const char* help) {
    return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
  }

  prometheus::Registry& registry;
  PeerMetrics by_node{registry};
  prometheus::Gauge& members = GaugeFamily("ashlar_cluster_members", "Nodes of the cluster, this one too").Add({});
  prometheus::Gauge& peers = GaugeFamily("ashlar_peers_connected", "Nodes that this one has a connection to").Add({});
  prometheus::Gauge& directory = GaugeFamily("ashlar_directory_connected", "1 while etcd is reached").Add({});
  prometheus::Gauge& entries =
      GaugeFamily("ashlar_directory_entries", "Objects of other nodes that this one knows of").Add({});
  prometheus::Gauge& entry_bytes =
      GaugeFamily("ashlar_directory_bytes", "Bytes of memory that knowing of other nodes' objects takes").Add({});
  prometheus::Gauge& queued =
      GaugeFamily("ashlar_directory_queued", "Announcements and withdrawals that wait to be written").Add({});
  Family<prometheus::Gauge>& erasures_family =
      GaugeFamily("ashlar_erasures_pending", "Erasures that a present node has not acknowledged, by which node");
  Family<prometheus::Gauge>& erasure_age_family =
      GaugeFamily("ashlar_erasures_oldest_age_seconds", "For how long the oldest of these has waited");
  prometheus::Gauge& erasures_here = erasures_family.Add({{"where", "here"}});
  prometheus::Gauge& erasures_elsewhere = erasures_family.Add({{"where", "elsewhere"}});
  prometheus::Gauge& erasure_age_here = erasure_age_family.Add({{"where", "here"}});
  prometheus::Gauge& erasure_age_elsewhere = erasure_age_family.Add({{"where", "elsewhere"}});
  prometheus::Gauge& readers =
      GaugeFamily("ashlar_peer_readers", "Connected nodes that have opened objects here").Add({});
  prometheus::Gauge& leases = GaugeFamily("ashlar_peer_leases", "Objects that other nodes hold here").Add({});
  Family<prometheus::Gauge>& paths =
      GaugeFamily("ashlar_transport_peers", "Nodes that this one has a connection for bytes to, by their path");
  prometheus::Gauge& by_am = paths.Add({{"path", "am"}});
  prometheus::Gauge& by_rma = paths.Add({{"path", "rma"}});
  prometheus::Gauge& registered =
      GaugeFamily("ashlar_transport_registered_bytes", "Memory that network cards of peers may read").Add({});
  prometheus::Gauge& grants =
      GaugeFamily("ashlar_transport_grants", "Objects that peers may fetch or fill now").Add({});
  prometheus::Gauge& transfers =
      GaugeFamily("ashlar_transport_transfers", "Requests for bytes under way, of either side").Add({});
  prometheus::Gauge& loans =
      GaugeFamily("ashlar_transport_loans", "Memory that network cards of peers may be reading now").Add({});
  prometheus::Gauge& slow =
      GaugeFamily("ashlar_transport_slow_fabric", "1 where RDMA was asked for and bytes go another way").Add({});
  Family<prometheus::Gauge>& expiries =
      GaugeFamily("ashlar_certificate_expiry_timestamp_seconds",
                  "When this node's certificate for peers or for etcd ends, Unix time; 0: it has none");
  prometheus::Gauge& expiry = expiries.Add({{"use", "peers"}});
  prometheus::Gauge& etcd_expiry = expiries.Add({{"use", "etcd"}});
  Family<prometheus::Gauge>& lifetimes = GaugeFamily("ashlar_certificate_lifetime_seconds",
                                                     "For how long that certificate is valid in all; 0: there is none");
  prometheus::Gauge& lifetime = lifetimes.Add({{"use", "peers"}});
  prometheus::Gauge& etcd_lifetime = lifetimes.Add({{"use", "etcd"}});

  prometheus::Counter& dropped =
      CounterFamily("ashlar_directory_dropped_total", "Announcements that found no room in the queue").Add({});
  prometheus::Counter& resyncs =
      CounterFamily("ashlar_directory_resyncs_total", "Namespaces that were read anew as a whole").Add({});
  Family<prometheus::Counter>& opened_family =
      CounterFamily("ashlar_remote_objects_total", "Objects that other nodes were asked for, by what became of it");
  prometheus::Counter& opened = opened_family.Add({{"outcome", "opened"}});
  prometheus::Counter& missed = opened_family.Add({{"outcome", "missed"}});
  prometheus::Counter& failed = opened_family.Add({{"outcome", "failed"}});
  prometheus::Counter& joined = opened_family.Add({{"outcome", "joined"}});
  prometheus::Counter& late =
      CounterFamily("ashlar_remote_late_lookups_total", "Look-ups that went on without all answers of other nodes")
          .Add({});
  prometheus::Counter& fetched =
      CounterFamily("ashlar_remote_fetched_bytes_total", "Bytes of objects that came from other nodes").Add({});
  prometheus::Counter& lost =
      CounterFamily("ashlar_remote_lost_pieces_total", "Pieces of objects that no node delivered").Add({});
  prometheus::Counter& moved =
      CounterFamily("ashlar_remote_failovers_total", "Fetches that went on at another node").Add({});
  Family<prometheus::Counter>& bytes_family =
      CounterFamily("ashlar_transport_bytes_total", "Bytes between nodes, by direction");
  prometheus::Counter& sent = bytes_family.Add({{"direction", "sent"}});
  prometheus::Counter& received = bytes_family.Add({{"direction", "received"}});
  prometheus::Counter& read =
      CounterFamily("ashlar_transport_read_bytes_total", "Bytes that this node's network card read at others").Add({});
  prometheus::Counter& refused =
      CounterFamily("ashlar_transport_refused_total", "Requests for bytes without a right to them").Add({});
  prometheus::Counter& malformed =
      CounterFamily("ashlar_transport_malformed_total", "Messages for the transport that are none").Add({});
  Family<prometheus::Counter>& hedged_family = CounterFamily(
      "ashlar_remote_hedges_total", "Pieces that a second node was asked for, by whether its bytes came first");
  prometheus::Counter& won = hedged_family.Add({{"outcome", "won"}});
  prometheus::Counter& lost_hedges = hedged_family.Add({{"outcome", "lost"}});
  Family<prometheus::Counter>& made_family =
      CounterFamily("ashlar_offers_made_total", "Objects that this node offered to others, by reason and outcome");
  Family<prometheus::Counter>& received_family =
      CounterFamily("ashlar_offers_received_total", "Objects that others offered to this node, by outcome");
  Family<prometheus::Counter>& offered_family =
      CounterFamily("ashlar_offered_bytes_total", "Bytes of offered objects that were taken, by direction");
  prometheus::Counter& given = offered_family.Add({{"direction", "given"}});
  prometheus::Counter& taken = offered_family.Add({{"direction", "taken"}});
  Family<prometheus::Counter>& refusal_family =
      CounterFamily("ashlar_peer_refusals_total", "Other daemons that were refused, by reason");
};

ClusterMetrics::ClusterMetrics(prometheus::Registry& registry) : impl_(std::make_unique<Impl>(registry)) {}
ClusterMetrics::~ClusterMetrics() = default;

void ClusterMetrics::Set(const ClusterFigures& figures) {
  Impl& impl = *impl_;
  impl.members.Set(static_cast<double>(figures.members));
  impl.peers.Set(static_cast<double>(figures.peers_connected));
  impl.directory.Set(figures.directory_connected ? 1 : 0);
  impl.entries.Set(static_cast<double>(figures.directory_entries));
  impl.entry_bytes.Set(static_cast<double>(figures.directory_bytes));
  impl.queued.Set(static_cast<double>(figures.directory_queued));
  impl.by_node.Set(figures.peers);
  impl.erasures_here.Set(static_cast<double>(figures.erasures_here.count));
  impl.erasures_elsewhere.Set(static_cast<double>(figures.erasures_elsewhere.count));
  impl.erasure_age_here.Set(figures.erasures_here.oldest_seconds);
  impl.erasure_age_elsewhere.Set(figures.erasures_elsewhere.oldest_seconds);
  impl.readers.Set(static_cast<double>(figures.peer_readers));
  impl.leases.Set(static_cast<double>(figures.peer_leases));
  impl.by_am.Set(static_cast<double>(figures.peers_by_am));
  impl.by_rma.Set(static_cast<double>(figures.peers_by_rma));
  impl.registered.Set(static_cast<double>(figures.registered_bytes));
  impl.grants.Set(static_cast<double>(figures.transport_grants));
  impl.transfers.Set(static_cast<double>(figures.transport_transfers));
  impl.lifetime.Set(static_cast<double>(figures.certificate_seconds));
  impl.etcd_lifetime.Set(static_cast<double>(figures.etcd_certificate_seconds));
  impl.loans.Set(static_cast<double>(figures.transport_loans));
  impl.slow.Set(figures.slow_fabric ? 1 : 0);
  impl.expiry.Set(static_cast<double>(figures.certificate_expiry));
  impl.etcd_expiry.Set(static_cast<double>(figures.etcd_certificate_expiry));
  Follow(impl.dropped, figures.directory_dropped);
  Follow(impl.resyncs, figures.directory_resyncs);
  Follow(impl.opened, figures.opened);
  Follow(impl.missed, figures.missed);
  Follow(impl.failed, figures.failed);
  Follow(impl.joined, figures.joined);
  Follow(impl.late, figures.late);
  Follow(impl.fetched, figures.fetched_bytes);
  Follow(impl.lost, figures.failed_pieces);
  Follow(impl.moved, figures.moved);
  Follow(impl.sent, figures.bytes_sent);
  Follow(impl.received, figures.bytes_received);
  Follow(impl.read, figures.read_bytes);
  Follow(impl.refused, figures.transport_refused);
  Follow(impl.malformed, figures.transport_malformed);
  Follow(impl.won, figures.hedges_won);
  Follow(impl.lost_hedges, figures.hedges_lost);
  Follow(impl.given, figures.offered_bytes);
  Follow(impl.taken, figures.taken_bytes);
  for (const auto& [why, outcome, count] : figures.offers) {
    prometheus::Counter& counter = why == "received" ? impl.received_family.Add({{"outcome", outcome}})
                                                     : impl.made_family.Add({{"reason", why}, {"outcome", outcome}});
    Follow(counter, count);
  }
  for (const auto& [reason, count] : figures.refusals) {
    Follow(impl.refusal_family.Add({{"reason", reason}}), count);
  }
}

}  // namespace ashlar::daemon
