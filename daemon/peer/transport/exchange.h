// SPDX-License-Identifier: Apache-2.0
// Exchange: requests of this side and of peers, and the messages that carry them. Used by the transport's thread only.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/peer/transport/connections.h"
#include "daemon/peer/transport/grant.h"
#include "daemon/peer/transport/grant_table.h"
#include "daemon/peer/transport/loans.h"
#include "daemon/peer/transport/peer_table.h"
#include "daemon/peer/transport/registered_areas.h"
#include "daemon/peer/transport/spans.h"
#include "daemon/peer/transport/transfers.h"
#include "daemon/peer/transport/transport.h"
#include "daemon/peer/transport/ucx.h"
#include "daemon/peer/transport/wire.h"

namespace ashlar::daemon {

// A request of this side, as given by the caller.
struct Request {
  uint64_t number = 0;  // never reused
  HostPort peer;
  Grant grant;
  uint64_t offset = 0;
  Spans targets;
  std::shared_ptr<const RemoteMemory> memory;             // describes the peer's granted bytes; may be null
  std::shared_ptr<std::atomic<uint64_t>> received_bytes;  // bytes received so far; may be null
  int64_t deadline = 0;                                   // on the clock of the exchange
  Transport::Done done;
};

class Exchange final : private ConnectionEvents {
 public:
  // `later` runs a closure on the transport's thread, from any thread, while that thread exists.
  Exchange(const TransportOptions& options, TransportSurroundings surroundings,
           std::function<void(std::function<void()>)> later);
  ~Exchange() override;

  absl::Status Open();
  Ucx& ucx() { return connections_.ucx(); }

  void Begin(Request request);
  void Cancel(uint64_t request);
  void KeepPeers(const std::vector<HostPort>& peers);
  // Thread-safe, because a peer may use the grant before the transport's thread sees it.
  void Allow(const Grant& grant, uint64_t bytes, std::shared_ptr<GrantedBytes> granted) {
    grants_.Add(grant, bytes, std::move(granted));
  }
  void Revoke(uint64_t number, std::function<void()> quiesced);
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

  // Numbers of grants, requests and tickets, from one counter. Thread-safe.
  uint64_t NextNumber() { return next_number_.fetch_add(1); }

 private:
  void Lost(PeerConnection& connection, const absl::Status& why) override;
  void Closed(PeerConnection& connection) override;
  bool KeepsLoan(const PeerConnection& connection, int64_t now) const override;
  // Handles a message. It may come from an attacker.
  void Received(PeerConnection& connection, const Message& message, std::span<const std::byte> payload) override;

  void StartRequest(uint64_t number);
  absl::Status Judge(const PeerConnection& connection, const Message& message, std::shared_ptr<Allowed>& allowed) const;
  void Serve(PeerConnection& connection, const Message& message);
  void Resolved(uint64_t number, absl::StatusOr<Spans> spans);
  void TakeData(PeerConnection& connection, const Message& message, std::span<const std::byte> payload);
  bool Pump(PeerConnection& connection);
  void SendPiece(PeerConnection& connection, uint64_t number, Transfer& transfer);

  const TransportOptions options_;
  const TransportSurroundings surroundings_;
  const std::function<void(std::function<void()>)> later_;
  std::atomic<uint64_t> next_number_{1};
  TransportStats counts_;
  RegisteredAreas areas_;
  GrantTable grants_;
  PeerTable peers_;
  Connections connections_;
  Transfers transfers_;
  Loans loans_;
};

}  // namespace ashlar::daemon
