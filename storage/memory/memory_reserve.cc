#include "storage/memory/memory_reserve.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <fstream>
#include <optional>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "storage/memory/numa.h"

namespace ashlar::storage {
namespace {

// The number behind `name` in a file of lines "name number …".
std::optional<uint64_t> ReadField(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string word, rest; file >> word && std::getline(file, rest);) {
    uint64_t value = 0;
    if (word == name && absl::SimpleAtoi(rest.substr(0, rest.find('k')), &value)) return value;
  }
  return std::nullopt;
}

// A file of one number; nothing where it says "max", or is not there.
std::optional<uint64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  uint64_t value = 0;
  if (!(file >> word) || !absl::SimpleAtoi(word, &value)) return std::nullopt;
  return value;
}

// One of the kernel's two ways to limit the memory of groups of processes: where, and in which files.
struct Hierarchy {
  const char* folder;
  const char *limit, *used;
  const char *inactive_files, *active_files;  // in memory.stat: what is cached of files, by the group and those below
};
constexpr Hierarchy kVersion2 = {"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file", "active_file"};
constexpr Hierarchy kVersion1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                 "total_inactive_file", "total_active_file"};

// The process's group, "/" or "/a/b": the unified hierarchy's, or version 1's of memory.
std::optional<std::string> ReadCgroup(const std::string& path, const Hierarchy& hierarchy) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::vector<absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() < 3) continue;
    const std::vector<absl::string_view> controllers = absl::StrSplit(parts[1], ',');
    const bool unified = parts[0] == "0" && parts[1].empty();
    if (&hierarchy == &kVersion2 ? unified : std::ranges::count(controllers, "memory") > 0)
      return std::string(parts[2]);
  }
  return std::nullopt;
}

// Returns the memory that one group leaves below its own limit. The kernel drops the group's cached files before it
// kills anyone, so they count as free.
uint64_t LeftIn(const std::string& folder, const Hierarchy& hierarchy) {
  const std::optional<uint64_t> limit = ReadNumber(absl::StrCat(folder, "/", hierarchy.limit));
  const std::optional<uint64_t> used = ReadNumber(absl::StrCat(folder, "/", hierarchy.used));
  if (!limit || !used) return UINT64_MAX;
  const uint64_t cached = ReadField(folder + "/memory.stat", hierarchy.inactive_files).value_or(0) +
                          ReadField(folder + "/memory.stat", hierarchy.active_files).value_or(0);
  const uint64_t held = *used - std::min(cached, *used);
  return *limit - std::min(held, *limit);
}

absl::Status TakePages(int memfd, uint64_t offset, uint64_t bytes, void* advised) {
  // Only touching heeds advice. A kernel that cannot do that ahead (before 5.14) gives small pages below.
  if (advised != nullptr) madvise(static_cast<std::byte*>(advised) + offset, bytes, MADV_POPULATE_WRITE);
  while (fallocate(memfd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0) {
    if (errno == EINTR) continue;
    return absl::ResourceExhaustedError(absl::ErrnoToStatus(errno, "fallocate").ToString());
  }
  return absl::OkStatus();
}

}  // namespace

uint64_t AvailableMemory(const std::string& root) {
  uint64_t available = UINT64_MAX;
  if (const auto kilobytes = ReadField(root + "/proc/meminfo", "MemAvailable:")) available = *kilobytes * 1024;
  for (const Hierarchy* hierarchy : {&kVersion2, &kVersion1}) {
    std::optional<std::string> group = ReadCgroup(root + "/proc/self/cgroup", *hierarchy);
    while (group && group->starts_with('/')) {
      available = std::min(available, LeftIn(absl::StrCat(root, hierarchy->folder, *group), *hierarchy));
      if (*group == "/") break;
      group->resize(std::max<size_t>(group->rfind('/'), 1));
    }
  }
  return available;
}

absl::Status ReservePages(int memfd, uint64_t bytes, const ReserveOptions& options) {
  // Promised to calls that have not taken it yet, on whatever threads they run.
  static std::atomic<uint64_t> promised{0};
  uint64_t wanted = bytes - std::min(options.present_bytes, bytes);
  const uint64_t before = promised.fetch_add(wanted), keep_free = std::max(options.keep_free, kKeptFree);
  const absl::Cleanup forget = [&wanted] { promised -= wanted; };
  uint64_t available = AvailableMemory();
  if (!options.only_nodes.empty()) available = std::min(available, AvailableOnNodes(options.only_nodes));
  if (available < keep_free || before > available - keep_free || wanted > available - keep_free - before) {
    return absl::ResourceExhaustedError(absl::StrCat(wanted, " bytes of memory are wanted, ", available,
                                                     " are available, ", before, " promised, ", keep_free,
                                                     " stay free"));
  }
  // Piece by piece, so that what has been taken is not counted as promised as well.
  constexpr uint64_t kPiece = uint64_t{64} << 20;
  for (uint64_t at = 0; at < bytes;) {
    const uint64_t piece = std::min(bytes - at, kPiece), taken_of_wanted = std::min(wanted, piece);
    if (absl::Status taken = TakePages(memfd, at, piece, options.advised); !taken.ok()) return taken;
    at += piece;
    wanted -= taken_of_wanted;
    promised -= taken_of_wanted;
  }
  return absl::OkStatus();
}

}  // namespace ashlar::storage
