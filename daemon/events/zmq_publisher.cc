// SPDX-License-Identifier: Apache-2.0
#include "daemon/events/zmq_publisher.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <list>
#include <map>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "daemon/events/event_connection.h"
#include "daemon/events/kept_batches.h"
#include "daemon/events/kv_events.h"
#include "daemon/runtime/event_loop.h"
#include "daemon/runtime/named_thread.h"
#include "daemon/runtime/port_wait.h"
#include "daemon/runtime/tcp_socket.h"
#include "daemon/runtime/unix_socket.h"

namespace ashlar::daemon {
namespace {

constexpr size_t kEventsATurn = 256;
constexpr const char* kSocketName = "events";
// The kernel's buffers per connection; without these limits they grow.
constexpr int kSendBuffer = 256 << 10, kReceiveBuffer = 16 << 10;

double SecondsSince1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// A listener, and its address in ZeroMQ's form.
struct Bound {
  Listener listener;
  std::string address;
  bool tcp = false;
};

absl::StatusOr<Bound> Bind(const std::string& address) {
  absl::string_view at = address;
  if (absl::ConsumePrefix(&at, "ipc://")) {
    // The batches contain texts of all tenants, so only the daemon's user may read them.
    absl::StatusOr<Listener> listener = Listen(std::string(at), SOCK_STREAM, kAdminSocketMode);
    if (!listener.ok()) return absl::UnavailableError(absl::StrCat(address, ": ", listener.status().message()));
    return Bound{*std::move(listener), address, false};
  }
  absl::ConsumePrefix(&at, "tcp://");
  std::string plain(at);
  if (absl::ConsumePrefix(&at, "*:")) plain = absl::StrCat("0.0.0.0:", at);
  if (absl::EndsWith(plain, ":*")) plain.back() = '0';
  const absl::StatusOr<HostPort> parsed = ParseHostPort(plain);
  if (!parsed.ok()) return absl::UnavailableError(absl::StrCat(address, ": ", parsed.status().message()));
  absl::StatusOr<Listener> listener = ListenTcp(*parsed, kPortPatience);
  if (!listener.ok()) return absl::UnavailableError(absl::StrCat(address, ": ", listener.status().message()));
  const std::string host = plain.substr(0, plain.rfind(':'));
  const std::string name = absl::StrCat("tcp://", host, ":", PortOf(listener->fd.get()));
  return Bound{*std::move(listener), name, true};
}

void Configure(int socket, bool tcp) {
  setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &kSendBuffer, sizeof kSendBuffer);
  setsockopt(socket, SOL_SOCKET, SO_RCVBUF, &kReceiveBuffer, sizeof kReceiveBuffer);
  if (!tcp) return;
  const int on = 1, idle = 30, interval = 10, count = 3;  // seconds
  setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
}

// Returns the peer to which a connection is counted: an IP address, or a user of this machine.
std::string PeerName(int socket, bool tcp) {
  if (!tcp) {
    const std::optional<ucred> peer = PeerOf(socket);
    return absl::StrCat("uid ", peer.has_value() ? peer->uid : uid_t(-1));
  }
  const std::string address = PeerAddress(socket);
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(address.size() == sizeof(in_addr) ? AF_INET : AF_INET6, address.data(), text, sizeof text);
  return address.empty() ? "" : text;
}

RefusedConnection ReasonOf(const absl::Status& status) {
  if (absl::IsFailedPrecondition(status)) return RefusedConnection::kVersion;
  return absl::IsResourceExhausted(status) ? RefusedConnection::kTooMany : RefusedConnection::kProtocol;
}

}  // namespace

// Only its thread uses this, except for the atomics.
struct ZmqPublisher::Impl {
  static constexpr uint64_t kPublish = 0, kReplay = 1, kWake = 2, kFirst = 3;  // subjects of epoll's events

  Impl(Options given, const BlockTexts& its_texts, RefusedConnections& its_refused)
      : options(std::move(given)), texts(its_texts), refused(its_refused), kept(options.kept, options.most_bytes) {}
  ~Impl() {
    stopping = true;
    eventfd_write(wake->get(), 1);
    if (thread.joinable()) thread.join();
  }

