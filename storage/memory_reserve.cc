#include "storage/memory_reserve.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <fstream>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "storage/numa.h"

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

// The process's group in the unified hierarchy: "/" or "/a/b".
std::optional<std::string> ReadCgroup(const std::string& path) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    absl::string_view group = line;
    if (absl::ConsumePrefix(&group, "0::/")) return absl::StrCat("/", group);
  }
  return std::nullopt;
}

// What one group leaves below its own limit. Files that it caches are given up before anyone is killed.
uint64_t LeftIn(const std::string& folder) {
  const std::optional<uint64_t> limit = ReadNumber(folder + "/memory.max");
  const std::optional<uint64_t> used = ReadNumber(folder + "/memory.current");
  if (!limit || !used) return UINT64_MAX;
  const uint64_t cached = ReadField(folder + "/memory.stat", "inactive_file").value_or(0) +
                          ReadField(folder + "/memory.stat", "active_file").value_or(0);
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
  std::optional<std::string> group = ReadCgroup(root + "/proc/self/cgroup");
  while (group) {
    available = std::min(available, LeftIn(absl::StrCat(root, "/sys/fs/cgroup", *group)));
    if (*group == "/") break;
    group->resize(std::max<size_t>(group->rfind('/'), 1));
  }
  return available;
}

absl::Status ReservePages(int memfd, uint64_t bytes, const ReserveOptions& options) {
  // Promised to calls that have not taken it yet, on whatever threads they run.
  static std::atomic<uint64_t> promised{0};
  const uint64_t before = promised.fetch_add(bytes);
  const absl::Cleanup forget = [&bytes] { promised -= bytes; };
  uint64_t available = AvailableMemory();
  if (!options.only_nodes.empty()) available = std::min(available, AvailableOnNodes(options.only_nodes));
  if (available < kKeptFree || before > available - kKeptFree || bytes > available - kKeptFree - before) {
    return absl::ResourceExhaustedError(absl::StrCat(bytes, " bytes of memory are wanted, ", available,
                                                     " are available, ", before, " promised, ", kKeptFree,
                                                     " stay free"));
  }
  // Piece by piece, so that what has been taken is not counted as promised as well.
  constexpr uint64_t kPiece = uint64_t{64} << 20;
  for (uint64_t at = 0; bytes > 0;) {
    const uint64_t piece = std::min(bytes, kPiece);
    if (absl::Status taken = TakePages(memfd, at, piece, options.advised); !taken.ok()) return taken;
    at += piece;
    bytes -= piece;
    promised -= piece;
  }
  return absl::OkStatus();
}

}  // namespace ashlar::storage
