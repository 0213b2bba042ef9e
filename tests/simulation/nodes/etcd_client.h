// SPDX-License-Identifier: Apache-2.0
// SimulatedEtcdClient: one node's connection with the simulated etcd.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "daemon/peer/directory/etcd_client.h"
#include "tests/simulation/nodes/etcd.h"
#include "tests/simulation/nodes/network.h"

namespace ashlar::simulation::nodes {

class SimulatedEtcdClient final : public daemon::EtcdClient {
 public:
  // `wake`: the directory has something to do. The machine of etcd is the network's last one.
  SimulatedEtcdClient(Network& network, Etcd& etcd, size_t machine, const std::shared_ptr<Life>& life,
                      const MachineClock& clock, const daemon::RoundTrips::Bounds& limits, std::function<void()> wake)
      : network_(network),
        etcd_(etcd),
        machine_(machine),
        life_(life),
        clock_(clock),
        limits_(limits),
        wake_(std::move(wake)) {}
  ~SimulatedEtcdClient() override { Disconnect(); }

  void Connect(const std::string& endpoint, const daemon::EtcdTls& tls) override;
  void Disconnect() override;
  void set_token(const std::string&) override {}
  Nanos Limit() const override { return answers_.Limit(limits_); }
  void Answered(Nanos began) override { answers_.Answered(clock_.Now() - began); }
  void Unanswered(Nanos began) override { answers_.Unanswered(began, clock_.Now()); }
  void Authenticate(const etcdserverpb::AuthenticateRequest& request,
                    Done<etcdserverpb::AuthenticateResponse> done) override;
  void Range(const etcdserverpb::RangeRequest& request, Done<etcdserverpb::RangeResponse> done) override;
  void Txn(const etcdserverpb::TxnRequest& request, Done<etcdserverpb::TxnResponse> done) override;
  void LeaseGrant(const etcdserverpb::LeaseGrantRequest& request, Done<etcdserverpb::LeaseGrantResponse> done) override;
  // No answer is awaited, because the node is ending.
  void LeaseRevoke(const etcdserverpb::LeaseRevokeRequest& request, Nanos timeout,
                   Done<etcdserverpb::LeaseRevokeResponse> done) override;
  void OpenWatch(std::function<void(const etcdserverpb::WatchResponse&)> got, Ended ended) override;
  void Watch(const etcdserverpb::WatchRequest& request) override;
  void OpenKeepAlive(std::function<void(const etcdserverpb::LeaseKeepAliveResponse&)> got, Ended ended) override;
  void KeepAlive(const etcdserverpb::LeaseKeepAliveRequest& request) override;
  void Poll(Nanos) override {}
  void Wake() override { wake_(); }

 private:
  // Everything that ends together.
  struct Connection {
    std::shared_ptr<EtcdConnection> at_etcd = std::make_shared<EtcdConnection>();
    std::shared_ptr<Wire> there, calls, watched, kept;
    std::map<uint64_t, std::function<void(const absl::Status&)>> calls_open;  // with functions that fail them
    std::function<void(const etcdserverpb::WatchResponse&)> got_watch;
    std::function<void(const etcdserverpb::LeaseKeepAliveResponse&)> got_keep_alive;
    Ended watch_ended, keep_alive_ended;
    bool broken = false;
  };
  template <typename Response>
  void Call(std::function<absl::Status(Etcd&, Response*)> at_etcd, Done<Response> done);
  void Break();

  size_t etcd_machine() const { return network_.machines() - 1; }

  Network& network_;
  Etcd& etcd_;
  const size_t machine_;
  const std::shared_ptr<Life> life_;
  const MachineClock& clock_;
  const daemon::RoundTrips::Bounds limits_;
  daemon::RoundTrips answers_;
  const std::function<void()> wake_;
  std::shared_ptr<Connection> connection_;  // null: none
  uint64_t drawn_ = 0;
};

}  // namespace ashlar::simulation::nodes
