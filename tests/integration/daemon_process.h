// SPDX-License-Identifier: Apache-2.0
// DaemonProcess: a real ashlard in a folder of its own, which a test starts, freezes, kills and restarts.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "client/session/client.h"

namespace ashlar::integration {

// Long enough for a loaded machine and for sanitizers. Only a failing test waits that long.
inline constexpr std::chrono::milliseconds kPatience{20'000};

// Polls until `holds` is true. Returns false after `patience`.
bool Eventually(const std::function<bool()>& holds, std::chrono::milliseconds patience = kPatience);

// Shuts every connection of this process to that Unix socket.
void BreakConnections(const std::string& path);

struct DaemonOptions {
  std::string dram = "64MiB";
  std::string arena = "4MiB";
  std::string tenants;                   // YAML of the field `tenants`; empty: one tenant, this user
  std::string sessions;                  // YAML of the field `sessions`; empty: its defaults
  std::string ssd;                       // capacity; empty: no ssd tier
  std::string admission = "second_use";  // policy of that tier
  std::string eviction = "price";
  std::string on_damage = "quarantine";  // policy of the ssd tier
  std::string ssd_folder;                // if not inside the daemon's directory
  uint32_t drain_seconds = 2;
  uint32_t threads = 2;
  std::string gpu;                       // YAML of the field `gpu`; empty: none
  std::string cluster;                   // YAML of the field `cluster`; empty: none
  std::string more;                      // YAML of further fields
  std::string program;                   // if not the ashlard of this build
  std::vector<std::string> environment;  // NAME=VALUE, besides this process's
  bool own_pid_namespace = false;        // only if MayMakePidNamespaces()
  int network_namespace = -1;            // descriptor of its network namespace; negative: this thread's
  uint32_t uid = 0;                      // user of the daemon; 0: the caller's. Others require root
  uint64_t max_files = 0;                // its limit on open files; 0: this process's
  uint64_t max_threads = 0;              // its user's limit on threads; 0: this process's
  int log = -1;                          // a descriptor to write the log to, in place of a file
};

class DaemonProcess {
 public:
  // Starts the daemon and waits until it serves. Failures are test failures. If the daemon ends before it serves, the
  // message has its exit and its last lines.
  explicit DaemonProcess(const DaemonOptions& options = {});
  ~DaemonProcess();  // kills it; shows its log when the test has failed
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  // Writes the configuration for the next Start, and sets its limit on threads.
  void Configure(const DaemonOptions& options);
  void Start();
  std::string Refusal();  // starts it when it must refuse to run; returns its message
  void Kill();            // SIGKILL, and waits for the exit
  void Signal(int number);
  int Wait();       // waits for the exit; returns the exit code
  int Terminate();  // SIGTERM, and waits; returns the exit code
  void Freeze();    // SIGSTOP, and waits until it is stopped
  void Thaw();      // SIGCONT

  pid_t pid() const { return pid_; }
  size_t peak_bytes() const;                                   // largest resident set so far
  const std::string& directory() const { return directory_; }  // may also hold a test's files
  std::string ssd_folder() const { return ssd_folder_.empty() ? directory_ + "/ssd" : ssd_folder_; }
  std::string log() const;  // log of all its runs
  std::string admin_socket() const { return directory_ + "/admin.sock"; }
  std::string metrics_socket() const { return directory_ + "/metrics.sock"; }
  ClientOptions client_options() const;
  std::string Http(const std::string& path) const;  // the metrics socket's answer, with its status line
  std::string Metrics() const;                      // text of the metrics endpoint; empty if the daemon does not answer
  // A sample of the metrics endpoint, by its name with labels as it is written there; 0 when it is not there.
  double Metric(const std::string& sample) const;

 private:
  void Launch();
  bool Serves() const;

  std::string directory_;
  const bool own_pid_namespace_;
  const int network_namespace_;
  const std::string program_;
  const uint32_t uid_;
  const uint64_t max_files_;
  uint64_t max_threads_ = 0;
  const int log_;
  const std::vector<std::string> environment_;
  const std::string ssd_folder_;
  uint16_t metrics_port_ = 0;
  pid_t pid_ = -1;
};

}  // namespace ashlar::integration
