// SPDX-License-Identifier: Apache-2.0
// HttpPeer, for tests: an HTTP client that can write byte by byte.
#pragma once

#include <cstddef>
#include <string>

#include "daemon/runtime/unique_fd.h"

namespace ashlar::daemon {

class HttpPeer {
 public:
  explicit HttpPeer(int port);                 // on this machine
  explicit HttpPeer(const std::string& path);  // path of a Unix socket

  bool connected() const { return socket_.valid(); }
  int fd() const { return socket_.get(); }
  bool Send(const std::string& bytes);  // returns false if the server has closed
  // Returns the bytes received until the server closes, at most `bytes`. Waits at most 20 s for each piece.
  std::string Receive(size_t bytes = SIZE_MAX);
  // Returns whether the server closes within 20 s. Received bytes are dropped.
  bool Closed();

  // Returns the complete reply to "METHOD path"; empty without one.
  std::string Ask(const std::string& path, const std::string& method = "GET");

 private:
  UniqueFd socket_;
};

}  // namespace ashlar::daemon
