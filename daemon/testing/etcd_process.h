// SPDX-License-Identifier: Apache-2.0
// EtcdProcess, for tests: a real etcd of one member, with its data in a folder of its own.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "daemon/testing/child_process.h"

namespace ashlar::daemon {

struct EtcdOptions {
  std::string address = "127.0.0.1";     // to listen at, for clients
  uint16_t port = 0;                     // there; 0: any that is free, the same in all its lives
  int network_namespace = -1;            // a descriptor of the one that it runs in; negative: this thread's
  std::vector<std::string> arguments;    // more of them, as --snapshot-count=100
  std::vector<std::string> environment;  // NAME=VALUE, besides this process's
  std::string certificate, key;          // files (PEM) that it serves TLS by; empty: plain text
  std::string client_authority;          // a file (PEM); clients then need a certificate of that authority
};

class EtcdProcess {
 public:
  // Returns why there can be none here; empty: there can.
  static std::string WhyNot();

  explicit EtcdProcess(const EtcdOptions& options = {});  // starts it
  ~EtcdProcess();                                         // kills it, removes its data; shows its log after a failure
  EtcdProcess(const EtcdProcess&) = delete;
  EtcdProcess& operator=(const EtcdProcess&) = delete;

  // Starts it with the data that is there, and waits until it serves. Failures are test failures.
  void Start();
  void Kill() { process_.Kill(); }  // SIGKILL, and waits for its end
  void Wipe();                      // kills it, and removes its data: the next Start is of an empty one
  void Freeze() { process_.Freeze(); }
  void Thaw() { process_.Thaw(); }
  bool Running() { return process_.Running(); }

  std::string endpoint() const;  // ADDRESS:PORT
  pid_t pid() const { return process_.pid(); }
  std::string log() const;  // of all its lives

 private:
  EtcdOptions options_;
  uint16_t peer_port_ = 0;  // where other members would reach it, at 127.0.0.1
  std::string directory_;
  ChildProcess process_;
};

}  // namespace ashlar::daemon
