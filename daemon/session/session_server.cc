// SPDX-License-Identifier: Apache-2.0
#include "daemon/session/session_server.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/runtime/log.h"
#include "daemon/runtime/named_thread.h"
#include "daemon/runtime/unix_socket.h"
#include "daemon/session/unread_descriptors.h"
#include "kernels/mutex.h"

namespace ashlar::daemon {
namespace {

// Bounds for connections without a message yet, and for refused connections: number and time. An engine says hello
// immediately. Neither kind takes the place of a session.
constexpr size_t kMaxWaiting = 64;
constexpr storage::Nanos kPatience = 2'000'000'000;
constexpr int kIdlePollMillis = 1000;
constexpr const char* kSocketName = "session";

using ConnectionId = uint64_t;

// Replies from any thread to the server's thread. Outlives the server while a reply may come.
class Mailbox {
 public:
  struct Letter {
    ConnectionId to = 0;
    SessionProtocol::Reply reply;
  };

  Mailbox() : wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

  int descriptor() const { return wake_.get(); }

  void Post(Letter letter) {
    MutexLock lock(mutex_);
    letters_.push_back(std::move(letter));
    Wake();
  }
  void Wake() { eventfd_write(wake_.get(), 1); }

  std::vector<Letter> Take() {
    MutexLock lock(mutex_);
    eventfd_t ignored;
    eventfd_read(wake_.get(), &ignored);
    return std::exchange(letters_, {});
  }

 private:
  const UniqueFd wake_;
  Mutex mutex_;
  std::vector<Letter> letters_ ABSL_GUARDED_BY(mutex_);
};

// Becomes readable when the process dies. Invalid if the kernel cannot tell (another pid namespace); then the end of
// the socket decides.
UniqueFd OpenPidfd(int socket, pid_t pid) {
  constexpr int kSoPeerPidfd = 77;  // Linux 6.5: not affected by reused pids
  int fd = -1;
  socklen_t size = sizeof fd;
  if (getsockopt(socket, SOL_SOCKET, kSoPeerPidfd, &fd, &size) == 0) return UniqueFd(fd);
  return UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
}

struct Connection {
  UniqueFd socket;
  UniqueFd pidfd;
  std::unique_ptr<SessionProtocol> protocol;  // null if refused
  // Waits until the peer has read the previous descriptor: a peer that does not read only delays itself.
  std::optional<SessionProtocol::Reply> held;
  storage::Nanos accepted = 0;
};

}  // namespace

// Only the server's thread uses this, except for the atomics and the mailbox.
struct SessionServer::Impl {
  // The subject of an epoll event: the low bit distinguishes a connection's pidfd from its socket.
  static constexpr uint64_t kListener = 0, kMailbox = 1;
  static uint64_t SocketTag(ConnectionId id) { return id << 1; }
  static uint64_t PidfdTag(ConnectionId id) { return id << 1 | 1; }

  explicit Impl(SessionServices& its_services) : services(its_services) {}

  bool Watch(int fd, uint64_t tag, uint32_t events, int operation = EPOLL_CTL_ADD) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = tag;
    return epoll_ctl(epoll.get(), operation, fd, &event) == 0;
  }

  void Run();
  void Dispatch(uint64_t tag, uint32_t events);
  void Admit(UniqueFd socket);
  void Refuse(UniqueFd socket, const absl::Status& why);
  void Read(ConnectionId id);
  absl::Status CheckCapacity(const TenantUser& tenant) const;  // for one more session
  void Deliver(Mailbox::Letter letter);
  absl::Status Say(ConnectionId id, SessionProtocol::Reply& reply);
  void Close(ConnectionId id, const char* reason);
  void MakeWayIn(const std::set<ConnectionId>& waiting);
  void CloseThoseWaitingTooLong();

  SessionServices& services;
  uint32_t max_sessions = 0;
  UniqueFd epoll;
  Listener listener;
  const std::shared_ptr<Mailbox> mailbox = std::make_shared<Mailbox>();
  MonotonicClock clock;
  std::map<ConnectionId, Connection> connections;
  std::set<ConnectionId> silent, refused;  // oldest first; all other connections are sessions
  UnreadDescriptors unread;
  storage::Nanos swept = 0;
  ConnectionId next_id = 1;
  bool accepting = true;
  std::atomic<bool> admitting{true}, stop_accepting{false}, stopping{false};
  std::thread thread;
};

void SessionServer::Impl::Run() {
  while (!stopping) {
    epoll_event events[64];
    const int count = epoll_wait(epoll.get(), events, std::size(events), kIdlePollMillis);
    for (int i = 0; i < count; ++i) Dispatch(events[i].data.u64, events[i].events);
    if (stop_accepting && accepting) {
      accepting = false;
      listener = {};
    }
    CloseThoseWaitingTooLong();
    if (clock.Now() - swept >= kPatience) {
      swept = clock.Now();
      unread.Sweep();
    }
  }
  while (!connections.empty()) Close(connections.begin()->first, "the daemon is stopping");
  listener = {};
}

