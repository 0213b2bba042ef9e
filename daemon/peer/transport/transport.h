// SPDX-License-Identifier: Apache-2.0
// Transport: the data plane between daemons. Bytes go straight from memory to memory of two daemons over UCX, as active
// messages that carry a grant; whoever has no grant reads and writes nothing.
//
// A fetch is one message; the holder checks number and secret, direction and range, asks GrantedBytes where the bytes
// lie, and sends them in pieces from there. A push asks first, and sends when the holder has said where to. Every piece
// names a ticket that its receiver drew for this one transfer. The receiver's thread looks the ticket up and copies the
// piece to its place. UCX itself never writes to a target, so nothing arrives there after a transfer has ended.
//
// Over TCP, UCX's remote memory access is software at the target that checks neither key nor address, so a context with
// TCP is opened without it. Where RDMA cards carry everything (RemoteReads), a fetch borrows instead: the holder judges
// it as ever, and says when the bytes are there; the reader's card reads them from where they lie (RemoteMemory), and
// the reader gives them back. Until then, or until the connection is closed by force, the holder counts the loan as a
// send: Revoke is not quiet before. Pushes always go by messages: nobody's memory is registered to be written by
// others.
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

// Whether the readers' cards read bytes at their holders (path "rma"), or messages carry them ("am").
enum class RemoteReads : uint8_t {
  kNever,
  kByCards,     // where RDMA is expected and there: then nothing else carries this transport's bytes
  kBySoftware,  // tests alone: by UCX's software over TCP, which checks no key
};

// Memory of a GPU is known to be by its registration (Transport::Register); all other memory is the processor's.
enum class MemoryType : uint8_t { kHost, kCuda };

struct TransportOptions {
  // An IPv4 or IPv6 address of this node, and a port (0: any). UCX has further ports of its own for data.
  HostPort listen{"127.0.0.1", 0};
  // Addresses without ports that may connect (IPv4; netmasks are not known). The kernel drops packets of all others
  // before UCX sees them. Empty: everybody. UCX's own TCP protocol trusts its peers: set it wherever others can reach
  // the ports (docs/decisions/0098-active-messages-with-grants.md).
  std::vector<std::string> allow;
  bool expect_rdma = false;  // Stats say so where there is none, or a peer is reached by TCP
  RemoteReads reads = RemoteReads::kByCards;
  // Not empty: UCX shall reach GPUs' memory (Transport::Reaches says whether it does). Makes a GPU the calling
  // thread's; it is called first on each thread that uses UCX.
  std::function<void()> enter_gpu;
  std::vector<std::pair<std::string, std::string>> ucx;  // UCX_* settings of the operator, before those of the code
  uint64_t bytes_in_flight = uint64_t{256} << 20;        // of fetches and pushes that this side asked for
  uint64_t bytes_in_flight_of_a_peer = uint64_t{64} << 20;
  size_t requests = 4096;                 // that wait or run, asked for by this side
  size_t requests_of_a_connection = 256;  // that are served for one at a time
  size_t accepted_connections = 512;
  int64_t deadline = 30'000'000'000;  // nanoseconds, for requests without one; the longest that one is served
  int64_t silence = 5'000'000'000;  // nanoseconds without a sign of life after which a connection that is in use ends,
                                    // and in which a peer returns what it borrowed
  // A new connection, or one that ended, on the transport's thread, for the log: `event` is "connected", "lost" or
  // "refused"; "suspect", once a connection that sends what no peer does; or "not registered", memory that cards cannot
  // read.
  std::function<void(const std::string& event, const std::string& peer, const std::string& detail)> log;
};

enum class GrantAccess : uint8_t { kRead, kWrite };

struct PeerStats {
  std::string peer;        // address, with a port where this side connected
  bool accepted = false;   // it connected to this side
  bool connected = false;  // a message has come from it over the present connection
  std::string lanes;       // what carries it, as UCX names it: "tcp/eth0", "rc_mlx5/mlx5_0:1"
  std::string path;        // how bytes are fetched over it: "am" or "rma"; empty: it is not known yet
  uint64_t bytes_sent = 0, bytes_received = 0, bytes_in_flight = 0;
  uint64_t waiting = 0;   // requests that have not begun
  uint64_t failures = 0;  // connections that were lost
};

struct TransportStats {
  std::vector<PeerStats> peers;
  uint64_t grants = 0, transfers = 0;           // that there are now
  uint64_t fetched = 0, pushed = 0;             // requests of this side that ended well
  uint64_t served = 0, taken = 0;               // fetches and pushes of peers that ended well
  uint64_t failed = 0;                          // requests of this side that did not
  uint64_t malformed = 0;                       // messages that are none
  uint64_t refused = 0;                         // requests without a grant, or outside of it
  uint64_t late = 0;                            // data and answers for what has ended
  uint64_t bytes_sent = 0, bytes_received = 0;  // ever, also over connections that have ended
  uint64_t read_bytes = 0;                      // that this node's card read at peers; also in bytes_received
  uint64_t loans = 0;                           // of this node's memory to peers' cards, now
  uint64_t registered_bytes = 0;                // that peers' cards can read
  // RDMA was expected, and this node has none, or a peer is reached without or was when it was last reached.
  bool slow_fabric = false;
};

