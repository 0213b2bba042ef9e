// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/host.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <linux/landlock.h>
#include <linux/magic.h>
#include <linux/userfaultfd.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <sys/timex.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace ashlar::ctl {
namespace {

namespace fs = std::filesystem;

std::string FirstLine(const fs::path& path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

std::optional<uint64_t> NumberIn(const fs::path& path) {
  uint64_t number = 0;
  if (!absl::SimpleAtoi(FirstLine(path), &number)) return std::nullopt;
  return number;
}

// The bytes of "MemTotal:  123 kB", also after "Node 0 ".
std::optional<uint64_t> MemTotal(const fs::path& path) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t at = line.find("MemTotal:");
    uint64_t kib = 0;
    if (at == std::string::npos) continue;
    const std::vector<std::string> words = absl::StrSplit(line.substr(at), ' ', absl::SkipWhitespace());
    if (words.size() > 1 && absl::SimpleAtoi(words[1], &kib)) return kib << 10;
  }
  return std::nullopt;
}

// The hard one, of a row of /proc/PID/limits: name, soft limit, hard limit, unit.
std::optional<uint64_t> Limit(const fs::path& process, absl::string_view name) {
  std::ifstream file(process / "limits");
  for (std::string line; std::getline(file, line);) {
    absl::string_view rest = line;
    if (!absl::ConsumePrefix(&rest, name)) continue;
    const std::vector<std::string> words = absl::StrSplit(rest, ' ', absl::SkipWhitespace());
    uint64_t limit = 0;
    if (words.size() < 2) break;
    if (words[1] == "unlimited") return UINT64_MAX;
    if (absl::SimpleAtoi(words[1], &limit)) return limit;
  }
  return std::nullopt;
}

bool MayLock(const fs::path& process) {
  std::ifstream file(process / "status");
  for (std::string line; std::getline(file, line);) {
    absl::string_view digits = line;
    uint64_t effective = 0;
    if (absl::ConsumePrefix(&digits, "CapEff:") && absl::SimpleHexAtoi(digits, &effective)) {
      return (effective >> CAP_IPC_LOCK & 1) != 0;
    }
  }
  return false;
}

// Whether the daemon has opened one, as it does at startup. Unknown without permission to inspect it.
std::optional<bool> HasUserfaultfd(const fs::path& process) {
  std::error_code error;
  bool any = false;
  for (const auto& descriptor : fs::directory_iterator(process / "fd", error)) {
    std::error_code gone;
    const std::string name = fs::read_symlink(descriptor.path(), gone).string();
    if (name.find("[userfaultfd]") != std::string::npos) return true;
    any |= !name.empty();
  }
  return any ? std::optional<bool>(false) : std::nullopt;
}

bool MayHaveUserfaultfd() {
  const auto fd = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY));
  if (fd >= 0) close(fd);
  return fd >= 0;
}

// The word in brackets: "always within_size [advise] never".
std::string Chosen(const std::string& line) {
  const size_t begin = line.find('['), end = line.find(']');
  return begin == std::string::npos || end < begin ? "" : line.substr(begin + 1, end - begin - 1);
}

void LookAtMemory(const fs::path& process, HostFacts& facts) {
  facts.memory_bytes = MemTotal("/proc/meminfo");
  // "max" is not a number.
  const std::vector<std::string> group = absl::StrSplit(FirstLine(process / "cgroup"), absl::MaxSplits(':', 2));
  for (fs::path at = group.size() == 3 ? fs::path("/sys/fs/cgroup" + group[2]) : fs::path("/sys/fs/cgroup");
       at.string().rfind("/sys/fs/cgroup", 0) == 0 && at != "/"; at = at.parent_path()) {
    const std::optional<uint64_t> most = NumberIn(at / "memory.max");
    if (most && *most < facts.memory_bytes.value_or(UINT64_MAX)) {
      facts.memory_bytes = most;
      facts.memory_limited = true;
    }
    if (at == "/sys/fs/cgroup") break;
  }
  facts.locked_memory_limit = Limit(process, "Max locked memory");
  facts.may_lock = MayLock(process);
  facts.shared_huge_pages = Chosen(FirstLine("/sys/kernel/mm/transparent_hugepage/shmem_enabled"));
  struct sysinfo info;
  if (sysinfo(&info) == 0) facts.swap_bytes = uint64_t{info.totalswap} * info.mem_unit;
  std::error_code error;
  for (const auto& node : fs::directory_iterator("/sys/devices/system/node", error)) {
    if (node.path().filename().string().rfind("node", 0) != 0) continue;
    if (const auto bytes = MemTotal(node.path() / "meminfo")) facts.node_bytes.push_back(*bytes);
  }
}

