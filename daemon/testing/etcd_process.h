// SPDX-License-Identifier: Apache-2.0
// EtcdProcess, for tests: a real etcd with one member and its own data directory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "daemon/testing/child_process.h"

namespace ashlar::daemon {

struct EtcdOptions {
  std::string address = "127.0.0.1";     // client listen address
  uint16_t port = 0;                     // client port; 0: any free port, kept over restarts
  int network_namespace = -1;            // descriptor of its network namespace; negative: that of this thread
  std::vector<std::string> arguments;    // additional arguments, such as --snapshot-count=100
  std::vector<std::string> environment;  // NAME=VALUE, added to this process's environment
  std::string certificate, key;          // PEM files for TLS; empty: plain text
  std::string client_authority;          // PEM file; clients then need a certificate of that authority
};

class EtcdProcess {
 public:
  // Returns why etcd cannot run here; empty if it can.
  static std::string WhyNot();

  explicit EtcdProcess(const EtcdOptions& options = {});  // starts etcd
  ~EtcdProcess();  // kills etcd and removes its data; prints its log after a failure
  EtcdProcess(const EtcdProcess&) = delete;
  EtcdProcess& operator=(const EtcdProcess&) = delete;

  // Starts etcd with the existing data, and waits until it serves. Failures are test failures.
  void Start();
  void Kill() { process_.Kill(); }  // SIGKILL, and waits for the exit
  void Wipe();                      // kills etcd and removes its data
  void Freeze() { process_.Freeze(); }
  void Thaw() { process_.Thaw(); }
  bool Running() { return process_.Running(); }

  std::string endpoint() const;  // ADDRESS:PORT
  pid_t pid() const { return process_.pid(); }
  std::string log() const;  // contains the logs of all runs

 private:
  EtcdOptions options_;
  uint16_t peer_port_ = 0;  // peer port at 127.0.0.1
  std::string directory_;
  ChildProcess process_;
};

}  // namespace ashlar::daemon
