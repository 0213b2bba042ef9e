// SPDX-License-Identifier: Apache-2.0
// Connections: the links of a transport and their state. It makes and ends them, and detects silent ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/peer/transport/peer_table.h"
#include "daemon/peer/transport/transport.h"
#include "daemon/peer/transport/ucx.h"
#include "daemon/peer/transport/wire.h"

namespace ashlar::daemon {

// The state of a link. `peer` is set if this side made it.
struct PeerConnection {
  Link* link = nullptr;
  PeerState* peer = nullptr;
  std::set<uint64_t> transfers;              // its transfers, including ended ones
  std::map<uint64_t, uint64_t> asked;        // requests of the other side: ticket number -> transfer
  std::vector<uint64_t> sending;             // transfers with bytes to send, in turn
  uint64_t bytes_queued = 0;                 // queued in UCX
  int64_t heard = 0, moved = 0, pinged = 0;  // last received message, last send progress, last sent ping
  uint64_t completed = 0;                    // completed sends at `moved`
  bool lost = false;                         // nothing is sent or accepted any more; to be closed
  int malformed = 0;
  bool suspected = false;  // already logged
  std::string lanes;
  bool reads = false;  // the lanes support RDMA reads
  bool slow = false;   // RDMA is expected, but the lanes do not use it
};

class ConnectionEvents {
 public:
  virtual ~ConnectionEvents() = default;
  virtual void Received(PeerConnection& connection, const Message& message, std::span<const std::byte> payload) = 0;
  // The connection is lost, and its transfers must end.
  virtual void Lost(PeerConnection& connection, const absl::Status& why) = 0;
  // The last event: RDMA does not access memory over a closed link.
  virtual void Closed(PeerConnection& connection) = 0;
  // Returns whether the peer should have returned a loan by now.
  virtual bool KeepsLoan(const PeerConnection& connection, int64_t now) const = 0;
};

class Connections {
 public:
  Connections(const TransportOptions& options, const TransportSurroundings& surroundings, PeerTable& peers,
              TransportStats& counts, ConnectionEvents& events)
      : options_(options), surroundings_(surroundings), peers_(peers), counts_(counts), events_(events) {}
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  absl::Status Open();
  // Closes all connections, which completes the last sends.
  void Close() { ucx_.reset(); }
  Ucx& ucx() const { return *ucx_; }

  std::map<uint64_t, PeerConnection>& all() { return connections_; }  // key: link number
  PeerConnection* Find(uint64_t link);                                // null without one
  PeerConnection* Of(const Link& link) { return Find(link.id); }
  // UNAVAILABLE if it is too early after a failure.
  absl::StatusOr<PeerConnection*> Connect(PeerState& peer);
  // The peer is removed: ends its connection.
  void Remove(PeerState& peer);

  // Logs, once per connection, the sender of messages that no peer sends: counts alone would not identify it.
  void Suspect(PeerConnection& connection, absl::string_view why);
  // Ends a connection. UCX may be processing one of its messages, so CloseDropped closes it later.
  void Drop(PeerConnection& connection, absl::string_view why);
  void CloseDropped();
  // Ends connections in use that are silent. Call it at NextWatch.
  void Watch(int64_t now);
  int64_t NextWatch() const;
  bool AnyInUse() const;  // true: NextWatch must be scheduled

  void AddTo(TransportStats& stats) const;

 private:
  LinkEvents Events();
  void OnMessage(Link* link, std::span<const std::byte> header, std::span<const std::byte> payload);
  void Heard(PeerConnection& connection);
  void Lost(Link& link, const absl::Status& why);
  void Closed(Link& link);
  bool SlowFabric() const;
  void Log(const char* event, const std::string& peer, const std::string& detail) const;

  const TransportOptions& options_;
  const TransportSurroundings& surroundings_;
  PeerTable& peers_;
  TransportStats& counts_;
  ConnectionEvents& events_;
  std::unique_ptr<Ucx> ucx_;
  std::map<uint64_t, PeerConnection> connections_;
  size_t accepted_ = 0;
  std::vector<Link*> dropped_;  // CloseDropped closes them
  int64_t watched_ = 0;
};

}  // namespace ashlar::daemon
