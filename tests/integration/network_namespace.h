// SPDX-License-Identifier: Apache-2.0
// Network namespaces: a network stack of its own each, for processes and for the sockets of a test.
//
// Namespaces have no name. A namespace lives as long as a process is in it or a descriptor holds it, so a crashed test
// leaves none, and concurrent tests cannot interfere.
#pragma once

#include <string>

namespace ashlar::integration {

class NetworkNamespace {
 public:
  // Creates one whose loopback device is up. Failures are test failures.
  NetworkNamespace();
  ~NetworkNamespace();
  NetworkNamespace(const NetworkNamespace&) = delete;
  NetworkNamespace& operator=(const NetworkNamespace&) = delete;

  int fd() const { return fd_; }  // setns takes it
  std::string path() const;       // valid while this process lives: `nsenter --net=PATH`

 private:
  int fd_ = -1;
};

// While this lives, the calling thread is in that namespace: sockets that it opens, and threads and processes that it
// starts, belong there permanently. Negative: the thread stays in its namespace.
class InNetworkNamespace {
 public:
  explicit InNetworkNamespace(int fd);
  ~InNetworkNamespace();
  InNetworkNamespace(const InNetworkNamespace&) = delete;
  InNetworkNamespace& operator=(const InNetworkNamespace&) = delete;

 private:
  int before_ = -1;
};

// Moves a single-threaded process there permanently, with a /sys that shows that namespace's interfaces, because UCX
// lists them there. Call between fork and exec. False: see errno.
bool LiveInNetworkNamespace(int fd);

}  // namespace ashlar::integration
