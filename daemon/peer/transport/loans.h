// SPDX-License-Identifier: Apache-2.0
// Loans: bytes that the reader reads by RDMA in place. A reader borrows bytes of a holder, fetches them by RDMA reads,
// and returns the loan.
#pragma once

#include <cstdint>

#include "daemon/peer/transport/connections.h"
#include "daemon/peer/transport/transfers.h"
#include "daemon/peer/transport/transport.h"
#include "daemon/peer/transport/wire.h"

namespace ashlar::daemon {

class Loans {
 public:
  Loans(const TransportOptions& options, Connections& connections, Transfers& transfers, TransportStats& counts)
      : options_(options), connections_(connections), transfers_(transfers), counts_(counts) {}
  Loans(const Loans&) = delete;
  Loans& operator=(const Loans&) = delete;

  // The reader's side. Returns whether a fetch borrows over this connection.
  static bool Borrows(const PeerConnection& connection, const Transfer& transfer);
  void Lent(PeerConnection& connection, const Message& message);
  void ReadPiece(PeerConnection& connection, uint64_t number, Transfer& transfer);

  // The holder's side.
  void Lend(Transfer& transfer);
  void Returned(const PeerConnection& connection, const Message& message);
  // The connection is closed: its loans have ended.
  void ReturnAll(const PeerConnection& connection);
  // Returns whether the peer should have returned a loan by now.
  bool Overdue(const PeerConnection& connection, int64_t now) const;

 private:
  const TransportOptions& options_;
  Connections& connections_;
  Transfers& transfers_;
  TransportStats& counts_;
};

}  // namespace ashlar::daemon