void LookAtFabric(HostFacts& facts) {
  std::error_code error;
  for (const auto& card : fs::directory_iterator("/sys/class/infiniband", error)) {
    facts.fabric_present = true;
    std::error_code none;
    for (const auto& port : fs::directory_iterator(card.path() / "ports", none)) {
      if (FirstLine(port.path() / "state").find("ACTIVE") == std::string::npos) continue;
      facts.fabric.push_back(absl::StrCat(card.path().filename().string(), ":", port.path().filename().string(), " ",
                                          FirstLine(port.path() / "link_layer")));
    }
  }
}

std::string NameOf(long magic) {
  switch (magic) {
    case EXT4_SUPER_MAGIC:
      return "ext4";
    case XFS_SUPER_MAGIC:
      return "xfs";
    case BTRFS_SUPER_MAGIC:
      return "btrfs";
    case TMPFS_MAGIC:
      return "tmpfs";
    case OVERLAYFS_SUPER_MAGIC:
      return "overlayfs";
    case NFS_SUPER_MAGIC:
      return "nfs";
    default:
      return absl::StrCat("0x", absl::Hex(magic));
  }
}

uint64_t BytesBelow(const std::string& folder) {
  constexpr uint64_t kBlock = 512;  // bytes per unit of st_blocks
  uint64_t bytes = 0;
  std::error_code error;
  for (fs::recursive_directory_iterator at(folder, fs::directory_options::skip_permission_denied, error), end;
       !error && at != end; at.increment(error)) {
    struct stat info {};
    if (lstat(at->path().c_str(), &info) == 0) bytes += static_cast<uint64_t>(info.st_blocks) * kBlock;
  }
  return bytes;
}

void LookAtFolder(HostFacts& facts) {
  struct statfs about;
  if (statfs(facts.folder.c_str(), &about) != 0) {
    facts.folder_error = std::strerror(errno);
    return;
  }
  facts.file_system = NameOf(about.f_type);
  facts.folder_free_bytes = uint64_t{about.f_bavail} * about.f_bsize;
  facts.folder_own_bytes = BytesBelow(facts.folder);
  const std::string file = facts.folder + "/.ashlar-doctor-XXXXXX";
  std::vector<char> name(file.c_str(), file.c_str() + file.size() + 1);
  const int fd = mkostemp(name.data(), O_DIRECT | O_CLOEXEC);
  if (fd < 0) {
    // A file system without O_DIRECT returns EINVAL, and may have created the file.
    const int error = errno;
    unlink(name.data());
    if (error != EINVAL) facts.folder_error = std::strerror(error);
    return;
  }
  constexpr size_t kBlock = 4096;
  const std::unique_ptr<void, decltype(&std::free)> block(std::aligned_alloc(kBlock, kBlock), &std::free);
  std::memset(block.get(), 0, kBlock);
  facts.direct_io = pwrite(fd, block.get(), kBlock, 0) == static_cast<ssize_t>(kBlock);
  close(fd);
  unlink(name.data());
}

}  // namespace

HostFacts LookAtHost(const std::string& folder, pid_t daemon) {
  const fs::path process = daemon == 0 ? fs::path("/proc/self") : fs::path("/proc") / absl::StrCat(daemon);
  HostFacts facts{.folder = folder};
  LookAtMemory(process, facts);
  facts.open_files_limit = Limit(process, "Max open files");
  facts.userfaultfd = daemon == 0 ? MayHaveUserfaultfd() : HasUserfaultfd(process);
  facts.landlock = syscall(SYS_landlock_create_ruleset, nullptr, 0, LANDLOCK_CREATE_RULESET_VERSION) >= 1;
  facts.mappings_limit = NumberIn("/proc/sys/vm/max_map_count");
  timex clock{};
  const int state = adjtimex(&clock);
  if (state >= 0) facts.clock_synchronised = state != TIME_ERROR;
  LookAtFabric(facts);
  if (!folder.empty()) LookAtFolder(facts);
  return facts;
}

}  // namespace ashlar::ctl
