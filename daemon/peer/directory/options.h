// SPDX-License-Identifier: Apache-2.0
// EtcdDirectoryOptions: what an EtcdDirectory is made with. The defaults are those of the configuration.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ashlar::daemon {

struct EtcdDirectoryOptions {
  std::vector<std::string> endpoints;          // host:port; one is used at a time, the next one after a failure
  std::string ca_file, cert_file, key_file;    // PEM, read anew for every connection; no ca_file: no TLS
  std::string user, password_file;             // the file's first line; read anew for every connection
  std::string prefix = "/ashlar";              // of all keys
  std::string cluster = "default";             // nodes of another one are not seen
  uint32_t lease_seconds = 15;                 // a node that is silent for so long is absent
  uint32_t writes_per_second = 1000;           // keys, of this node
  uint32_t cluster_writes_per_second = 20000;  // keys, of all nodes together: each keeps to its equal share
  uint32_t queued_writes = 65536;              // announcements that wait, and as many withdrawals
  uint64_t mirror_entries = 4194304;           // that are remembered of other nodes
};

}  // namespace ashlar::daemon
