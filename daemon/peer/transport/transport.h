// SPDX-License-Identifier: Apache-2.0
// Transport: the data plane between daemons. Bytes are copied directly between the memory of two daemons over UCX, as
// active messages that carry a grant. Without a grant a peer cannot read anything, and no peer writes.
//
// A fetch is one message. The holder checks grant and range, asks GrantedBytes for the memory, and sends the bytes in
// pieces. Every piece carries a ticket that its receiver drew for this transfer. The receiver's thread looks up the
// ticket and copies the piece to its place. UCX never writes to a target itself, so nothing arrives after a transfer
// has ended.
//
// Over TCP, UCX implements remote memory access in software that checks neither key nor address, so a context with TCP
// is opened without it. Over RDMA only (RemoteReads), a fetch borrows the memory instead: the holder checks the request
// as usual and reports when the bytes are there, the reader's network card reads them in place (RemoteMemory), and the
// reader returns the loan. Until then, or until the connection is closed by force, the holder counts the loan as a
// send, and Revoke waits for it. No memory is registered for remote writes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/peer/transport/grant.h"
#include "daemon/peer/transport/remote_memory.h"
#include "daemon/runtime/host_port.h"

namespace ashlar::daemon {

// Whether fetches use RDMA reads (path "rma") or messages ("am").
enum class RemoteReads : uint8_t {
  kNever,
  kByCards,     // if RDMA is expected and available; then no other transport is used
  kBySoftware,  // tests only: UCX's software reads over TCP and checks no key
};

// GPU memory is known by its registration (Transport::Register); all other memory is host memory.
enum class MemoryType : uint8_t { kHost, kCuda };

// Events of TransportOptions::log: the first fault of a connection, and the end of a connection that was in use.
inline constexpr const char* kConnectionLost = "transport connection: lost";
inline constexpr const char* kProtocolViolation = "transport connection: protocol violation";

struct TransportOptions {
  // An IPv4 or IPv6 address of this node, and a port (0: any). UCX opens further ports for data.
  HostPort listen{"127.0.0.1", 0};
  // IPv4 addresses that may connect, without ports or netmasks. The kernel drops packets of all others before UCX sees
  // them. Empty: all addresses. UCX's TCP protocol trusts its peers, so set this wherever other hosts can reach the
  // ports (docs/decisions/0098-active-messages-with-grants.md).
  std::vector<std::string> allow;
  bool expect_rdma = false;  // stats report a missing RDMA device, and peers reached by TCP
  RemoteReads reads = RemoteReads::kByCards;
  // If set, UCX should access GPU memory (Transport::Reaches reports whether it can). Makes a GPU current on the
  // calling thread; called first on each thread that uses UCX.
  std::function<void()> enter_gpu;
  // UCX_* settings of the operator; they override those of the code
  std::vector<std::pair<std::string, std::string>> ucx;
  uint64_t bytes_in_flight = uint64_t{256} << 20;  // fetches of this side
  uint64_t bytes_in_flight_of_a_peer = uint64_t{64} << 20;
  size_t requests = 4096;                 // queued and running requests of this side
  size_t requests_of_a_connection = 256;  // requests of one peer that are served at a time
  size_t accepted_connections = 512;
  // nanoseconds; default for requests without one, and longest time that a request is served
  int64_t deadline = 30'000'000'000;
  // nanoseconds; a connection in use without any message for this long is closed, and a peer must return loans within
  // it
  int64_t silence = 5'000'000'000;
  // Writes a log line, on the transport's thread. `event` is its message: kConnectionLost; kProtocolViolation, once per
  // connection; "transport connection: opened" or "refused"; or "transport memory: not registered for RDMA".
  std::function<void(const std::string& event, const std::string& peer, const std::string& detail)> log;
};

struct PeerStats {
  std::string peer;        // address, with a port if this side connected
  bool accepted = false;   // the peer connected to this side
  bool connected = false;  // a message has come over the current connection
  std::string lanes;       // UCX transports and devices: "tcp/eth0", "rc_mlx5/mlx5_0:1"
  std::string path;        // fetch path: "am" or "rma"; empty if unknown yet
  uint64_t bytes_sent = 0, bytes_received = 0, bytes_in_flight = 0;
  uint64_t waiting = 0;   // requests not started
  uint64_t failures = 0;  // lost connections
};

struct TransportStats {
  std::vector<PeerStats> peers;
  uint64_t grants = 0, transfers = 0;           // current number
  uint64_t fetched = 0;                         // successful requests of this side
  uint64_t served = 0;                          // successful requests of peers
  uint64_t failed = 0;                          // failed requests of this side
  uint64_t malformed = 0;                       // malformed messages
  uint64_t refused = 0;                         // requests without a grant or outside of it
  uint64_t late = 0;                            // data and replies for ended transfers
  uint64_t bytes_sent = 0, bytes_received = 0;  // since the start, including closed connections
  uint64_t read_bytes = 0;                      // read from peers by RDMA; included in bytes_received
  uint64_t loans = 0;                           // current loans of this node's memory to peers
  uint64_t registered_bytes = 0;                // readable by peers through RDMA
  // RDMA is expected, but this node has none, or a peer is or was last reached without it.
  bool rdma_fallback = false;
};

// An effective UCX setting.
struct UcxSetting {
  std::string name, value;
  std::string from;  // "ashlar", "configuration" or "environment"
};

class Ucx;
struct LinkEvents;

// The environment of a transport. Each process has one clock, random source and UCX; a simulation has its own.
struct TransportSurroundings {
  std::function<int64_t()> now;  // monotonic nanoseconds
  std::function<uint64_t()> random;
  std::function<absl::StatusOr<std::unique_ptr<Ucx>>(const TransportOptions&, LinkEvents)> open;

