// SPDX-License-Identifier: Apache-2.0
// Exchange: the state of all transfers of a transport. Used by the transport's thread only.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/peer/transport/grant.h"
#include "daemon/peer/transport/registered_areas.h"
#include "daemon/peer/transport/spans.h"
#include "daemon/peer/transport/transport.h"
#include "daemon/peer/transport/ucx.h"
#include "daemon/peer/transport/wire.h"
#include "kernels/mutex.h"

namespace ashlar::daemon {

// A request of this side, as given by the caller.
struct Request {
  uint64_t number = 0;  // never reused
  HostPort peer;
  Grant grant;
  uint64_t offset = 0;
  Spans targets;
  std::shared_ptr<const RemoteMemory> memory;   // describes the peer's granted bytes; may be null
  std::shared_ptr<std::atomic<uint64_t>> came;  // bytes received so far; may be null
  int64_t deadline = 0;                         // by the clock of the exchange
  Transport::Done done;
};

class Exchange {
 public:
  // `later` runs a closure on the transport's thread, from any thread, while that thread exists.
  Exchange(const TransportOptions& options, TransportSurroundings surroundings,
           std::function<void(std::function<void()>)> later);
  ~Exchange();

  absl::Status Open();
  Ucx& ucx() { return *ucx_; }

  void Begin(Request request);
  void Cancel(uint64_t request);
  void KeepPeers(const std::vector<HostPort>& peers);
  // Thread-safe, because a peer may use the grant before the transport's thread sees it.
  void Allow(const Grant& grant, uint64_t bytes, std::shared_ptr<GrantedBytes> granted);
  void Revoke(uint64_t number, std::function<void()> quiet);
  void Register(std::byte* data, uint64_t bytes, MemoryType type, Transport::CopyIn copy_in);
  RemoteMemory Describe(const Spans& spans) const {  // thread-safe
    return areas_.Describe(spans, Transport::kMostArenas, Transport::kMostRuns);
  }
  TransportStats Stats() const;

  // Does pending work; returns false without any.
  bool Progress();
  // When Progress must be called again even without events; INT64_MAX: never.
  int64_t due() const;

  int64_t Now() const { return surroundings_.now(); }

 private:
  enum class Role : uint8_t { kFetching, kServing, kLending };

  // A grant and all its transfers. Destroying the last reference calls `quiet`.
  struct Allowed {
    Grant grant;
    uint64_t bytes;
    std::shared_ptr<GrantedBytes> granted;
    std::function<void()> quiet;
    std::set<uint64_t> transfers;
    ~Allowed() {
      if (quiet) quiet();
    }
  };

  // A node that this side has requests for.
  struct Peer {
    HostPort address;
    Link* link = nullptr;
    bool heard = false;  // a message has come over the current link
    bool slow = false;   // RDMA is expected, but was not used for the last link
    std::string lanes, path;
    std::set<uint64_t> waiting, running;  // transfers; waiting ones in order of their numbers
    uint64_t bytes_in_flight = 0;
    uint64_t failures = 0;                        // since the start
    int failures_in_a_row = 0;                    // since the last message
    int64_t not_before = 0;                       // earliest time of the next connection attempt
    uint64_t bytes_sent = 0, bytes_received = 0;  // over closed links
  };

  struct Transfer {
    Role role;
    Grant ticket;        // ours; the peer's messages carry it
    Grant theirs;        // the peer's
    bool ready = false;  // the source memory is known
    Link* link = nullptr;
    Peer* peer = nullptr;              // for a request of this side
    std::shared_ptr<Allowed> allowed;  // for a request of a peer
    Grant grant;                       // for a request of this side
    uint64_t offset = 0, length = 0;   // within the grant
    int64_t deadline = 0;
    SpanList<std::byte> targets;
    SpanList<const std::byte> sources;
    Received received;
    std::shared_ptr<std::atomic<uint64_t>> came;   // for a fetch; may be null
    RemotePlaces places;                           // for a fetch by RDMA reads
    std::vector<std::unique_ptr<RemoteKey>> keys;  // keys of the arenas
    bool lent = false;                             // a loan that was not returned; the holder counts it in `sends`
    int64_t ended_at = 0;
    uint64_t sent = 0;  // bytes given to UCX, or requested by RDMA
    int sends = 0;      // sends that read sources, and reads that write targets
    bool ended = false;
    absl::Status outcome;
    Transport::Done done;
  };

