// SPDX-License-Identifier: Apache-2.0
// LocalEtcd: a private etcd for one run of a program, in a fresh folder under /tmp and removed with it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ashlar::tools {

// Different TCP ports of 127.0.0.1 that are free at this moment. Another process may take one at any time.
absl::StatusOr<std::vector<uint16_t>> FreePorts(size_t count);

class LocalEtcd {
 public:
  // Starts the `etcd` found in PATH, for this machine only and without TLS. Returns once it serves. NOT_FOUND: etcd is
  // not installed. DEADLINE_EXCEEDED, or the error that it logged, if it does not serve.
  static absl::StatusOr<std::unique_ptr<LocalEtcd>> Start();
  ~LocalEtcd();  // SIGKILL; removes the folder
  LocalEtcd(const LocalEtcd&) = delete;
  LocalEtcd& operator=(const LocalEtcd&) = delete;

  const std::string& endpoint() const { return endpoint_; }  // ADDRESS:PORT
  pid_t pid() const { return pid_; }

 private:
  LocalEtcd() = default;
  absl::Status Launch(const std::string& program);
  absl::Status AwaitService();

  std::string folder_, endpoint_;
  pid_t pid_ = -1;
};

}  // namespace ashlar::tools
