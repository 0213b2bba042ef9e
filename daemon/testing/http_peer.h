// SPDX-License-Identifier: Apache-2.0
// HttpPeer, for tests: an HTTP client that writes byte by byte if need be.
#pragma once

#include <cstddef>
#include <string>

#include "daemon/runtime/unique_fd.h"

namespace ashlar::daemon {

class HttpPeer {
 public:
  explicit HttpPeer(int port);                 // of this machine
  explicit HttpPeer(const std::string& path);  // a Unix socket

  bool connected() const { return socket_.valid(); }
  int fd() const { return socket_.get(); }
  bool Send(const std::string& bytes);  // false when the other end is gone
  // Returns the bytes received until the other end closes, at most `bytes`. Waits at most 20 s for each piece.
  std::string Receive(size_t bytes = SIZE_MAX);
  // Returns whether the other end closes within 20 s; bytes received until then are dropped.
  bool Closed();

  // The whole answer to "METHOD path"; empty when there is none.
  std::string Ask(const std::string& path, const std::string& method = "GET");

 private:
  UniqueFd socket_;
};

}  // namespace ashlar::daemon