  // The state of a link. `peer` is set if this side made it.
  struct Connection {
    Link* link = nullptr;
    Peer* peer = nullptr;
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

  // exchange.cc
  void End(uint64_t number, const absl::Status& status);
  void Finish(uint64_t number);
  void StartWaiting();
  void StartRequest(uint64_t number, Transfer& transfer);
  bool ConnectTo(Peer& peer, absl::Status& why);
  void Moved(uint64_t link, uint64_t number, uint64_t bytes, const absl::Status& status);
  void Expire(int64_t now);
  void Watch(int64_t now);
  Connection* Of(const Link& link);
  bool SlowFabric() const;
  static std::string NameOf(const HostPort& peer);  // key in peers_
  void Log(const char* event, const std::string& peer, const std::string& detail) const;

  // exchange_links.cc: connection events
  LinkEvents Events();
  void OnMessage(Link* link, std::span<const std::byte> header, std::span<const std::byte> payload);
  void Heard(Connection& connection);
  void Lost(Link& link, const absl::Status& why);
  void Suspect(Connection& connection, absl::string_view why);
  void Drop(Connection& connection, absl::string_view why);
  void Closed(Link& link);

  // exchange_messages.cc: received messages
  void Handle(Connection& connection, const Message& message, std::span<const std::byte> payload);
  void Serve(Connection& connection, const Message& message);
  std::shared_ptr<Allowed> FindGrant(uint64_t number) const;
  absl::Status Judge(const Connection& connection, const Message& message, std::shared_ptr<Allowed>& allowed) const;
  void Resolved(uint64_t number, absl::StatusOr<Spans> spans);
  void TakeData(Connection& connection, const Message& message, std::span<const std::byte> payload);
  Transfer* OurTicket(const Connection& connection, const Grant& ticket);
  void Refuse(Connection& connection, const Grant& to, const absl::Status& why);
  bool Pump(Connection& connection);
  void SendPiece(Connection& connection, uint64_t number, Transfer& transfer);

  // exchange_loans.cc: bytes that the reader reads by RDMA in place
  const Transport::CopyIn* WayInto(const std::byte* data) const;  // null without a registered one
  absl::Status MayMove(const Transfer& transfer) const;
  bool Borrows(const Connection& connection, const Transfer& transfer) const;
  void Lend(Transfer& transfer);
  void Lent(Connection& connection, const Message& message);
  void ReadPiece(Connection& connection, uint64_t number, Transfer& transfer);
  void Returned(const Connection& connection, const Message& message);
  void GiveBack(uint64_t number);
  void GiveBackAll(const Connection& connection);
  bool KeepsLoan(const Connection& connection, int64_t now) const;

  const TransportOptions options_;
  const TransportSurroundings surroundings_;
  const std::function<void(std::function<void()>)> later_;
  std::unique_ptr<Ucx> ucx_;
  std::map<std::string, std::unique_ptr<Peer>> peers_;
  std::string last_turn_;                                               // name of the peer with the last turn
  std::map<uint64_t, Connection> connections_;                          // key: link number
  absl::flat_hash_map<uint64_t, std::unique_ptr<Transfer>> transfers_;  // key: number of our ticket
  std::set<std::pair<int64_t, uint64_t>> deadlines_;                    // deadlines of transfers in flight
  size_t recalled_ = 0;                                                 // ended loans that were not returned
  RegisteredAreas areas_;
  struct FarArea {
    uint64_t bytes = 0;
    Transport::CopyIn copy_in;
  };
  std::map<const std::byte*, FarArea> far_areas_;  // areas that the CPU cannot write, by start address
  mutable Mutex allowed_mutex_;
  absl::flat_hash_map<uint64_t, std::shared_ptr<Allowed>> allowed_ ABSL_GUARDED_BY(allowed_mutex_);
  uint64_t bytes_in_flight_ = 0;
  size_t accepted_ = 0;
  std::vector<Link*> dropped_;  // to be closed
  bool ending_ = false;
  bool may_start_ = false;  // waiting requests may be able to start
  int64_t watched_ = 0;
  std::minstd_rand jitter_;
  TransportStats counts_;

 public:
  // Numbers of grants, requests and tickets, from one counter. Thread-safe.
  uint64_t NextNumber() { return next_number_.fetch_add(1); }

 private:
  std::atomic<uint64_t> next_number_{1};
};

}  // namespace ashlar::daemon