  bool Watch(int fd, uint64_t tag, uint32_t events, int operation = EPOLL_CTL_ADD) const {
    epoll_event event{};
    event.events = events;
    event.data.u64 = tag;
    return epoll_ctl(epoll.get(), operation, fd, &event) == 0;
  }

  absl::Status Open() {
    epoll = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
    wake = std::make_shared<UniqueFd>(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    bool watching = epoll.valid() && wake->valid() && Watch(wake->get(), kWake, EPOLLIN);
    for (uint64_t i = 0; i < bound.size(); ++i) {
      watching = watching && Watch(bound[i].listener.fd.get(), i, EPOLLIN);
    }
    return watching ? absl::OkStatus() : absl::ErrnoToStatus(errno, "events: cannot add the sockets to epoll");
  }

  void Run() {
    bool more = false;  // more work is ready
    while (!stopping) {
      epoll_event events[64];
      const int count = epoll_wait(epoll.get(), events, std::size(events), more ? 0 : WaitMillis());
      for (int i = 0; i < count; ++i) Dispatch(events[i].data.u64, events[i].events);
      const std::vector<CacheEvent> taken = subscription->Take(kEventsATurn, 0);
      Publish(taken);
      DropErased();
      more = SendAll() || taken.size() == kEventsATurn;
      CloseSilent();
    }
  }

  void Dispatch(uint64_t tag, uint32_t events) {
    if (tag == kWake) {
      eventfd_t ignored;
      eventfd_read(wake->get(), &ignored);
    } else if (tag < kFirst) {
      AcceptSome(bound[tag].listener, [this, tag](UniqueFd socket) { Admit(tag, std::move(socket)); });
    } else if (const auto found = connections.find(tag);
               found != connections.end() && (events & ~uint32_t{EPOLLOUT}) != 0) {
      Judge(tag, found->second.Read(kept, clock.Now()));
    }
  }

  void Admit(uint64_t listener, UniqueFd socket) {
    const bool tcp = bound[listener].tcp;
    std::string peer = PeerName(socket.get(), tcp);
    std::map<std::string, size_t> of_peer;
    for (const auto& [id, one] : connections) ++of_peer[one.peer()];
    if (of_peer[peer] >= kConnectionsOfAnAddress) {
      return refused.Add(kSocketName, RefusedConnection::kTooMany, peer, "this peer has too many connections");
    }
    if (connections.size() >= kConnections) {
      const auto most = std::ranges::max_element(of_peer, {}, [](const auto& one) { return one.second; });
      const auto oldest =
          std::ranges::find_if(connections, [&](const auto& one) { return one.second.peer() == most->first; });
      refused.Add(kSocketName, RefusedConnection::kTooMany, most->first, "this peer has the most connections");
      connections.erase(oldest);
    }
    Configure(socket.get(), tcp);
    const uint64_t id = next_id++;
    if (!Watch(socket.get(), id, EPOLLIN)) return;
    const ZmtpSocket own = listener == kPublish ? ZmtpSocket::kPub : ZmtpSocket::kRouter;
    connections.try_emplace(id, std::move(socket), own, options.topic, std::move(peer), clock.Now());
  }

  // Closes a connection if the status is not OK; then returns false.
  bool Judge(uint64_t id, const absl::Status& status) {
    if (status.ok()) return true;
    const auto found = connections.find(id);
    if (!absl::IsUnavailable(status)) {
      refused.Add(kSocketName, ReasonOf(status), found->second.peer(), status.message());
    }
    connections.erase(found);
    return false;
  }

  // Returns true if some connections have more to send and their sockets accept it.
  bool SendAll() {
    bool more = false;
    for (auto at = connections.begin(); at != connections.end();) {
      const uint64_t id = at->first;
      EventConnection& one = (at++)->second;
      const bool blocked = one.blocked();
      if (!Judge(id, one.Send(kept))) continue;
      more |= one.more();
      if (one.blocked() != blocked)
        Watch(one.socket(), id, one.blocked() ? EPOLLIN | EPOLLOUT : EPOLLIN, EPOLL_CTL_MOD);
    }
    return more;
  }

  // They are sorted by arrival.
  void CloseSilent() {
    const storage::Nanos last = clock.Now() - std::chrono::nanoseconds(options.greeting).count();
    for (auto at = connections.begin(); at != connections.end() && at->second.accepted() <= last;) {
      if (at->second.ready()) {
        ++at;
        continue;
      }
      refused.Add(kSocketName, RefusedConnection::kTimedOut, at->second.peer(), "no ZMTP greeting in time");
      at = connections.erase(at);
    }
  }
  static constexpr int kLongestWait = 1'000;  // ms; an erasure does not wake this thread

  int WaitMillis() const {
    const auto silent = std::ranges::find_if(connections, [](const auto& one) { return !one.second.ready(); });
    if (silent == connections.end()) return kLongestWait;
    const storage::Nanos end = silent->second.accepted() + std::chrono::nanoseconds(options.greeting).count();
    return static_cast<int>(std::clamp<storage::Nanos>((end - clock.Now()) / 1'000'000 + 1, 0, kLongestWait));
  }

  void Publish(std::span<const CacheEvent> events) {
    while (!events.empty()) {
      const size_t count = CountForABatch(events);
      PublishBatch(events.first(count));
      events = events.subspan(count);
    }
  }
  void PublishBatch(std::span<const CacheEvent> events) {
    std::string batch;
    do {  // repeated without the tokens erased meanwhile
      DropErased();
      batch = EncodeKvEvents(events, texts, SecondsSince1970());
    } while (erasures != texts.erasures());
    if (batch.empty()) return;
    kept.Add(std::move(batch));
    batches = kept.next();
  }
  // No erased text stays, not even in a slow reader's connection.
  void DropErased() {
    if (const uint64_t now = texts.erasures(); std::exchange(erasures, now) == now) return;
    kept.Clear();
    std::erase_if(connections, [](const auto& one) { return one.second.holds_batch(); });
  }

  const Options options;
  const BlockTexts& texts;
  RefusedConnections& refused;
  const MonotonicClock clock;
  std::vector<Bound> bound;  // kPublish and kReplay
  UniqueFd epoll;
  std::shared_ptr<UniqueFd> wake = std::make_shared<UniqueFd>();
  std::shared_ptr<EventHub::Subscription> subscription;
  KeptBatches kept;
  uint64_t erasures = 0;  // erasures of texts that `kept` has seen
  std::map<uint64_t, EventConnection> connections;
  uint64_t next_id = kFirst;
  std::atomic<uint64_t> batches{0};
  std::atomic<bool> stopping{false};
  std::thread thread;
};

absl::StatusOr<std::unique_ptr<ZmqPublisher>> ZmqPublisher::Start(Options options, EventHub& hub,
                                                                  const BlockTexts& texts,
                                                                  RefusedConnections& refused) {
  auto impl = std::make_unique<Impl>(std::move(options), texts, refused);
  for (const std::string& address : {impl->options.address, impl->options.replay_address}) {
    if (address.empty()) continue;
    absl::StatusOr<Bound> bound = Bind(address);
    if (!bound.ok()) return bound.status();
    impl->bound.push_back(*std::move(bound));
  }
  if (absl::Status status = impl->Open(); !status.ok()) return status;
  impl->subscription =
      hub.Subscribe({}, EventHub::kMostWaiting, [wake = impl->wake] { eventfd_write(wake->get(), 1); });
  if (impl->subscription == nullptr)
    return absl::ResourceExhaustedError("events: too many subscribers; try again later");
  impl->thread = NamedThread("kv-events", [impl = impl.get()] { impl->Run(); });
  return std::unique_ptr<ZmqPublisher>(new ZmqPublisher(std::move(impl)));
}

ZmqPublisher::ZmqPublisher(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ZmqPublisher::~ZmqPublisher() = default;

std::string ZmqPublisher::address() const {
  return impl_->bound.front().address;
}

std::string ZmqPublisher::replay_address() const {
  return impl_->bound.size() < 2 ? "" : impl_->bound[1].address;
}

uint64_t ZmqPublisher::batches() const {
  return impl_->batches;
}

}  // namespace ashlar::daemon
