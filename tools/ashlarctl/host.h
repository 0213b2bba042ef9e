// SPDX-License-Identifier: Apache-2.0
// Settings of a machine, and of a daemon's process, that affect the daemon, and verdicts on them.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ashlar::ctl {

// Facts about this machine and one process. Empty: not known here.
struct HostFacts {
  std::optional<uint64_t> memory_bytes;  // memory of the machine, or the limit of the process's control group if lower
  bool memory_limited = false;           // the control group's limit is lower
  std::optional<uint64_t> locked_memory_limit;  // RLIMIT_MEMLOCK of the process; UINT64_MAX: none
  bool may_lock = false;                        // CAP_IPC_LOCK
  std::optional<uint64_t> open_files_limit;     // hard limit
  std::optional<bool> userfaultfd;              // a daemon: uses one; this process: may open one
  bool landlock = false;                        // the kernel has it and permits it to this process
  std::optional<uint64_t> mappings_limit;       // vm.max_map_count
  std::string shared_huge_pages;                // the value in brackets in transparent_hugepage/shmem_enabled
  std::optional<uint64_t> swap_bytes;
  std::vector<uint64_t> node_bytes;  // memory of each NUMA node
  std::optional<bool> clock_synchronised;
  std::vector<std::string> fabric;  // active ports of InfiniBand or RoCE
  bool fabric_present = false;      // an InfiniBand or RoCE device exists
  std::string folder;               // folder of the disk tier to check; empty: none
  std::string folder_error;         // why the folder cannot be written; empty: it can
  std::string file_system;          // file system of the folder
  bool direct_io = false;           // a write with O_DIRECT succeeded in the folder
  std::optional<uint64_t> folder_free_bytes;
  uint64_t folder_own_bytes = 0;  // bytes of existing files in the folder
};

// The resources that a daemon of this machine needs.
struct HostNeeds {
  uint64_t dram_bytes = 0;  // 0: not specified
  uint64_t ssd_bytes = 0;
  std::string ssd_folder;  // empty: not specified
  bool locked = false;     // dram.lock
  bool fabric = false;     // cluster.expect_transport: rdma
  bool sandbox = false;    // sandbox: on
};
// Needs of a daemon with this configuration. INVALID_ARGUMENT names an invalid field.
absl::StatusOr<HostNeeds> NeedsOf(const std::string& yaml);

enum class Verdict : uint8_t { kFine, kNote, kBad };

struct Finding {
  Verdict verdict = Verdict::kFine;
  std::string check;   // "open files"
  std::string found;   // "the hard limit is 1024"
  std::string remedy;  // empty if it is fine
};

// `folder`: for the disk tier, or empty. Writes a small file there and removes it. `daemon`: the process whose limits,
// control group and descriptors are checked; 0: this process.
HostFacts LookAtHost(const std::string& folder, pid_t daemon = 0);
std::vector<Finding> Judge(const HostFacts& facts, const HostNeeds& needs);

}  // namespace ashlar::ctl
