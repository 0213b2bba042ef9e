// SPDX-License-Identifier: Apache-2.0
// HttpServer: answers scrapers and probes. One thread serves all connections by events, so a peer that says nothing, or
// reads slowly, holds a descriptor for a while and delays nobody.
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
  // The listener of a request. Everybody who reaches the TCP address may ask there, for example every user of this
  // machine; mode and folder of the Unix socket decide who may ask there.
  enum class Door : uint8_t { kTcp, kUnix };
  // Runs on the server's thread, one at a time, and keeps all others waiting meanwhile.
  using Handler = std::function<HttpReply(Door)>;
  // By path, for GET and HEAD. Other paths are answered 404, other methods 405.
  using Routes = std::map<std::string, Handler, std::less<>>;

  // The most connections at a time. Beyond it, the peer (user, or address) with the most connections loses its oldest.
  static constexpr size_t kMaxConnections = 128;
  static constexpr size_t kMaxRequestBytes = 16 << 10;  // of line and headers; bodies are never read
  static constexpr size_t kMaxReplyBytes = 64 << 20;    // of all connections: the oldest that reads gives way

  struct Options {
    std::vector<std::pair<Door, Listener>> listeners;
    // The time from a connection's start to the end of its one reply. Then the connection is closed in any case.
    std::chrono::milliseconds patience{10'000};
  };

  // Answers on the listeners until destruction, which cuts all connections and waits for nobody.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(Options options, Routes routes);
  ~HttpServer();

 private:
  struct Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
