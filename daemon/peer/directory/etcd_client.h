// SPDX-License-Identifier: Apache-2.0
// EtcdClient: asynchronous calls of etcd's v3 API over one connection at a time.
//
// One thread uses it, and gets all callbacks inside Poll. Wake may be called by any thread. Calls of an earlier
// connection never call back. Deadlines use the monotonic clock. A call times out after a margin over the measured
// reply time (round_trips.h); each timeout increases the limit of the next calls.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "daemon/runtime/round_trips.h"
#include "etcd/v3/rpc.pb.h"
#include "storage/executor.h"

namespace ashlar::daemon {

// PEM contents, not file names. Without an authority, no TLS.
struct EtcdTls {
  std::string authority, certificate, key;
};

class EtcdClient {
 public:
  // Uses gRPC. `clock` must be monotonic and outlive the client. `limits` bound the time of a call. A simulation uses
  // another client.
  static std::unique_ptr<EtcdClient> Make(const storage::Clock& clock, const RoundTrips::Bounds& limits);
  virtual ~EtcdClient() = default;

  // Closes the current connection and all its calls.
  virtual void Connect(const std::string& endpoint, const EtcdTls& tls) = 0;
  virtual void Disconnect() = 0;
  virtual void set_token(const std::string& token) = 0;  // sent with every later call of this connection

  // Time limit of a call that begins now.
  virtual storage::Nanos Limit() const = 0;
  // A stream message sent at `began` was answered now, or has timed out.
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
  // Times out after `timeout`, and is not measured.
  virtual void LeaseRevoke(const etcdserverpb::LeaseRevokeRequest& request, storage::Nanos timeout,
                           Done<etcdserverpb::LeaseRevokeResponse> done) = 0;

  // Streams; at most one of each kind per connection. Messages to a closed stream are dropped. `ended` is the last
  // callback.
  using Ended = std::function<void(const absl::Status&)>;
  virtual void OpenWatch(std::function<void(const etcdserverpb::WatchResponse&)> got, Ended ended) = 0;
  virtual void Watch(const etcdserverpb::WatchRequest& request) = 0;
  virtual void OpenKeepAlive(std::function<void(const etcdserverpb::LeaseKeepAliveResponse&)> got, Ended ended) = 0;
  virtual void KeepAlive(const etcdserverpb::LeaseKeepAliveRequest& request) = 0;

  // Waits until a callback is ready, Wake is called, or `deadline` passes; then runs the ready callbacks.
  virtual void Poll(storage::Nanos deadline) = 0;
  virtual void Wake() = 0;
};

}  // namespace ashlar::daemon
