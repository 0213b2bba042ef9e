// SPDX-License-Identifier: Apache-2.0
#include "daemon/observe/http_server.h"

#include <microhttpd.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <list>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/runtime/named_thread.h"
#include "daemon/runtime/tcp_socket.h"

namespace ashlar::daemon {
namespace {

using SteadyClock = std::chrono::steady_clock;

// Returns the peer of a connection, among whom capacity is shared; for a local connection, the user if the kernel
// reports it.
std::string PeerName(HttpServer::ListenerKind kind, int socket) {
  if (kind == HttpServer::ListenerKind::kTcp) return PeerAddress(socket);
  const std::optional<ucred> peer = PeerOf(socket);
  return peer.has_value() ? absl::StrCat(peer->uid) : "";
}

// The response owns the text, which libmicrohttpd sends from there.
MHD_Response* MakeResponse(HttpReply reply) {
  auto* const body = new std::string(std::move(reply.body));
  MHD_Response* const response = MHD_create_response_from_buffer_with_free_callback_cls(
      body->size(), body->data(), [](void* text) { delete static_cast<std::string*>(text); }, body);
  if (response == nullptr) {
    delete body;
    return nullptr;
  }
  MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, reply.type.c_str());
  MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close");
  if (reply.status == MHD_HTTP_METHOD_NOT_ALLOWED) {
    MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
  }
  return response;
}

}  // namespace

// Only the server's thread uses this, except for `stopping`.
struct HttpServer::Impl {
  struct Connection {
    ListenerKind kind;
    int socket;  // owned by libmicrohttpd, open as long as it is listed
    std::string peer;
    SteadyClock::time_point deadline;
    size_t reply_bytes = 0;
    bool cut = false;  // to be closed in the next round
    std::list<Connection>::iterator self;
  };

