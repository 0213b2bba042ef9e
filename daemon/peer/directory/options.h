// SPDX-License-Identifier: Apache-2.0
// EtcdDirectoryOptions: options of EtcdDirectory. The defaults are those of the configuration.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ashlar::daemon {

struct EtcdDirectoryOptions {
  std::vector<std::string> endpoints;        // host:port; one is used at a time, the next after a failure
  std::string ca_file, cert_file, key_file;  // PEM files, read again for every connection; no TLS without ca_file
  std::string user, password_file;    // the first line of the file is the password; read again for every connection
  std::string prefix = "/ashlar";     // common prefix of all keys
  std::string cluster = "default";    // nodes of other clusters are not visible
  uint32_t lease_seconds = 15;        // a node that is silent for this long is absent
  uint32_t writes_per_second = 1000;  // key writes of this node
  uint32_t cluster_writes_per_second = 20000;  // key writes of all nodes; each node keeps to its equal share
  uint32_t queued_writes = 65536;              // queued announcements, and the same number of withdrawals
  uint64_t mirror_entries = 4194304;           // remembered entries of other nodes
};

}  // namespace ashlar::daemon
