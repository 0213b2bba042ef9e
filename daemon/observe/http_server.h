// SPDX-License-Identifier: Apache-2.0
// HttpServer: serves scrapers and probes. One event-driven thread serves all connections, so a silent or slow peer only
// holds a descriptor for a while and delays no other.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/runtime/unix_socket.h"

namespace ashlar::daemon {

struct HttpReply {
  int status = 200;
  std::string body;
  std::string type = "text/plain; charset=utf-8";
};

class HttpServer {
 public:
  // The listener of a request. Anyone who reaches the TCP address may ask, for example every user of this machine. Mode
  // and directory of the Unix socket decide who may ask there.
  enum class ListenerKind : uint8_t { kTcp, kUnix };
  // Runs on the server's thread and blocks all other requests.
  using Handler = std::function<HttpReply(ListenerKind)>;
  // Handlers by path, for GET and HEAD. Other paths get 404, other methods 405.
  using Routes = std::map<std::string, Handler, std::less<>>;

  // Most connections. Beyond that, the peer (user or address) with the most connections loses its oldest one.
  static constexpr size_t kMaxConnections = 128;
  static constexpr size_t kMaxRequestBytes = 16 << 10;  // request line and headers; bodies are not read
  // bytes of replies of all connections; beyond that, the oldest reading connection is closed
  static constexpr size_t kMaxReplyBytes = 64 << 20;

  struct Options {
    std::vector<std::pair<ListenerKind, Listener>> listeners;
    // Longest lifetime of a connection, including its one reply.
    std::chrono::milliseconds patience{10'000};
  };

  // Serves the listeners until destruction, which closes all connections without waiting.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(Options options, Routes routes);
  ~HttpServer();

 private:
  struct Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
