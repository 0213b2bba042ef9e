// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/control/peer_listener.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <map>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/runtime/event_loop.h"
#include "daemon/runtime/named_thread.h"
#include "daemon/runtime/port_wait.h"
#include "daemon/runtime/tcp_socket.h"

namespace ashlar::daemon {
namespace {

// Returns the peer's address as gRPC names it; empty if it has disconnected.
std::string AddressOf(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) return "";
  char text[INET6_ADDRSTRLEN] = "";
  if (address.ss_family == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in&>(address);
    inet_ntop(AF_INET, &in.sin_addr, text, sizeof text);
    return absl::StrCat("ipv4:", text, ":", ntohs(in.sin_port));
  }
  const auto& in = reinterpret_cast<const sockaddr_in6&>(address);
  if (IN6_IS_ADDR_V4MAPPED(&in.sin6_addr)) {  // on a socket for both families
    inet_ntop(AF_INET, &in.sin6_addr.s6_addr[12], text, sizeof text);
    return absl::StrCat("ipv4:", text, ":", ntohs(in.sin6_port));
  }
  inet_ntop(AF_INET6, &in.sin6_addr, text, sizeof text);
  const std::string scope = in.sin6_scope_id == 0 ? "" : absl::StrCat("%25", in.sin6_scope_id);
  return absl::StrCat("ipv6:%5B", text, scope, "%5D:", ntohs(in.sin6_port));
}

}  // namespace

// Only the listener's thread uses this, except for `stopping`.
struct PeerListener::Impl {
  using ConnectionId = uint64_t;
  static constexpr ConnectionId kListener = 0, kWake = 1, kFirst = 2;

  // `socket` is a duplicate of gRPC's descriptor. Whichever side closes first shuts the socket down, which is visible
  // here.
  struct Connection {
    UniqueFd socket;
    std::string host;     // the peer's address as bytes
    std::string address;  // in gRPC's notation
  };

  bool Watch(int fd, uint64_t tag, uint32_t events_of) {
    epoll_event event{};
    event.events = events_of;
    event.data.u64 = tag;
    return epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) == 0;
  }

  void Run() {
    const MonotonicClock clock;
    storage::Nanos due = clock.Now() + period;
    while (!stopping) {
      epoll_event ready[64];
      const storage::Nanos left = std::max<storage::Nanos>(0, due - clock.Now());
      const int count = epoll_wait(epoll.get(), ready, std::size(ready), static_cast<int>(left / 1'000'000) + 1);
      for (int i = 0; i < count; ++i) {
        const ConnectionId id = ready[i].data.u64;
        if (id == kListener) {
          AcceptSome(listener, [this](UniqueFd socket) { Take(std::move(socket)); });
        } else if (id != kWake) {
          Erase(id);
        }
      }
      if (clock.Now() < due) continue;
      events.tick();
      due = clock.Now() + period;
    }
    listener = {};
  }

  void Take(UniqueFd socket) {
    Connection connection{.host = PeerAddress(socket.get()), .address = AddressOf(socket.get())};
    if (connection.address.empty()) return;
    const auto count = of_host.find(connection.host);
    if (connections.size() >= kConnections || (count != of_host.end() && count->second >= kOfAnAddress)) {
      return events.refused(connection.address);
    }
    // gRPC closes the descriptor that it gets, and the number may be reused before the end is visible here.
    UniqueFd given(fcntl(socket.get(), F_DUPFD_CLOEXEC, 0));
    const ConnectionId id = next_id++;
    if (!given.valid() || !Watch(socket.get(), id, 0)) return;  // a hang-up is always reported
    connection.socket = std::move(socket);
    ++of_host[connection.host];
    const std::string address = connection.address;
    connections.emplace(id, std::move(connection));
    events.admit(std::move(given), address);
  }

  void Erase(ConnectionId id) {
    const auto found = connections.find(id);
    if (found == connections.end()) return;
    const auto count = of_host.find(found->second.host);
    if (--count->second == 0) of_host.erase(count);
    epoll_ctl(epoll.get(), EPOLL_CTL_DEL, found->second.socket.get(), nullptr);
    const std::string address = std::move(found->second.address);
    connections.erase(found);
    events.ended(address);
  }

  Events events;
  storage::Nanos period = 0;
  uint16_t port = 0;
  UniqueFd epoll, wake;
  Listener listener;
  std::map<ConnectionId, Connection> connections;
  std::map<std::string, size_t> of_host;
  ConnectionId next_id = kFirst;
  std::atomic<bool> stopping{false};
  std::thread thread;
};

absl::StatusOr<std::unique_ptr<PeerListener>> PeerListener::Start(const HostPort& at, storage::Nanos period,
                                                                  Events events) {
  absl::StatusOr<Listener> listener = ListenTcp(at, kPortPatience);
  if (!listener.ok()) return listener.status();
  auto impl = std::make_unique<Impl>();
  impl->events = std::move(events);
  impl->period = period;
  impl->listener = *std::move(listener);
  impl->port = PortOf(impl->listener.fd.get());
  impl->epoll = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  impl->wake = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!impl->epoll.valid() || !impl->Watch(impl->listener.fd.get(), Impl::kListener, EPOLLIN) ||
      !impl->Watch(impl->wake.get(), Impl::kWake, EPOLLIN)) {
    return absl::ErrnoToStatus(errno, "cluster.listen_address: cannot add the socket to epoll");
  }
  return std::unique_ptr<PeerListener>(new PeerListener(std::move(impl)));
}

PeerListener::PeerListener(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {
  impl_->thread = NamedThread("peer-listener", [impl = impl_.get()] { impl->Run(); });
}

PeerListener::~PeerListener() {
  impl_->stopping = true;
  eventfd_write(impl_->wake.get(), 1);
  impl_->thread.join();
}

uint16_t PeerListener::port() const {
  return impl_->port;
}

}  // namespace ashlar::daemon
