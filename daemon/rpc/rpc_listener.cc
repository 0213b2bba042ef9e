// SPDX-License-Identifier: Apache-2.0
#include "daemon/rpc/rpc_listener.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "daemon/runtime/named_thread.h"

namespace ashlar::daemon {

// Only the listener's thread uses this, except for `stopping`.
struct RpcListener::Impl {
  using ConnectionId = uint64_t;
  static constexpr ConnectionId kListener = 0, kWake = 1, kFirst = 2;

  // `socket` is a duplicate of gRPC's descriptor. Whichever side closes first shuts the socket down, which is visible
  // here.
  struct Connection {
    UniqueFd socket;
    uid_t uid = 0;
  };

  bool Watch(int fd, uint64_t tag, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = tag;
    return epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) == 0;
  }

  void Run() {
    while (!stopping) {
      epoll_event events[64];
      const int count = epoll_wait(epoll.get(), events, std::size(events), -1);
      for (int i = 0; i < count; ++i) {
        const ConnectionId id = events[i].data.u64;
        if (id == kListener) {
          AcceptSome(listener, [this](UniqueFd socket) { Take(std::move(socket)); });
        } else if (id != kWake) {
          Erase(id);
        }
      }
    }
    listener = {};
  }

  void Take(UniqueFd socket) {
    const std::optional<ucred> peer = PeerOf(socket.get());
    if (!peer.has_value()) return;
    const bool unknown_user = !options.tenant_of_uid.contains(peer->uid);
    const auto count = count_of_uid.find(peer->uid);
    if (count != count_of_uid.end() && count->second >= (unknown_user ? kPerUnknownUser : options.of_a_user)) {
      if (options.refused) options.refused(peer->uid, unknown_user);
      return;
    }
    // gRPC closes the descriptor that it gets, and the number may be reused before the end is visible here.
    UniqueFd given(fcntl(socket.get(), F_DUPFD_CLOEXEC, 0));
    const ConnectionId id = next_id++;
    if (!given.valid() || !Watch(socket.get(), id, 0)) return;  // a hang-up is always reported
    if (unknown_user && unknown_users.size() == kMaxUnknownUserConnections) {
      shutdown(connections.at(*unknown_users.begin()).socket.get(), SHUT_RDWR);
      Erase(*unknown_users.begin());
    }
    if (unknown_user) unknown_users.insert(id);
    ++count_of_uid[peer->uid];
    connections.emplace(id, Connection{std::move(socket), peer->uid});
    admit(std::move(given), peer->uid);
  }

  void Erase(ConnectionId id) {
    const auto found = connections.find(id);
    if (found == connections.end()) return;  // erased earlier in this round
    const auto count = count_of_uid.find(found->second.uid);
    if (--count->second == 0) count_of_uid.erase(count);
    // Closing this descriptor removes it from the epoll set only after gRPC's is closed too.
    epoll_ctl(epoll.get(), EPOLL_CTL_DEL, found->second.socket.get(), nullptr);
    connections.erase(found);
    unknown_users.erase(id);
  }

  Options options;
  Admit admit;
  UniqueFd epoll, wake;
  Listener listener;
  std::map<ConnectionId, Connection> connections;
  std::map<uid_t, size_t> count_of_uid;
  std::set<ConnectionId> unknown_users;  // oldest first
  ConnectionId next_id = kFirst;
  std::atomic<bool> stopping{false};
  std::thread thread;
};

absl::StatusOr<std::unique_ptr<RpcListener>> RpcListener::Start(const std::string& path, Options options, Admit admit) {
  absl::StatusOr<Listener> listener = Listen(path, SOCK_STREAM, options.mode);
  if (!listener.ok()) return listener.status();
  auto impl = std::make_unique<Impl>();
  impl->options = std::move(options);
  impl->admit = std::move(admit);
  impl->listener = *std::move(listener);
  impl->epoll = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  impl->wake = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!impl->epoll.valid() || !impl->Watch(impl->listener.fd.get(), Impl::kListener, EPOLLIN) ||
      !impl->Watch(impl->wake.get(), Impl::kWake, EPOLLIN)) {
    return absl::ErrnoToStatus(errno, "listen.rpc_socket: cannot add it to epoll");
  }
  return std::unique_ptr<RpcListener>(new RpcListener(std::move(impl)));
}

RpcListener::RpcListener(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {
  impl_->thread = NamedThread("rpc-listener", [impl = impl_.get()] { impl->Run(); });
}

RpcListener::~RpcListener() {
  impl_->stopping = true;
  eventfd_write(impl_->wake.get(), 1);
  impl_->thread.join();
}

}  // namespace ashlar::daemon
