// SPDX-License-Identifier: Apache-2.0
// Transfers: the transfers of a transport, from their begin to their last access to memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "daemon/peer/transport/connections.h"
#include "daemon/peer/transport/grant_table.h"
#include "daemon/peer/transport/peer_table.h"
#include "daemon/peer/transport/spans.h"
#include "daemon/peer/transport/transport.h"
#include "daemon/peer/transport/ucx.h"

namespace ashlar::daemon {

struct Transfer {
  enum class Role : uint8_t { kFetching, kServing, kLending };

  Role role;
  Grant ticket;        // ours; the peer's messages carry it
  Grant theirs;        // the peer's
  bool ready = false;  // the source memory is known
  Link* link = nullptr;
  PeerState* peer = nullptr;         // set if this side sent the request
  std::shared_ptr<Allowed> allowed;  // set if a peer sent the request
  Grant grant;                       // set if this side sent the request
  uint64_t offset = 0, length = 0;   // within the grant
  int64_t deadline = 0;
  SpanList<std::byte> targets;
  SpanList<const std::byte> sources;
  Received received;
  std::shared_ptr<std::atomic<uint64_t>> received_bytes;  // bytes of a fetch; may be null
  RemotePlaces places;                                    // set if a fetch uses RDMA reads
  std::vector<std::unique_ptr<RemoteKey>> keys;           // keys of the arenas
  bool lent = false;  // a loan that was not returned; the holder counts it in `sends`
  int64_t ended_at = 0;
  uint64_t sent = 0;  // bytes given to UCX, or requested by RDMA
  int sends = 0;      // sends that read sources, and reads that write targets
  bool ended = false;
  absl::Status outcome;
  Transport::Done done;
};

class Transfers {
 public:
  Transfers(const TransportSurroundings& surroundings, Connections& connections, PeerTable& peers,
            TransportStats& counts)
      : surroundings_(surroundings), connections_(connections), peers_(peers), counts_(counts) {}
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  // `number` is that of its ticket.
  Transfer& Add(uint64_t number, std::unique_ptr<Transfer> transfer);
  Transfer* Find(uint64_t number) const;  // null without one
  // Returns the transfer of one of our tickets on this connection; null if it has ended or belongs to another
  // connection.
  Transfer* OfTicket(const PeerConnection& connection, const Grant& ticket);

  // The transfer moves no more bytes, except for sends that UCX has begun; it is finished with the last of them.
  void End(uint64_t number, const absl::Status& status);
  void EndEach(const std::set<uint64_t>& numbers, const absl::Status& status);
  // Ends all transfers without telling the peers.
  void Close();
  void Expire(int64_t now);  // ends transfers whose deadline has passed
  int64_t NextDeadline() const { return deadlines_.empty() ? INT64_MAX : deadlines_.begin()->first; }

  // A send, or an RDMA read, is complete.
  void Moved(uint64_t link, uint64_t number, uint64_t bytes, const absl::Status& status);
  // The peer has returned the loan of a lending transfer, or cannot use it any more.
  void Return(uint64_t number);
  size_t recalled() const { return recalled_; }  // ended loans that were not returned

  // Answers a peer's request with an error.
  void Refuse(const PeerConnection& connection, const Grant& to, const absl::Status& why);
  void AddTo(TransportStats& stats) const;

 private:
  void Finish(uint64_t number);

  const TransportSurroundings& surroundings_;
  Connections& connections_;
  PeerTable& peers_;
  TransportStats& counts_;
  absl::flat_hash_map<uint64_t, std::unique_ptr<Transfer>> transfers_;
  std::set<std::pair<int64_t, uint64_t>> deadlines_;  // deadlines of transfers in flight
  size_t recalled_ = 0;
  bool closing_ = false;
};

}  // namespace ashlar::daemon
