// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/nodes/etcd_client.h"

#include <utility>

namespace ashlar::simulation::nodes {

namespace pb = etcdserverpb;

void SimulatedEtcdClient::Connect(const std::string&, const daemon::EtcdTls&) {
  Disconnect();
  connection_ = std::make_shared<Connection>();
  const auto wire = [&](size_t from, size_t to, Wire::Order order) {
    return std::make_shared<Wire>(network_, from, to, order);
  };
  connection_->there = wire(machine_, etcd_machine(), Wire::Order::kKept);
  connection_->calls = wire(etcd_machine(), machine_, Wire::Order::kAny);
  connection_->watched = wire(etcd_machine(), machine_, Wire::Order::kKept);
  connection_->kept = wire(etcd_machine(), machine_, Wire::Order::kKept);
  const std::weak_ptr<Connection> weak = connection_;
  connection_->at_etcd->watched = [this, weak](pb::WatchResponse response) {
    const auto connection = weak.lock();
    if (connection == nullptr) return;
    connection->watched->Send([this, weak, response = std::move(response), life = life_] {
      network_.schedule().For(life, 0, [this, weak, response] {
        const auto still = weak.lock();
        if (still == nullptr || still != connection_ || !still->got_watch) return;
        still->got_watch(response);
        wake_();
      });
    });
  };
  connection_->at_etcd->broken = [this, weak] {
    const auto connection = weak.lock();
    if (connection == nullptr) return;
    // The end of the connection arrives after everything sent before.
    connection->watched->Send([this, weak, life = life_] {
      network_.schedule().For(life, 0, [this, weak] {
        if (weak.lock() != nullptr && weak.lock() == connection_) Break();
      });
    });
  };
  etcd_.Connect(connection_->at_etcd);
  if (!etcd_.up()) etcd_.Stop();  // refused
}

void SimulatedEtcdClient::Disconnect() {
  if (connection_ == nullptr) return;
  for (const auto& wire : {connection_->there, connection_->calls, connection_->watched, connection_->kept}) {
    wire->Close();
  }
  etcd_.Disconnect(connection_->at_etcd);
  connection_ = nullptr;
}

// etcd has died: streams and calls end.
void SimulatedEtcdClient::Break() {
  const std::shared_ptr<Connection> connection = connection_;
  if (std::exchange(connection->broken, true)) return;
  const absl::Status why = absl::UnavailableError("etcd has gone");
  for (const auto& [number, fail] : std::map(connection->calls_open)) fail(why);
  // The first one to be notified ends the connection.
  if (connection == connection_ && connection->watch_ended) connection->watch_ended(why);
  if (connection == connection_ && connection->keep_alive_ended) connection->keep_alive_ended(why);
  wake_();
}

template <typename Response>
void SimulatedEtcdClient::Call(std::function<absl::Status(Etcd&, Response*)> at_etcd, Done<Response> done) {
  const std::shared_ptr<Connection> connection = connection_;
  if (connection == nullptr) return;
  const uint64_t number = ++drawn_;
  const auto answer = [this, weak = std::weak_ptr(connection), number, began = clock_.Now(), done = std::move(done)](
                          const absl::Status& status, const Response& response) {
    const auto still = weak.lock();
    if (still == nullptr || still != connection_ || still->calls_open.erase(number) == 0) return;
    if (status.ok()) Answered(began);
    if (absl::IsDeadlineExceeded(status)) Unanswered(began);
    done(status, response);
    wake_();
  };
  connection->calls_open[number] = [answer](const absl::Status& why) { answer(why, Response()); };
  network_.schedule().For(life_, clock_.Until(clock_.Now() + Limit()),
                          [answer] { answer(absl::DeadlineExceededError("etcd does not answer"), Response()); });
  // On etcd's side, which this client may not outlive.
  connection->there->Send([&etcd = etcd_, &schedule = network_.schedule(), answer, at_etcd = std::move(at_etcd),
                           calls = connection->calls, life = life_] {
    schedule.After(etcd.Late(), [&etcd, &schedule, answer, at_etcd, calls, life] {
      Response response;
      const absl::Status status = etcd.up() ? at_etcd(etcd, &response) : absl::UnavailableError("etcd is down");
      calls->Send([&schedule, answer, status, response, life] {
        schedule.For(life, 0, [answer, status, response] { answer(status, response); });
      });
    });
  });
}

void SimulatedEtcdClient::Authenticate(const pb::AuthenticateRequest&, Done<pb::AuthenticateResponse> done) {
  Call<pb::AuthenticateResponse>([](Etcd&, pb::AuthenticateResponse*) { return absl::OkStatus(); }, std::move(done));
}

void SimulatedEtcdClient::Range(const pb::RangeRequest& request, Done<pb::RangeResponse> done) {
  Call<pb::RangeResponse>([request](Etcd& etcd, pb::RangeResponse* response) { return etcd.Range(request, response); },
                          std::move(done));
}

void SimulatedEtcdClient::Txn(const pb::TxnRequest& request, Done<pb::TxnResponse> done) {
  Call<pb::TxnResponse>([request](Etcd& etcd, pb::TxnResponse* response) { return etcd.Txn(request, response); },
                        std::move(done));
}

void SimulatedEtcdClient::LeaseGrant(const pb::LeaseGrantRequest& request, Done<pb::LeaseGrantResponse> done) {
  Call<pb::LeaseGrantResponse>(
      [request](Etcd& etcd, pb::LeaseGrantResponse* response) {
        etcd.LeaseGrant(request, response);
        return absl::OkStatus();
      },
      std::move(done));
}

void SimulatedEtcdClient::LeaseRevoke(const pb::LeaseRevokeRequest& request, Nanos,
                                      Done<pb::LeaseRevokeResponse> done) {
  if (connection_ != nullptr && life_->leaves) {
    // Its own wire: the connection ends with the caller.
    const auto wire = std::make_shared<Wire>(network_, machine_, etcd_machine(), Wire::Order::kKept);
    wire->Send([&etcd = etcd_, id = request.id()] {
      if (etcd.up()) etcd.LeaseRevoke(id);
    });
  }
  done(absl::OkStatus(), pb::LeaseRevokeResponse());
}

void SimulatedEtcdClient::OpenWatch(std::function<void(const pb::WatchResponse&)> got, Ended ended) {
  connection_->got_watch = std::move(got);
  connection_->watch_ended = std::move(ended);
}

void SimulatedEtcdClient::Watch(const pb::WatchRequest& request) {
  if (connection_ == nullptr) return;
  connection_->there->Send([&etcd = etcd_, request, connection = connection_->at_etcd] {
    if (etcd.up()) etcd.Watch(connection, request);
  });
}

void SimulatedEtcdClient::OpenKeepAlive(std::function<void(const pb::LeaseKeepAliveResponse&)> got, Ended ended) {
  connection_->got_keep_alive = std::move(got);
  connection_->keep_alive_ended = std::move(ended);
}

void SimulatedEtcdClient::KeepAlive(const pb::LeaseKeepAliveRequest& request) {
  if (connection_ == nullptr) return;
  connection_->there->Send([this, &etcd = etcd_, &schedule = network_.schedule(), id = request.id(),
                            weak = std::weak_ptr(connection_), life = life_] {
    schedule.After(etcd.Late(), [this, &etcd, &schedule, id, weak, life] {
      const auto still = weak.lock();
      if (!etcd.up() || still == nullptr) return;
      still->kept->Send([this, &schedule, weak, life, response = etcd.KeepAlive(id)] {
        schedule.For(life, 0, [this, weak, response] {
          const auto open = weak.lock();
          if (open == nullptr || open != connection_ || !open->got_keep_alive) return;
          open->got_keep_alive(response);
          wake_();
        });
      });
    });
  });
}

}  // namespace ashlar::simulation::nodes