// A setting of UCX that is in force.
struct UcxSetting {
  std::string name, value;
  std::string from;  // "ashlar", "configuration" or "environment"
};

class Ucx;
struct LinkEvents;

// The surroundings of a transport. Each process has the one clock, random source and UCX; a simulation has others.
struct TransportSurroundings {
  std::function<int64_t()> now;  // monotonic nanoseconds
  std::function<uint64_t()> random;
  std::function<absl::StatusOr<std::unique_ptr<Ucx>>(const TransportOptions&, LinkEvents)> open;

  static TransportSurroundings OfThisProcess();
};

class Transport {
 public:
  using Done = std::function<void(const absl::Status&)>;
  static constexpr uint64_t kMessageBytes = 256 * 1024;  // of a transfer, in one message at most

  // UNAVAILABLE: the address cannot be listened at. INVALID_ARGUMENT: an address or a setting of UCX is none.
  // Not empty, `wake` takes the place of the thread: it is called where something is to be done, on any thread, and
  // has the owner call Turn.
  static absl::StatusOr<std::unique_ptr<Transport>> Start(
      TransportOptions options, TransportSurroundings surroundings = TransportSurroundings::OfThisProcess(),
      std::function<void()> wake = nullptr);
  // For an owner in the thread's place: call it when woken, when the network has something, and when it is due.
  bool Turn();          // false: nothing was to be done
  int64_t due() const;  // by the clock of the surroundings; INT64_MAX: never
  // Ends what is under way with CANCELLED; `quiet` of grants is called. Nothing is called afterwards.
  ~Transport();
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  HostPort address() const;  // where peers connect to
  bool reads() const;        // remote reads are on (RemoteReads)
  // Whether bytes can be sent from such memory, and read into it by a card.
  bool Reaches(MemoryType type) const;
  std::vector<UcxSetting> settings() const;
  // Thread-safe, as all below. Must not be called on the transport's own thread.
  TransportStats stats() const;

  // Brings bytes of messages to memory that the processor does not write, on the transport's thread; they are there
  // when it returns.
  using CopyIn = std::function<void(std::byte* to, std::span<const std::byte> from)>;
  // Takes note of memory, soon, and lets cards read it where remote reads are on. It must stay until the transport has
  // ended, which takes all of it back. Memory of a type that is not reached, or that the machine does not register
  // (locked memory), is left out, and the log says so. `copy_in`: of a GPU's; without it only cards bring bytes there.
  void Register(std::byte* data, uint64_t bytes, MemoryType type, CopyIn copy_in = nullptr);
  // Where granted bytes lie, for the peer that gets the grant; without arenas where cards do not read all of them.
  static constexpr size_t kMostArenas = 16, kMostRuns = 768;
  RemoteMemory Describe(const Spans& spans) const;

  // The owner's side. A grant is good until it is revoked.
  Grant Allow(GrantAccess access, uint64_t bytes, std::shared_ptr<GrantedBytes> granted);
  // Nothing begins under the grant any more, and what is under way fails. `quiet` is called once, on the transport's
  // thread, when no byte moves there any more; a peer that takes nothing, or does not return what it borrowed, is
  // waited for no longer than `silence`, and then the connection with it is closed by force.
  void Revoke(uint64_t number, std::function<void()> quiet);

  // The other side: fetches the grant's bytes from `offset` on into `targets`, or pushes `sources` there. `deadline` is
  // in nanoseconds from now (0: the default one). `memory`: what the owner has said of the grant's place, if anything;
  // it is used where the connection's cards read. `done` is called once, on the transport's thread, where it must not
  // wait; targets and sources, which lie in memory of one type, are not touched afterwards. Reads that a card has begun
  // cannot be taken back: `done` waits for them, at most `silence` longer than the deadline. Errors:
  // RESOURCE_EXHAUSTED: too many requests wait; UNAVAILABLE: no connection, or it was lost; DEADLINE_EXCEEDED;
  // CANCELLED; PERMISSION_DENIED: no such grant; what the owner answered. After an error any of the targets' bytes may
  // have changed. Returns a number for Cancel.
  // Daemons fetch: a push asks where its bytes go, so that its first byte takes as many journeys as that of a fetch
  // that begins with the word that the bytes are there. `ashlar-bench transfer` and tests push.
  // `came`: is raised by the bytes that have come, message by message; may be null.
  uint64_t Fetch(const HostPort& peer, const Grant& grant, uint64_t offset, Spans targets, int64_t deadline, Done done,
                 std::shared_ptr<const RemoteMemory> memory = nullptr,
                 std::shared_ptr<std::atomic<uint64_t>> came = nullptr);
  uint64_t Push(const HostPort& peer, const Grant& grant, uint64_t offset, ConstSpans sources, int64_t deadline,
                Done done);
  // Ends a request soon, with CANCELLED unless it ended before; `done` is called as ever.
  void Cancel(uint64_t request);
  // Only these are peers: what is known of others is erased, and connections that this side made to them end, but
  // for those with requests that wait or run. Call it again for these.
  void KeepPeers(std::vector<HostPort> peers);

 private:
  class Thread;
  explicit Transport(std::unique_ptr<Thread> thread);
  std::unique_ptr<Thread> thread_;
};

}  // namespace ashlar::daemon
