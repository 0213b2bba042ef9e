// SPDX-License-Identifier: Apache-2.0
// Judge: whether a machine's settings suit its daemon.
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tools/ashlarctl/format.h"
#include "tools/ashlarctl/host.h"

namespace ashlar::ctl {
namespace {

constexpr uint64_t kOpenFiles = 65'536;  // enough for 64 sessions of many tenants (daemon/open_files.h)
constexpr uint64_t kMappings = 262'144;  // enough for arenas of 64 MiB of a large machine (daemon/mappings.h)
constexpr double kMostOfMemory = 0.9;    // the rest is for engines, the page cache and the daemon itself
// A control group's limit must leave this much besides dram (deploy/kustomize/README.md), plus hosted memory.
constexpr uint64_t kBesideDram = uint64_t{12} << 30;

Finding Fine(std::string check, std::string found) {
  return {Verdict::kFine, std::move(check), std::move(found), ""};
}

Finding OfMemory(const HostFacts& facts, const HostNeeds& needs) {
  if (!facts.memory_bytes) return {Verdict::kNote, "memory", "unknown", ""};
  const std::string found = absl::StrCat(Bytes(*facts.memory_bytes), " available");
  const double most = kMostOfMemory * static_cast<double>(*facts.memory_bytes);
  if (static_cast<double>(needs.dram_bytes) <= most) {
    if (!facts.memory_limited || needs.dram_bytes == 0 || *facts.memory_bytes - needs.dram_bytes >= kBesideDram) {
      return Fine("memory", found);
    }
    return {Verdict::kNote, "memory",
            absl::StrCat(found, " in the control group, ", Bytes(*facts.memory_bytes - needs.dram_bytes),
                         " of it beyond dram"),
            absl::StrCat("raise the limit to dram.capacity_bytes plus ", Bytes(kBesideDram),
                         " for the daemon, model metadata and hosted regions, or lower "
                         "dram.capacity_bytes; the kernel kills the daemon at the limit")};
  }
  return {Verdict::kBad, "memory", absl::StrCat(found, ", ", Bytes(needs.dram_bytes), " required"),
          "lower dram.capacity_bytes, or raise the memory limit of the container; the kernel kills the daemon at the "
          "limit"};
}

Finding OfLocking(const HostFacts& facts, const HostNeeds& needs) {
  const uint64_t limit = facts.may_lock ? UINT64_MAX : facts.locked_memory_limit.value_or(0);
  const std::string found = limit == UINT64_MAX ? "no limit" : absl::StrCat("at most ", Bytes(limit));
  if (limit == UINT64_MAX || (needs.dram_bytes > 0 && limit >= needs.dram_bytes)) return Fine("locked memory", found);
  return {needs.locked ? Verdict::kBad : Verdict::kNote, "locked memory", found,
          "LimitMEMLOCK=infinity (systemd; for pods in the container runtime's unit), --ulimit memlock=-1 (docker, "
          "podman)"};
}

Finding OfHugePages(const HostFacts& facts) {
  const std::string& chosen = facts.shared_huge_pages;
  if (chosen == "advise" || chosen == "always" || chosen == "within_size" || chosen == "force") {
    return Fine("huge pages", absl::StrCat("enabled for shared memory: ", chosen));
  }
  return {Verdict::kNote, "huge pages",
          chosen.empty() ? "unknown" : absl::StrCat("disabled for shared memory: ", chosen),
          "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, and dram.huge_pages: true"};
}

Finding OfLimit(const char* check, const std::optional<uint64_t>& limit, uint64_t enough, const char* remedy) {
  if (!limit) return {Verdict::kNote, check, "unknown", ""};
  const std::string found = *limit == UINT64_MAX ? "no limit" : absl::StrCat("at most ", *limit);
  if (*limit >= enough) return Fine(check, found);
  return {Verdict::kNote, check, found, remedy};
}

Finding OfSwap(const HostFacts& facts) {
  if (facts.swap_bytes.value_or(0) == 0) return Fine("swap", "none");
  return {Verdict::kNote, "swap", Bytes(*facts.swap_bytes),
          "run swapoff -a, or set dram.lock: true; a swapped-out cache is slower than no cache"};
}

Finding OfNuma(const HostFacts& facts, const HostNeeds& needs) {
  if (facts.node_bytes.size() <= 1) return Fine("NUMA", "one node");
  const uint64_t least = *std::ranges::min_element(facts.node_bytes);
  const std::string found = absl::StrCat(facts.node_bytes.size(), " nodes, the smallest has ", Bytes(least));
  if (needs.dram_bytes <= least) return Fine("NUMA", found);
  return {Verdict::kNote, "NUMA", found, "spread the tier over the nodes (dram.numa), or run one daemon per node"};
}

Finding OfClock(const HostFacts& facts) {
  if (!facts.clock_synchronised) return {Verdict::kNote, "clock", "unknown", ""};
  if (*facts.clock_synchronised) return Fine("clock", "synchronised");
  return {Verdict::kNote, "clock", "not synchronised",
          "run chrony or systemd-timesyncd; certificates and log timestamps depend on the clock"};
}

Finding OfFabric(const HostFacts& facts, const HostNeeds& needs) {
  if (!facts.fabric.empty()) return Fine("fabric", absl::StrCat("active: ", absl::StrJoin(facts.fabric, ", ")));
  const std::string found = facts.fabric_present ? "RDMA card without an active port" : "no RDMA card; peers use TCP";
  if (!needs.fabric && !facts.fabric_present) return Fine("fabric", found);
  return {needs.fabric ? Verdict::kBad : Verdict::kNote, "fabric", found,
          "check ibstat and ucx_info -d on the node; in a pod, request the RDMA device"};
}

Finding OfGuard(const HostFacts& facts) {
  if (!facts.userfaultfd) return {Verdict::kNote, "userfaultfd", "unknown", ""};
  if (*facts.userfaultfd) return Fine("userfaultfd", "permitted");
  return {Verdict::kNote, "userfaultfd",
          "not permitted: pages that an engine frees from a region are charged to the daemon",
          "allow the system call: @system-service in systemd, deploy/kustomize/components/seccomp in Kubernetes"};
}

Finding OfLandlock(const HostFacts& facts, const HostNeeds& needs) {
  if (facts.landlock) return Fine("landlock", "supported by the kernel");
  if (!needs.sandbox) return Fine("landlock", "not supported, not required");
  return {Verdict::kNote, "landlock", "not supported: sandbox: on cannot restrict file access",
          "use a kernel with CONFIG_SECURITY_LANDLOCK and landlock in lsm="};
}

std::vector<Finding> OfFolder(const HostFacts& facts, const HostNeeds& needs) {
  if (facts.folder.empty()) return {};
  if (!facts.folder_error.empty()) {
    return {{Verdict::kBad, "disk", absl::StrCat(facts.folder, ": ", facts.folder_error),
             "make the folder writable for the daemon's user"}};
  }
  std::vector<Finding> findings;
  const bool local = facts.file_system != "nfs" && facts.file_system != "tmpfs" && facts.file_system != "overlayfs";
  findings.push_back({local ? Verdict::kFine : Verdict::kBad, "disk",
                      absl::StrCat(facts.folder, " is on ", facts.file_system),
                      local ? "" : "use a folder on a local disk with ext4 or xfs (in a pod: hostPath)"});
  findings.push_back({facts.direct_io ? Verdict::kFine : Verdict::kBad, "O_DIRECT",
                      facts.direct_io ? "supported" : "not supported", facts.direct_io ? "" : "use ext4 or xfs"});
  const uint64_t free = facts.folder_free_bytes.value_or(0), own = facts.folder_own_bytes;
  const bool fits = free + own >= needs.ssd_bytes;
  findings.push_back({fits ? Verdict::kFine : Verdict::kBad, "disk space",
                      own == 0 ? absl::StrCat(Bytes(free), " free")
                               : absl::StrCat(Bytes(free), " free, ", Bytes(own), " used by the tier"),
                      fits ? "" : absl::StrCat("lower ssd.capacity_bytes; ", Bytes(needs.ssd_bytes), " are required")});
  return findings;
}

}  // namespace

std::vector<Finding> Judge(const HostFacts& facts, const HostNeeds& needs) {
  std::vector<Finding> findings = {
      OfMemory(facts, needs),
      OfLocking(facts, needs),
      OfHugePages(facts),
      OfLimit("open files", facts.open_files_limit, kOpenFiles,
              "LimitNOFILE=1048576 (systemd), --ulimit nofile=1048576 (containers)"),
      OfLimit("mappings", facts.mappings_limit, kMappings, "sysctl -w vm.max_map_count=262144"),
      OfSwap(facts),
      OfNuma(facts, needs),
      OfClock(facts),
      OfFabric(facts, needs),
      OfGuard(facts),
      OfLandlock(facts, needs)};
  for (Finding& finding : OfFolder(facts, needs)) findings.push_back(std::move(finding));
  return findings;
}

}  // namespace ashlar::ctl
