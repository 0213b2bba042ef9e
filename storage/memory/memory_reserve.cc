// SPDX-License-Identifier: Apache-2.0
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
#include "storage/memory/control_groups.h"
#include "storage/memory/numa.h"

namespace ashlar::storage {
namespace {

// Returns the number after `name` in a file of lines "name number …".
std::optional<uint64_t> ReadField(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string word, rest; file >> word && std::getline(file, rest);) {
    uint64_t value = 0;
    if (word == name && absl::SimpleAtoi(rest.substr(0, rest.find('k')), &value)) return value;
  }
  return std::nullopt;
}

// Names of files and fields in the two versions of cgroups.
struct MemoryFiles {
  const char *limit, *used;
  const char *inactive_files, *active_files;  // fields of memory.stat: page cache of the group and its descendants
};
constexpr MemoryFiles kVersion2 = {"memory.max", "memory.current", "inactive_file", "active_file"};
constexpr MemoryFiles kVersion1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
                                   "total_active_file"};

// Returns the memory that is left in one group below its own limit. The kernel drops the group's page cache before it
// kills a process, so the cache counts as free.
uint64_t LeftIn(const ControlGroup& group) {
  const MemoryFiles& files = group.version == 2 ? kVersion2 : kVersion1;
  const std::optional<uint64_t> limit = ReadNumber(absl::StrCat(group.folder, "/", files.limit));
  const std::optional<uint64_t> used = ReadNumber(absl::StrCat(group.folder, "/", files.used));
  if (!limit || !used) return UINT64_MAX;
  const uint64_t cached = ReadField(group.folder + "/memory.stat", files.inactive_files).value_or(0) +
                          ReadField(group.folder + "/memory.stat", files.active_files).value_or(0);
  const uint64_t held = *used - std::min(cached, *used);
  return *limit - std::min(held, *limit);
}

absl::Status TakePages(int memfd, uint64_t offset, uint64_t bytes, void* advised) {
  // Advice takes effect only when pages are touched. Kernels before 5.14 cannot populate ahead and give small pages
  // below.
  if (advised != nullptr) madvise(static_cast<std::byte*>(advised) + offset, bytes, MADV_POPULATE_WRITE);
  while (fallocate(memfd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0) {
    if (errno == EINTR) continue;
    return absl::ResourceExhaustedError(absl::ErrnoToStatus(errno, "fallocate").message());
  }
  return absl::OkStatus();
}

}  // namespace

uint64_t AvailableMemory(const std::string& root) {
  uint64_t available = UINT64_MAX;
  if (const auto kilobytes = ReadField(root + "/proc/meminfo", "MemAvailable:")) available = *kilobytes * 1024;
  for (const ControlGroup& group : ControlGroups("memory", root)) available = std::min(available, LeftIn(group));
  return available;
}

absl::Status ReservePages(int memfd, uint64_t bytes, const ReserveOptions& options) {
  // Memory promised to calls on all threads that have not taken it yet.
  static std::atomic<uint64_t> promised{0};
  uint64_t wanted = bytes - std::min(options.present_bytes, bytes);
  const uint64_t before = promised.fetch_add(wanted), keep_free = std::max(options.keep_free, kKeptFree);
  const absl::Cleanup release = [&wanted] { promised -= wanted; };
  uint64_t available = AvailableMemory();
  if (!options.only_nodes.empty()) available = std::min(available, AvailableOnNodes(options.only_nodes));
  if (available < keep_free || before > available - keep_free || wanted > available - keep_free - before) {
    return absl::ResourceExhaustedError(absl::StrCat(wanted, " bytes of memory requested; ", available,
                                                     " bytes available, ", before, " reserved, ", keep_free,
                                                     " kept free; free memory"));
  }
  // Taken piece by piece, so that memory is not counted both as taken and as promised.
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

void MapPages(std::byte* data, uint64_t bytes) {
  constexpr uint64_t kPiece = uint64_t{2} << 20;
  for (uint64_t at = 0; at < bytes; at += kPiece) {
    madvise(data + at, std::min(kPiece, bytes - at), MADV_POPULATE_WRITE);
  }
}

}  // namespace ashlar::storage
