// SPDX-License-Identifier: Apache-2.0
// Calls: the control plane of one node in a simulation. It connects to each member, greets, and carries the calls both
// ways as the messages that gRPC would carry. Who connects to whom, greetings and ends of connections are as in
// daemon/peer/control; that code itself, TLS and gRPC are left out.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/peer/channels/peer_asker.h"
#include "daemon/peer/channels/prefill_asker.h"
#include "tests/simulation/nodes/network.h"
#include "tests/simulation/nodes/nodes.h"

namespace ashlar::simulation::nodes {

class Calls;

// All processes that serve calls, by machine; the planted bug; and counts.
struct CallSwitch {
  CallSwitch(Network& its_network, Bug its_bug) : network(its_network), bug(its_bug) {}
  Network& network;
  const Bug bug;
  std::map<size_t, Calls*> at;
  // A tenant that one machine's configuration does not share with another machine.
  struct NotShared {
    size_t of = 0, with = 0;
    std::string tenant;
  };
  std::optional<NotShared> not_shared;
  uint64_t busy_percent = 0;  // percentage of calls that find no space on arrival
  bool Shares(size_t of, size_t with, const std::string& tenant) const {
    return !not_shared || not_shared->of != of || not_shared->with != with || not_shared->tenant != tenant;
  }
  uint64_t refused_tenant = 0, refused_busy = 0;      // calls
  uint64_t answered = 0, failed = 0, unanswered = 0;  // calls; unanswered: being served, without an answer yet
  std::string wrong;                                  // a call that was answered twice, or too late
};

class Calls final : public daemon::PeerAsker, public daemon::PrefillAsker {
 public:
  static constexpr Nanos kTimeout = 10 * kSecond;  // a peer that is silent for this long is gone
  static constexpr Nanos kCallTimeout = kSecond;
  static constexpr size_t kMostCalls = 64;  // limit of calls in progress to one peer

  Calls(CallSwitch& all, size_t machine, const std::shared_ptr<Life>& life, const MachineClock& clock,
        std::vector<std::string> tenants, std::function<void(const daemon::Member&)> gone);
  ~Calls() override;
  static std::string NameOf(size_t machine) { return "node" + std::to_string(machine); }
  static size_t MachineOf(const daemon::Member& member);
  const daemon::PeerHello& hello() const { return self_; }

  void Serve(daemon::PeerCalls& served) { served_ = &served; }
  void Update(const std::vector<std::shared_ptr<const daemon::Member>>& members);
  // Ends all connections, and every call with them.
  void End();
  size_t connected() const;
  size_t under_way() const;

  bool Shares(const daemon::Member& member, const std::string& tenant) const override {
    return all_.Shares(machine_, MachineOf(member), tenant);
  }
  void Open(const daemon::Member& member, const std::string& tenant, daemon::PeerOpen open,
            daemon::PeerCalls::Done<std::vector<daemon::PeerOpened>> done) override;
  void Renew(const daemon::Member& member, daemon::PeerRenew renew,
             daemon::PeerCalls::Done<std::vector<uint32_t>> done) override;
  void Offer(const daemon::Member& member, const std::string& tenant, daemon::PeerOffer offer,
             daemon::PeerCalls::Done<std::vector<TakeOutcome>> done) override;
  void Close(const daemon::Member& member, std::vector<daemon::PeerLease> leases,
             std::function<void(absl::Status)> done) override;
  void Workers(const daemon::Member& member, const std::string& tenant, const NamespaceId& ns,
               daemon::PeerCalls::Done<std::vector<daemon::PeerWorker>> done) override;
  void Prefill(const daemon::Member& member, const std::string& tenant, daemon::PeerPrefill prefill,
               daemon::PeerCalls::Done<daemon::PeerOpened> done) override;
  void Probe(const daemon::Member& member, const std::string& tenant, const daemon::PeerProbe& probe,
             daemon::PeerCalls::Done<v1::NodeProbe> done) override;

 private:
  // The client of one member. It reconnects repeatedly until the member leaves.
  struct Client {
    std::shared_ptr<const daemon::Member> member;
    size_t machine = 0;
    uint64_t attempt = 0;  // number of the attempt to connect
    bool connected = false;
    std::weak_ptr<Life> there;
    uint64_t number = 0;  // number of the connection
    Nanos retry_in = kSecond / 10;
    std::shared_ptr<Wire> wire;
    std::map<uint64_t, std::function<void(absl::Status)>> calls;  // calls in progress, with functions that fail them
  };
  // The server for one node.
  struct Server {
    daemon::PeerHello hello;
    std::weak_ptr<Life> there;
    uint64_t number = 0;  // number of the other end's client
    std::shared_ptr<Wire> wire;
  };

  void Connect(uint64_t incarnation);
  void Greeted(const daemon::PeerHello& hello, size_t from, const std::weak_ptr<Life>& life, uint64_t number);
  void Welcomed(uint64_t incarnation, uint64_t attempt, const std::weak_ptr<Life>& life, uint64_t number);
  void ClientEnded(uint64_t incarnation, uint64_t attempt);
  void Reset(uint64_t number);
  void ServerEnded(size_t from, uint64_t number);
  void WatchClient(uint64_t incarnation, uint64_t attempt);
  void WatchServer(size_t from, uint64_t number);
  // Runs `event` where that life is, when it arrives.
  static void At(CallSwitch& all, size_t machine, const std::weak_ptr<Life>& life, const std::shared_ptr<Wire>& over,
                 std::function<void(Calls&)> event);
  template <typename Request, typename Reply, typename Result, typename Handle, typename ReadReply>
  void Start(const daemon::Member& member, Nanos patience, Request request, Handle handle, ReadReply read,
             daemon::PeerCalls::Done<Result> done);
  // At the other end: the server of the call. Null: the connection has ended.
  const Server* From(size_t machine, uint64_t number) const;
  uint32_t TenantOf(const std::string& name) const;

  CallSwitch& all_;
  const size_t machine_;
  const std::shared_ptr<Life> life_;
  const MachineClock& clock_;
  const std::vector<std::string> tenants_;
  const std::function<void(const daemon::Member&)> gone_;
  daemon::PeerHello self_;
  daemon::PeerCalls* served_ = nullptr;
  uint64_t drawn_ = 0;
  std::map<uint64_t, Client> clients_;         // keyed by incarnation
  std::map<size_t, Server> servers_;           // keyed by machine
  std::map<size_t, daemon::PeerHello> first_;  // kServesFormerNodes: of each machine that has greeted
};

}  // namespace ashlar::simulation::nodes
