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
    constexpr auto kFirst = static_cast<int>(TakeOutcome::kAccepted), kLast = static_cast<int>(TakeOutcome::kTimedOut);
    for (int i = kFirst; i <= kLast; ++i) {
      const std::string outcome(Name(static_cast<TakeOutcome>(i)));
      for (const char* reason : {"drain", "replication"}) sent_family.Add({{"reason", reason}, {"outcome", outcome}});
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
  prometheus::Gauge& members =
      GaugeFamily("ashlar_cluster_members", "Nodes of the cluster, including this one").Add({});
  prometheus::Gauge& peers = GaugeFamily("ashlar_peers_connected", "Connected peers").Add({});
  prometheus::Gauge& directory =
      GaugeFamily("ashlar_directory_connected", "1 while the node is connected to etcd, else 0").Add({});
  prometheus::Gauge& entries = GaugeFamily("ashlar_directory_entries", "Known objects of other nodes").Add({});
  prometheus::Gauge& entry_bytes =
      GaugeFamily("ashlar_directory_bytes", "Memory used by the list of other nodes' objects").Add({});
  prometheus::Gauge& queued =
      GaugeFamily("ashlar_directory_queue_depth", "Announcements and withdrawals waiting to be written to etcd")
          .Add({});
  Family<prometheus::Gauge>& erasures_family = GaugeFamily(
      "ashlar_erasures_pending", "Erasures not yet acknowledged by this node (local) or by another node (remote)");
  Family<prometheus::Gauge>& erasure_age_family =
      GaugeFamily("ashlar_erasures_oldest_age_seconds", "Age of the oldest pending erasure; 0: none");
  prometheus::Gauge& erasures_here = erasures_family.Add({{"location", "local"}});
  prometheus::Gauge& erasures_elsewhere = erasures_family.Add({{"location", "remote"}});
  prometheus::Gauge& erasure_age_here = erasure_age_family.Add({{"location", "local"}});
  prometheus::Gauge& erasure_age_elsewhere = erasure_age_family.Add({{"location", "remote"}});
  prometheus::Gauge& readers =
      GaugeFamily("ashlar_peer_readers", "Peers that have opened objects on this node").Add({});
  prometheus::Gauge& leases = GaugeFamily("ashlar_peer_leases", "Objects on this node leased by peers").Add({});
  Family<prometheus::Gauge>& paths =
      GaugeFamily("ashlar_transport_connections", "Data connections to peers: rma by network cards, am by messages");
  prometheus::Gauge& by_am = paths.Add({{"protocol", "am"}});
  prometheus::Gauge& by_rma = paths.Add({{"protocol", "rma"}});
  prometheus::Gauge& registered =
      GaugeFamily("ashlar_transport_registered_bytes", "Memory registered for reads by peers' network cards").Add({});
  prometheus::Gauge& grants =
      GaugeFamily("ashlar_transport_grants", "Objects that peers may currently fetch or fill").Add({});
  prometheus::Gauge& transfers =
      GaugeFamily("ashlar_transport_transfers_in_progress", "Transfers in progress in either direction").Add({});
  prometheus::Gauge& loans =
      GaugeFamily("ashlar_transport_pinned_ranges", "Memory ranges that peers' network cards may currently be reading")
          .Add({});
  prometheus::Gauge& slow = GaugeFamily("ashlar_transport_rdma_fallback",
                                        "1 if RDMA is expected and the transport uses another protocol, else 0")
                                .Add({});
  Family<prometheus::Gauge>& expiries =
      GaugeFamily("ashlar_certificate_expiry_timestamp_seconds",
                  "Unix time when this node's certificate for peers or etcd expires; 0: no certificate");
  prometheus::Gauge& expiry = expiries.Add({{"use", "peers"}});
  prometheus::Gauge& etcd_expiry = expiries.Add({{"use", "etcd"}});
  Family<prometheus::Gauge>& lifetimes =
      GaugeFamily("ashlar_certificate_lifetime_seconds", "Total lifetime of that certificate; 0: no certificate");
  prometheus::Gauge& lifetime = lifetimes.Add({{"use", "peers"}});
  prometheus::Gauge& etcd_lifetime = lifetimes.Add({{"use", "etcd"}});

  prometheus::Counter& dropped =
      CounterFamily("ashlar_directory_announcements_dropped_total", "Announcements dropped because the queue was full")
          .Add({});
  prometheus::Counter& resyncs =
      CounterFamily("ashlar_directory_resyncs_total", "Namespaces that were read from etcd again in full").Add({});
  Family<prometheus::Counter>& opened_family =
      CounterFamily("ashlar_remote_requests_total", "Objects requested from peers, by outcome");
  prometheus::Counter& opened = opened_family.Add({{"outcome", "hit"}});
  prometheus::Counter& missed = opened_family.Add({{"outcome", "miss"}});
  prometheus::Counter& failed = opened_family.Add({{"outcome", "failed"}});
  prometheus::Counter& joined = opened_family.Add({{"outcome", "coalesced"}});
  prometheus::Counter& late =
      CounterFamily("ashlar_remote_lookup_timeouts_total", "Lookups that continued without the answers of all peers")
          .Add({});
  prometheus::Counter& fetched =
      CounterFamily("ashlar_remote_fetched_bytes_total", "Bytes of objects fetched from peers").Add({});
  prometheus::Counter& lost =
      CounterFamily("ashlar_remote_fetch_failures_total", "Parts of objects that no node delivered").Add({});
  prometheus::Counter& moved =
      CounterFamily("ashlar_remote_failovers_total", "Fetches that continued at another node").Add({});
  Family<prometheus::Counter>& bytes_family =
      CounterFamily("ashlar_transport_bytes_total", "Bytes transferred between nodes, by direction");
  prometheus::Counter& sent = bytes_family.Add({{"direction", "sent"}});
  prometheus::Counter& received = bytes_family.Add({{"direction", "received"}});
  prometheus::Counter& read = CounterFamily("ashlar_transport_rma_read_bytes_total",
                                            "Received bytes that this node's network card read from peers")
                                  .Add({});
  prometheus::Counter& refused = CounterFamily("ashlar_transport_requests_rejected_total",
                                               "Transfer requests rejected because they had no valid grant")
                                     .Add({});
  prometheus::Counter& malformed =
      CounterFamily("ashlar_transport_malformed_messages_total", "Malformed transport messages received").Add({});
  Family<prometheus::Counter>& hedged_family =
      CounterFamily("ashlar_remote_hedges_total", "Hedged requests to a second node; won: its bytes came first");
  prometheus::Counter& won = hedged_family.Add({{"outcome", "won"}});
  prometheus::Counter& lost_hedges = hedged_family.Add({{"outcome", "lost"}});
  Family<prometheus::Counter>& sent_family =
      CounterFamily("ashlar_offers_sent_total", "Objects offered to peers, by reason and outcome");
  Family<prometheus::Counter>& received_family =
      CounterFamily("ashlar_offers_received_total", "Objects offered by peers, by outcome");
  Family<prometheus::Counter>& offered_family =
      CounterFamily("ashlar_offered_bytes_total", "Bytes of accepted offers, by direction");
  prometheus::Counter& offers_sent_bytes = offered_family.Add({{"direction", "sent"}});
  prometheus::Counter& offers_received_bytes = offered_family.Add({{"direction", "received"}});
  Family<prometheus::Counter>& refusal_family =
      CounterFamily("ashlar_peers_rejected_total", "Daemons rejected as peers, by reason");
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
  impl.slow.Set(figures.rdma_fallback ? 1 : 0);
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
  Follow(impl.offers_sent_bytes, figures.offered_bytes);
  Follow(impl.offers_received_bytes, figures.taken_bytes);
  for (const auto& [reason, outcome, count] : figures.offers) {
    prometheus::Counter& counter = reason == "received"
                                       ? impl.received_family.Add({{"outcome", outcome}})
                                       : impl.sent_family.Add({{"reason", reason}, {"outcome", outcome}});
    Follow(counter, count);
  }
  for (const auto& [reason, count] : figures.refusals) {
    Follow(impl.refusal_family.Add({{"reason", reason}}), count);
  }
}

}  // namespace ashlar::daemon