void SessionServer::Impl::Dispatch(uint64_t tag, uint32_t events) {
  if (tag == kListener) return AcceptSome(listener, [this](UniqueFd socket) { Admit(std::move(socket)); });
  if (tag == kMailbox) {
    for (Mailbox::Letter& letter : mailbox->Take()) Deliver(std::move(letter));
    return;
  }
  const ConnectionId id = tag >> 1;
  if (!connections.contains(id)) return;  // closed earlier in this round
  if ((tag & 1) != 0) return Close(id, "the process exited");
  if ((events & EPOLLIN) != 0) return Read(id);
  if ((events & (EPOLLHUP | EPOLLERR)) != 0) return Close(id, "the socket was closed");
  // The socket is writable again: the peer has read something.
  std::optional<SessionProtocol::Reply>& held = connections.at(id).held;
  if (held.has_value() && !unread.Holds(id)) Deliver({id, *std::exchange(held, std::nullopt)});
}

void SessionServer::Impl::Admit(UniqueFd socket) {
  const std::optional<ucred> peer = PeerOf(socket.get());
  if (!peer.has_value()) return;
  const auto tenant = services.tenant_of_uid.find(peer->uid);
  if (tenant == services.tenant_of_uid.end()) {
    services.refused.Add(kSocketName, RefusedConnection::kUnknownUser, absl::StrCat("uid ", peer->uid),
                         "no tenant lists this user");
    return Refuse(
        std::move(socket),
        absl::PermissionDeniedError(absl::StrCat(
            "user ", peer->uid, " belongs to no tenant; add it to tenants[].uids in the daemon's configuration")));
  }
  MakeWayIn(silent);
  const ConnectionId id = next_id++;
  Connection connection;
  connection.pidfd = OpenPidfd(socket.get(), peer->pid);
  connection.socket = std::move(socket);
  connection.protocol = std::make_unique<SessionProtocol>(services, Peer{peer->pid, peer->uid}, tenant->second);
  connection.accepted = clock.Now();
  if (!Watch(connection.socket.get(), SocketTag(id), EPOLLIN)) return;
  if (connection.pidfd.valid()) Watch(connection.pidfd.get(), PidfdTag(id), EPOLLIN);
  connections.emplace(id, std::move(connection));
  silent.insert(id);
}

// The reply is sent before the peer says hello. Closing immediately would make its hello fail before it reads the
// reply.
void SessionServer::Impl::Refuse(UniqueFd socket, const absl::Status& why) {
  if (!Send(socket.get(), SessionProtocol::Goodbye(why).bytes).ok()) return;
  MakeWayIn(refused);
  const ConnectionId id = next_id++;
  if (!Watch(socket.get(), SocketTag(id), EPOLLIN)) return;
  connections.emplace(id, Connection{.socket = std::move(socket), .accepted = clock.Now()});
  refused.insert(id);
}

// Closes the connection that has waited longest, so that a flood of connections does not block an engine that is about
// to say hello.
void SessionServer::Impl::MakeWayIn(const std::set<ConnectionId>& waiting) {
  if (waiting.size() == kMaxWaiting) Close(*waiting.begin(), "too many connections without a hello");
}

void SessionServer::Impl::Read(ConnectionId id) {
  Connection& connection = connections.at(id);
  absl::StatusOr<Datagram> datagram = Receive(connection.socket.get());
  if (absl::IsUnavailable(datagram.status())) return;
  if (absl::IsOutOfRange(datagram.status())) return Close(id, "the socket was closed");
  if (connection.protocol == nullptr) return Close(id, "refused");
  // Nothing more is read until this request is answered; a hang-up is still reported.
  Watch(connection.socket.get(), SocketTag(id), 0, EPOLL_CTL_MOD);
  if (silent.contains(id)) {
    if (absl::Status allowed = CheckCapacity(connection.protocol->tenant()); !allowed.ok()) {
      if (absl::IsResourceExhausted(allowed)) {
        services.refused.Add(kSocketName, RefusedConnection::kTooMany,
                             absl::StrCat("tenant ", connection.protocol->tenant().name), allowed.message());
      }
      return Deliver({id, SessionProtocol::Goodbye(allowed)});
    }
  }
  connection.protocol->Handle(std::move(datagram), [mailbox = mailbox, id](SessionProtocol::Reply reply) {
    mailbox->Post({id, std::move(reply)});
  });
  if (connection.protocol->session() != nullptr) silent.erase(id);
}

