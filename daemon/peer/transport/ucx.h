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
  std::function<void(Link&)> closed;  // no send is under way; the link is destroyed behind the call
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
  // By force: what is under way fails. LinkEvents::closed follows.
  virtual void Close(Link& link) = 0;
  virtual std::string Lanes(Link& link) const = 0;

  // Does what there is to do; false: nothing.
  virtual bool Progress() = 0;
  // True: `event` becomes readable when there is something to do. False: there is something already.
  virtual bool Arm() = 0;
  virtual int event() const = 0;
};

}  // namespace ashlar::daemon