  bool Watch(int fd, uint64_t tag) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = tag;
    return epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) == 0;
  }

  absl::Status Open() {
    // libmicrohttpd counts closed connections until the round ends.
    http = MHD_start_daemon(MHD_USE_EPOLL | MHD_USE_NO_LISTEN_SOCKET, 0, nullptr, nullptr, &Impl::OnRequest, this,
                            MHD_OPTION_CONNECTION_LIMIT, static_cast<unsigned>(2 * kMaxConnections),
                            MHD_OPTION_CONNECTION_MEMORY_LIMIT, kMaxRequestBytes, MHD_OPTION_NOTIFY_CONNECTION,
                            &Impl::OnConnection, this, MHD_OPTION_END);
    if (http == nullptr) return absl::UnavailableError("metrics: cannot start the HTTP server");
    const MHD_DaemonInfo* const events = MHD_get_daemon_info(http, MHD_DAEMON_INFO_EPOLL_FD);
    epoll.Reset(epoll_create1(EPOLL_CLOEXEC));
    wake.Reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    bool watching = epoll.valid() && events != nullptr && Watch(events->epoll_fd, kOther) && Watch(wake.get(), kOther);
    for (size_t i = 0; i < options.listeners.size(); ++i) {
      watching = watching && Watch(options.listeners[i].second.fd.get(), i);
    }
    return watching ? absl::OkStatus()
                    : absl::ErrnoToStatus(errno, "metrics: cannot add the HTTP server's sockets to epoll");
  }

  void Run() {
    while (!stopping) {
      epoll_event events[8];
      const int count = epoll_wait(epoll.get(), events, std::size(events), WaitMillis());
      for (int i = 0; i < count; ++i) {
        if (events[i].data.u64 == kOther) continue;
        auto& [kind, listener] = options.listeners.at(events[i].data.u64);
        AcceptSome(listener, [this, kind = kind](UniqueFd socket) { Admit(kind, std::move(socket)); });
      }
      MHD_run(http);
      for (Connection& connection : connections) {  // oldest first; all have the same timeout
        if (connection.deadline > SteadyClock::now()) break;
        Cut(connection);
      }
    }
  }

  int WaitMillis() const {
    MHD_UNSIGNED_LONG_LONG pending = 0;
    if (MHD_get_timeout(http, &pending) == MHD_YES && pending == 0) return 0;
    const auto oldest = std::ranges::find(connections, false, &Connection::cut);
    if (oldest == connections.end()) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(oldest->deadline - SteadyClock::now());
    return static_cast<int>(std::clamp<int64_t>(left.count(), 0, options.patience.count()));
  }

  void Admit(ListenerKind kind, UniqueFd socket) {
    std::string peer = PeerName(kind, socket.get());
    if (std::ranges::count(connections, false, &Connection::cut) >= static_cast<ptrdiff_t>(kMaxConnections)) {
      CutOldestOfBusiestPeer();
    }
    arriving = {kind, socket.get(), std::move(peer), SteadyClock::now() + options.patience};
    // Only the address family is used, to skip options that a Unix socket does not have.
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    if (getpeername(socket.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) return;
    MHD_add_connection(http, socket.Release(), reinterpret_cast<const sockaddr*>(&address), size);
    MHD_run(http);  // libmicrohttpd 1.0 calls OnConnection here, 0.9 above
  }

  void CutOldestOfBusiestPeer() {
    std::map<std::string, size_t> of_peer;
    for (const Connection& one : connections) of_peer[one.peer] += one.cut ? 0 : 1;
    const auto most = std::ranges::max_element(of_peer, {}, [](const auto& peer) { return peer.second; });
    Cut(*std::ranges::find_if(connections, [&](const Connection& one) { return !one.cut && one.peer == most->first; }));
  }

  // The loop sees the hang-up and closes the socket.
  static void Cut(Connection& connection) {
    if (!std::exchange(connection.cut, true)) shutdown(connection.socket, SHUT_RDWR);
  }

  static void OnConnection(void* self, MHD_Connection*, void** context, MHD_ConnectionNotificationCode what) {
    auto& server = *static_cast<Impl*>(self);
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
      server.connections.push_back(std::move(server.arriving));
      server.connections.back().self = std::prev(server.connections.end());
      *context = &server.connections.back();
    } else {
      server.connections.erase(static_cast<Connection*>(*context)->self);
    }
  }

  // Called after the headers; bodies are not read.
  static MHD_Result OnRequest(void* self, MHD_Connection* request, const char* path, const char* method, const char*,
                              const char*, size_t*, void**) {
    auto& server = *static_cast<Impl*>(self);
    const MHD_ConnectionInfo* const info = MHD_get_connection_info(request, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    auto& connection = *static_cast<Connection*>(info->socket_context);
    HttpReply reply = server.Answer(connection.kind, path, method);
    server.Charge(connection, reply.body.size());
    const auto status = static_cast<unsigned>(reply.status);
    MHD_Response* const response = MakeResponse(std::move(reply));
    if (response == nullptr) return MHD_NO;
    const MHD_Result queued = MHD_queue_response(request, status, response);
    MHD_destroy_response(response);
    return queued;
  }

  HttpReply Answer(ListenerKind kind, absl::string_view path, absl::string_view method) const {
    const auto route = routes.find(path);
    if (route == routes.end()) return {.status = MHD_HTTP_NOT_FOUND, .body = "no such path\n"};
    if (method != MHD_HTTP_METHOD_GET && method != MHD_HTTP_METHOD_HEAD) {
      return {.status = MHD_HTTP_METHOD_NOT_ALLOWED, .body = "GET and HEAD only\n"};
    }
    return route->second(kind);
  }

  // Charges replies that wait in memory for slow readers.
  void Charge(Connection& reader, size_t bytes) {
    reader.reply_bytes = bytes;
    size_t all = 0;
    for (const Connection& one : connections) all += one.cut ? 0 : one.reply_bytes;
    for (Connection& one : connections) {
      if (all <= kMaxReplyBytes) return;
      if (&one == &reader || one.cut || one.reply_bytes == 0) continue;
      all -= one.reply_bytes;
      Cut(one);
    }
  }

  static constexpr uint64_t kOther = UINT64_MAX;  // not a listener

  Options options;
  Routes routes;
  MHD_Daemon* http = nullptr;
  UniqueFd epoll, wake;
  Connection arriving;                // between MHD_add_connection and OnConnection
  std::list<Connection> connections;  // oldest first
  std::atomic<bool> stopping{false};
  std::thread thread;

  ~Impl() {
    if (http != nullptr) MHD_stop_daemon(http);
  }
};

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(Options options, Routes routes) {
  auto impl = std::make_unique<Impl>();
  impl->options = std::move(options);
  impl->routes = std::move(routes);
  if (absl::Status status = impl->Open(); !status.ok()) return status;
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {
  impl_->thread = NamedThread("http", [impl = impl_.get()] { impl->Run(); });
}

HttpServer::~HttpServer() {
  impl_->stopping = true;
  eventfd_write(impl_->wake.get(), 1);
  impl_->thread.join();
}

}  // namespace ashlar::daemon
