// SPDX-License-Identifier: Apache-2.0
// Network namespaces: a network stack of its own each, for processes and for the sockets of a test.
//
// None has a name. One lasts as long as a process is in it or a descriptor holds it, so that a test that crashes leaves
// none behind, and tests at the same time cannot meet.
#pragma once

#include <string>

namespace ashlar::integration {

class NetworkNamespace {
 public:
  // Makes one whose loopback device is up. Failures are test failures.
  NetworkNamespace();
  ~NetworkNamespace();
  NetworkNamespace(const NetworkNamespace&) = delete;
  NetworkNamespace& operator=(const NetworkNamespace&) = delete;

  int fd() const { return fd_; }  // for setns
  std::string path() const;       // for other programs, as long as this process lives: `nsenter --net=PATH`

 private:
  int fd_ = -1;
};

// While it lives, the calling thread is in that namespace: sockets that it opens and threads and processes that it
// starts belong there, and stay there. Negative: the thread stays where it is.
class InNetworkNamespace {
 public:
  explicit InNetworkNamespace(int fd);
  ~InNetworkNamespace();
  InNetworkNamespace(const InNetworkNamespace&) = delete;
  InNetworkNamespace& operator=(const InNetworkNamespace&) = delete;

 private:
  int before_ = -1;
};

// Moves a process that has one thread there for good, with a /sys that shows that namespace's interfaces: UCX lists
// them there. Between fork and exec. False: errno says why.
bool LiveInNetworkNamespace(int fd);

}  // namespace ashlar::integration
