// EtcdClient: asynchronous calls of etcd's v3 API over one connection at a time.
//
// One thread uses it, and gets all callbacks, within Poll; Wake may be called by any thread. A call of an earlier
// connection never calls back. Deadlines are those of the monotonic clock. A call is given up after the time that
// answers were measured to take, and then some (round_trips.h); after each that is given up the next ones have longer.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "daemon/runtime/round_trips.h"
#include "etcd/v3/rpc.pb.h"
#include "storage/executor.h"

namespace ashlar::daemon {

// PEM, not files. No authority: no TLS.
struct EtcdTls {
  std::string authority, certificate, key;
};

class EtcdClient {
 public:
  // `clock` must be the monotonic one, and outlive the client. `limits`: of a call's time.
  EtcdClient(const storage::Clock& clock, const RoundTrips::Bounds& limits);
  ~EtcdClient();
  EtcdClient(const EtcdClient&) = delete;
  EtcdClient& operator=(const EtcdClient&) = delete;

  // Ends the connection that there is, and all calls on it.
  void Connect(const std::string& endpoint, const EtcdTls& tls);
  void Disconnect();
  void set_token(const std::string& token);  // sent with every later call of this connection

  // The time that a call has which begins now.
  storage::Nanos Limit() const;
  // A message on a stream, which went off then, was answered now, or given up.
  void Answered(storage::Nanos began);
  void Unanswered(storage::Nanos began);

  template <typename Response>
  using Done = std::function<void(const absl::Status&, const Response&)>;
  void Authenticate(const etcdserverpb::AuthenticateRequest& request, Done<etcdserverpb::AuthenticateResponse> done);
  void Range(const etcdserverpb::RangeRequest& request, Done<etcdserverpb::RangeResponse> done);
  void Txn(const etcdserverpb::TxnRequest& request, Done<etcdserverpb::TxnResponse> done);
  void LeaseGrant(const etcdserverpb::LeaseGrantRequest& request, Done<etcdserverpb::LeaseGrantResponse> done);
  // Given up after `timeout`, and not measured.
  void LeaseRevoke(const etcdserverpb::LeaseRevokeRequest& request, storage::Nanos timeout,
                   Done<etcdserverpb::LeaseRevokeResponse> done);

  // Streams, one of each a connection; messages to one that is not open are dropped. `ended` is the last callback.
  using Ended = std::function<void(const absl::Status&)>;
  void OpenWatch(std::function<void(const etcdserverpb::WatchResponse&)> got, Ended ended);
  void Watch(const etcdserverpb::WatchRequest& request);
  void OpenKeepAlive(std::function<void(const etcdserverpb::LeaseKeepAliveResponse&)> got, Ended ended);
  void KeepAlive(const etcdserverpb::LeaseKeepAliveRequest& request);

  // Waits for something to call back, for Wake, or until `deadline`; then calls back what is there.
  void Poll(storage::Nanos deadline);
  void Wake();

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace ashlar::daemon
