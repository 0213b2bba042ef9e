// SPDX-License-Identifier: Apache-2.0
// Ucx: UCX's worker, listener and endpoints behind an interface without its headers. One thread calls all of it.
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

// A connection. Ucx owns it; its user may attach what it likes.
class Link {
 public:
  virtual ~Link() = default;

  uint64_t id = 0;         // never used again
  std::string peer;        // address and port of the other end
  bool accepted = false;   // the other end connected
  bool closing = false;    // no message comes or goes any more
  size_t sends = 0;        // under way
  uint64_t completed = 0;  // sends that are not any more
  uint64_t bytes_sent = 0, bytes_received = 0;
};

// Events of connections. Called from Ucx::Progress only, and `sent` of Ucx::Send from there or from Send.
struct LinkEvents {
  std::function<bool(const std::string& peer)> admit;  // may it connect?
  std::function<void(Link&)> accepted;
  // A message without a connection that it could be answered on comes with nullptr.
  std::function<void(Link*, std::span<const std::byte> header, std::span<const std::byte> payload)> received;
  // The connection broke. Close follows by itself.
  std::function<void(Link&, const absl::Status&)> lost;
  std::function<void(size_t count)> silent;  // so many connections were ended whose other end said nothing
  std::function<void(Link&)> closed;         // no send is under way; the link is destroyed behind the call
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
  // `pieces` are read until `sent` is called with the outcome. The link must not be closing.
  virtual void Send(Link& link, const Message& message, ConstSpans pieces, std::function<void(absl::Status)> sent) = 0;
  // As Send, with a text that is copied.
  virtual void SendText(Link& link, const Message& message, std::string text) = 0;

  // Remote reads, and memory of GPUs. What follows is for a Ucx that has neither.
  virtual bool reads() const { return false; }
  // Whether what carries a link, as Lanes names it, reads at the other end and has keys checked there.
  virtual bool ReadsOver(const std::string&) const { return false; }
  virtual bool Reaches(MemoryType type) const { return type == MemoryType::kHost; }
  // Returns the packed key of the memory; empty where remote reads are off. The memory stays as long as this.
  virtual absl::StatusOr<std::string> Register(std::byte*, uint64_t, MemoryType) { return ""; }
  virtual MemoryType TypeOf(const std::byte*) const { return MemoryType::kHost; }
  virtual absl::StatusOr<std::unique_ptr<RemoteKey>> Unpack(Link&, const std::string&) {
    return absl::UnimplementedError("no remote reads");
  }
  // `target` is written until `got` is called with the outcome, also when the link is closed meanwhile. The link must
  // not be closing. Counts as a send of the link.
  virtual void Get(Link&, RemoteKey&, uint64_t, std::span<std::byte>, std::function<void(absl::Status)> got) {
    got(absl::UnimplementedError("no remote reads"));
  }

  // By force: what is under way fails, and the other end's card reaches nothing over the link any more. LinkEvents::
  // closed follows.
  virtual void Close(Link& link) = 0;
  virtual std::string Lanes(Link& link) const = 0;

  // Does what there is to do; false: nothing.
  virtual bool Progress() = 0;
  // True: `event` becomes readable when there is something to do. False: there is something already.
  virtual bool Arm() = 0;
  virtual int event() const = 0;
};

}  // namespace ashlar::daemon