  static TransportSurroundings OfThisProcess();
};

class Transport {
 public:
  using Done = std::function<void(const absl::Status&)>;
  static constexpr uint64_t kMessageBytes = 256 * 1024;  // most bytes of a transfer in one message

  // UNAVAILABLE if the address cannot be listened on. INVALID_ARGUMENT for an invalid address or UCX setting. A
  // non-empty `wake` replaces the transport's thread: it is called on any thread when there is work, and its owner must
  // then call Turn.
  static absl::StatusOr<std::unique_ptr<Transport>> Start(
      TransportOptions options, TransportSurroundings surroundings = TransportSurroundings::OfThisProcess(),
      std::function<void()> wake = nullptr);
  // For an owner that replaces the thread: call Turn when woken, when the network has events, and when it is due.
  bool Turn();          // returns false if there was no work
  int64_t due() const;  // on the clock of the surroundings; INT64_MAX: never
  // Ends transfers in flight with CANCELLED and calls `quiesced` of the grants. Nothing is called afterwards.
  ~Transport();
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  HostPort address() const;  // the address that peers connect to
  bool reads() const;        // RDMA reads are on (RemoteReads)
  // Returns whether bytes can be sent from such memory, and read into it by RDMA.
  bool Reaches(MemoryType type) const;
  std::vector<UcxSetting> settings() const;
  // Thread-safe, like all methods below. Must not be called on the transport's own thread.
  TransportStats stats() const;

  // Copies message bytes to memory that the CPU cannot write, on the transport's thread. The copy is complete when it
  // returns.
  using CopyIn = std::function<void(std::byte* to, std::span<const std::byte> from)>;
  // Registers memory, asynchronously, and allows RDMA reads if they are on. The memory must stay until the transport is
  // destroyed, which unregisters it. Memory that UCX cannot access, or that cannot be registered (locked memory limit),
  // is skipped and logged. `copy_in` is for GPU memory; without it, only RDMA reads can fill the memory.
  void Register(std::byte* data, uint64_t bytes, MemoryType type, CopyIn copy_in = nullptr);
  // Describes where granted bytes lie, for the peer that gets the grant. Without arenas if RDMA cannot read all of
  // them.
  static constexpr size_t kMostArenas = 16, kMostRuns = 768;
  RemoteMemory Describe(const Spans& spans) const;

  // Called by the owner. A grant is valid until it is revoked.
  Grant Allow(uint64_t bytes, std::shared_ptr<GrantedBytes> granted);
  // No transfer starts under the grant afterwards, and transfers in flight fail. `quiesced` is called once, on the
  // transport's thread, when no byte moves any more. A peer that does not read, or does not return a loan, gets at most
  // `silence`; then its connection is closed by force.
  void Revoke(uint64_t number, std::function<void()> quiesced);

  // Called by the other side. Copies the granted bytes from `offset` into `targets`. `deadline` is in nanoseconds from
  // now (0: the default). `memory` is the owner's description of the bytes, if any; it is used if the connection
  // supports RDMA reads. `received_bytes` is increased by the received bytes, message by message; may be null. Targets
  // must be in memory of one type. `done` is called once, on the transport's thread, and must not block; targets are
  // not accessed afterwards. RDMA reads in flight cannot be cancelled: `done` waits for them, at most `silence` longer
  // than the deadline.
  //
  // Errors: RESOURCE_EXHAUSTED (too many queued requests), UNAVAILABLE (no connection, or it was lost),
  // DEADLINE_EXCEEDED, CANCELLED, PERMISSION_DENIED (unknown grant), and the owner's error. After an error any byte of
  // the targets may have changed. Returns a number for Cancel.
  uint64_t Fetch(const HostPort& peer, const Grant& grant, uint64_t offset, Spans targets, int64_t deadline, Done done,
                 std::shared_ptr<const RemoteMemory> memory = nullptr,
                 std::shared_ptr<std::atomic<uint64_t>> received_bytes = nullptr);
  // Ends a request soon, with CANCELLED unless it ended before. `done` is called as usual.
  void Cancel(uint64_t request);
  // Drops the state of all other peers, and closes connections that this side made to them, except peers with queued or
  // running requests. Call it again for those.
  void KeepPeers(std::vector<HostPort> peers);

 private:
  class Thread;
  explicit Transport(std::unique_ptr<Thread> thread);
  std::unique_ptr<Thread> thread_;
};

}  // namespace ashlar::daemon
