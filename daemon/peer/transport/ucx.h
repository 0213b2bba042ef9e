// SPDX-License-Identifier: Apache-2.0
// Ucx: UCX's worker, listener and endpoints behind an interface without its headers. Used by one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/peer/transport/grant.h"
#include "daemon/peer/transport/transport.h"
#include "daemon/peer/transport/wire.h"

namespace ashlar::daemon {

// A connection. Ucx owns it; its user may attach data.
class Link {
 public:
  virtual ~Link() = default;

  uint64_t id = 0;         // never reused
  std::string peer;        // address and port of the peer
  bool accepted = false;   // the peer connected
  bool closing = false;    // no messages are sent or received any more
  size_t sends = 0;        // sends in flight
  uint64_t completed = 0;  // completed sends
  uint64_t bytes_sent = 0, bytes_received = 0;
};

// Events of connections. Called from Ucx::Progress only; `sent` of Ucx::Send may also be called from Send.
struct LinkEvents {
  std::function<bool(const std::string& peer)> admit;  // returns whether it may connect
  std::function<void(Link&)> accepted;
  // A message on a connection without a return path comes with nullptr.
  std::function<void(Link*, std::span<const std::byte> header, std::span<const std::byte> payload)> received;
  // The connection broke. Close follows automatically.
  std::function<void(Link&, const absl::Status&)> lost;
  std::function<void(size_t count)> silent;  // number of connections closed because their peer sent nothing
  std::function<void(Link&)> closed;         // no send is in flight; the link is destroyed after the call
};

// A key of a peer's memory, unpacked for one connection. Destroyed before its Ucx.
class RemoteKey {
 public:
  virtual ~RemoteKey() = default;
};

class Ucx {
 public:
  static absl::StatusOr<std::unique_ptr<Ucx>> Open(const TransportOptions& options, LinkEvents events);
  virtual ~Ucx() = default;

  virtual HostPort address() const = 0;
  virtual const std::vector<UcxSetting>& settings() const = 0;
  virtual bool has_rdma() const = 0;

  virtual absl::StatusOr<Link*> Connect(const HostPort& peer) = 0;
  // `pieces` are read until `sent` is called with the result. The link must not be closing.
  virtual void Send(Link& link, const Message& message, ConstSpans pieces, std::function<void(absl::Status)> sent) = 0;
  // Like Send, with a text that is copied.
  virtual void SendText(Link& link, const Message& message, std::string text) = 0;

  // Remote reads and GPU memory. The defaults are for an implementation without them.
  virtual bool reads() const { return false; }
  // Returns whether a link with these lanes can read remote memory with checked keys.
  virtual bool ReadsOver(const std::string&) const { return false; }
  virtual bool Reaches(MemoryType type) const { return type == MemoryType::kHost; }
  // Returns the packed key of the memory; empty if remote reads are off. The memory must outlive this object.
  virtual absl::StatusOr<std::string> Register(std::byte*, uint64_t, MemoryType) { return ""; }
  virtual MemoryType TypeOf(const std::byte*) const { return MemoryType::kHost; }
  virtual absl::StatusOr<std::unique_ptr<RemoteKey>> Unpack(Link&, const std::string&) {
    return absl::UnimplementedError("remote reads are not supported");
  }
  // `target` is written until `got` is called with the result, even if the link is closed meanwhile. The link must not
  // be closing. Counts as a send of the link.
  virtual void Get(Link&, RemoteKey&, uint64_t, std::span<std::byte>, std::function<void(absl::Status)> got) {
    got(absl::UnimplementedError("remote reads are not supported"));
  }

  // Closes by force: operations in flight fail, and the peer can no longer read memory over the link.
  // LinkEvents::closed follows.
  virtual void Close(Link& link) = 0;
  virtual std::string Lanes(Link& link) const = 0;

  // Does pending work; returns false without any.
  virtual bool Progress() = 0;
  // Returns true if `event` becomes readable when there is work, false if there is work already.
  virtual bool Arm() = 0;
  virtual int event() const = 0;
};

}  // namespace ashlar::daemon