absl::Status SessionServer::Impl::CheckCapacity(const TenantUser& tenant) const {
  if (!admitting) return absl::UnavailableError("the daemon is draining");
  if (connections.size() - silent.size() - refused.size() >= max_sessions) {
    return absl::ResourceExhaustedError(
        absl::StrCat("sessions.max_sessions: the daemon already serves ", max_sessions, " sessions"));
  }
  const auto same_tenant = std::ranges::count_if(connections, [&](const auto& entry) {
    const auto& [id, other] = entry;
    return other.protocol != nullptr && other.protocol->tenant().id == tenant.id && !silent.contains(id);
  });
  if (same_tenant >= tenant.max_sessions) {
    return absl::ResourceExhaustedError(absl::StrCat("tenant ", tenant.name, " already has ", tenant.max_sessions,
                                                     " sessions, its limit (max_sessions)"));
  }
  return absl::OkStatus();
}

void SessionServer::Impl::Deliver(Mailbox::Letter letter) {
  const auto found = connections.find(letter.to);
  if (found == connections.end()) return;
  const int socket = found->second.socket.get();
  if (letter.reply.descriptor.valid() && unread.Holds(letter.to)) {
    found->second.held = std::move(letter.reply);
    Watch(socket, SocketTag(letter.to), EPOLLOUT | EPOLLET, EPOLL_CTL_MOD);
    return;
  }
  // The buffer of a peer fills only if it breaks the protocol and does not read its replies.
  if (!Say(letter.to, letter.reply).ok()) return Close(letter.to, "cannot send a reply");
  if (letter.reply.close) return Close(letter.to, "session refused, or protocol error");
  Watch(socket, SocketTag(letter.to), EPOLLIN, EPOLL_CTL_MOD);
}

// Sends a reply, or its replacement if its descriptor cannot be sent now.
absl::Status SessionServer::Impl::Say(ConnectionId id, SessionProtocol::Reply& reply) {
  const Connection& connection = connections.at(id);
  const int socket = connection.socket.get();
  if (!reply.descriptor.valid()) return Send(socket, reply.bytes);
  const TenantUser& tenant = connection.protocol->tenant();
  absl::Status sent = unread.MaySend(tenant.id, UnreadDescriptors::kOfASession * tenant.max_sessions);
  if (sent.ok()) sent = Send(socket, reply.bytes, reply.descriptor.get());
  if (sent.ok()) unread.Sent(id, tenant.id, socket);
  if (!absl::IsResourceExhausted(sent)) return sent;
  ++*tenant.unsent;
  reply = reply.otherwise(sent);
  return Send(socket, reply.bytes);
}

void SessionServer::Impl::Close(ConnectionId id, const char* reason) {
  const auto found = connections.find(id);
  // Done first: an engine that still finds the socket open after it has read its tuples may trust them.
  shutdown(found->second.socket.get(), SHUT_RDWR);
  const SessionProtocol* protocol = found->second.protocol.get();
  if (protocol != nullptr && protocol->session() != nullptr) services.table.Close(protocol->session(), reason);
  epoll_ctl(epoll.get(), EPOLL_CTL_DEL, found->second.socket.get(), nullptr);
  unread.Ended(id, std::move(found->second.socket));
  connections.erase(found);
  silent.erase(id);
  refused.erase(id);
}

void SessionServer::Impl::CloseThoseWaitingTooLong() {
  const storage::Nanos before = clock.Now() - kPatience;
  for (const std::set<ConnectionId>* waiting : {&silent, &refused}) {
    while (!waiting->empty() && connections.at(*waiting->begin()).accepted < before) {
      Close(*waiting->begin(), "no hello in time");
    }
  }
}

absl::StatusOr<std::unique_ptr<SessionServer>> SessionServer::Start(const std::string& path, uint32_t max_sessions,
                                                                    SessionServices& services) {
  absl::StatusOr<Listener> listener = Listen(path, SOCK_SEQPACKET);
  if (!listener.ok()) return listener.status();
  auto impl = std::make_unique<Impl>(services);
  impl->max_sessions = max_sessions;
  impl->listener = *std::move(listener);
  impl->epoll = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  if (!impl->epoll.valid() || !impl->Watch(impl->listener.fd.get(), Impl::kListener, EPOLLIN) ||
      !impl->Watch(impl->mailbox->descriptor(), Impl::kMailbox, EPOLLIN)) {
    return absl::ErrnoToStatus(errno, "listen.session_socket: cannot add it to epoll");
  }
  return std::unique_ptr<SessionServer>(new SessionServer(std::move(impl)));
}

SessionServer::SessionServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {
  impl_->thread = NamedThread("sessions", [impl = impl_.get()] { impl->Run(); });
}

SessionServer::~SessionServer() {
  impl_->stopping = true;
  impl_->mailbox->Wake();
  impl_->thread.join();
}

void SessionServer::SetAdmitting(bool admitting) {
  impl_->admitting = admitting;
}

void SessionServer::StopAccepting() {
  impl_->stop_accepting = true;
  impl_->mailbox->Wake();
}

}  // namespace ashlar::daemon
