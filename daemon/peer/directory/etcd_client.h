// SPDX-License-Identifier: Apache-2.0
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
  // Over gRPC. `clock` must be the monotonic one, and outlive the client. `limits`: of a call's time. A simulation has
  // another client, which calls back between two calls of its user.
  static std::unique_ptr<EtcdClient> Make(const storage::Clock& clock, const RoundTrips::Bounds& limits);
  virtual ~EtcdClient() = default;

  // Ends the connection that there is, and all calls on it.
  virtual void Connect(const std::string& endpoint, const EtcdTls& tls) = 0;
  virtual void Disconnect() = 0;
  virtual void set_token(const std::string& token) = 0;  // sent with every later call of this connection

  // The time that a call has which begins now.
  virtual storage::Nanos Limit() const = 0;
  // A message on a stream, which went off then, was answered now, or given up.
  virtual void Answered(storage::Nanos began) = 0;
  virtual void Unanswered(storage::Nanos began) = 0;

  template <typename Response>
  using Done = std::function<void(const absl::Status&, const Response&)>;
  virtual void Authenticate(const etcdserverpb::AuthenticateRequest& request,
                            Done<etcdserverpb::AuthenticateResponse> done) = 0;
  virtual void Range(const etcdserverpb::RangeRequest& request, Done<etcdserverpb::RangeResponse> done) = 0;
  virtual void Txn(const etcdserverpb::TxnRequest& request, Done<etcdserverpb::TxnResponse> done) = 0;
  virtual void LeaseGrant(const etcdserverpb::LeaseGrantRequest& request,
                          Done<etcdserverpb::LeaseGrantResponse> done) = 0;
  // Given up after `timeout`, and not measured.
  virtual void LeaseRevoke(const etcdserverpb::LeaseRevokeRequest& request, storage::Nanos timeout,
                           Done<etcdserverpb::LeaseRevokeResponse> done) = 0;

  // Streams, one of each a connection; messages to one that is not open are dropped. `ended` is the last callback.
  using Ended = std::function<void(const absl::Status&)>;
  virtual void OpenWatch(std::function<void(const etcdserverpb::WatchResponse&)> got, Ended ended) = 0;
  virtual void Watch(const etcdserverpb::WatchRequest& request) = 0;
  virtual void OpenKeepAlive(std::function<void(const etcdserverpb::LeaseKeepAliveResponse&)> got, Ended ended) = 0;
  virtual void KeepAlive(const etcdserverpb::LeaseKeepAliveRequest& request) = 0;

  // Waits for something to call back, for Wake, or until `deadline`; then calls back what is there.
  virtual void Poll(storage::Nanos deadline) = 0;
  virtual void Wake() = 0;
};

}  // namespace ashlar::daemon
