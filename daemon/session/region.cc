// SPDX-License-Identifier: Apache-2.0
#include "daemon/session/region.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>

#include <algorithm>
#include <cerrno>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "storage/memory/memory_reserve.h"

namespace ashlar::daemon {
namespace {

constexpr uint64_t kBlock = 512;  // the unit of st_blocks
constexpr uint64_t kPageOfFile = 4096;

uint64_t InWholePages(uint64_t bytes) {
  return (bytes + kPageOfFile - 1) / kPageOfFile * kPageOfFile;
}

// Frees all pages after the end of a memfd, which the engine could have allocated (FALLOC_FL_KEEP_SIZE) and which would
// never be freed.
absl::Status CutAfterEnd(int memfd) {
  constexpr auto kEnd = static_cast<uint64_t>(std::numeric_limits<off_t>::max());
  if ((fcntl(memfd, F_GET_SEALS) & F_SEAL_GROW) == 0 && fcntl(memfd, F_ADD_SEALS, F_SEAL_GROW) != 0) {
    return absl::InvalidArgumentError("register_region.descriptor: cannot be sealed with F_SEAL_GROW");
  }
  struct stat file;  // unchanged from now on
  const uint64_t end = fstat(memfd, &file) == 0 ? InWholePages(static_cast<uint64_t>(file.st_size)) : kEnd;
  if (end >= kEnd) return absl::InvalidArgumentError("register_region.descriptor: fstat failed");
  if (fallocate(memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(end),
                static_cast<off_t>(kEnd - end)) != 0) {
    return absl::InvalidArgumentError("register_region.descriptor: cannot free pages past the end");
  }
  return absl::OkStatus();
}

// In pieces of at least 4 MiB, at most 4,096 of them: other threads wait for each, with their page faults and mapping
// changes.
void Unmap(std::byte* data, uint64_t bytes) {
  constexpr uint64_t kLeast = uint64_t{4} << 20, kMost = 4096;
  const uint64_t piece = (bytes / kMost / kLeast + 1) * kLeast;
  for (uint64_t at = 0; at < bytes; at += piece) munmap(data + at, std::min(piece, bytes - at));
}

}  // namespace

absl::StatusOr<std::shared_ptr<Region>> Region::Map(int fd, uint64_t bytes) {
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) return absl::ErrnoToStatus(errno, "cannot map the region");
  return std::shared_ptr<Region>(new Region(static_cast<std::byte*>(mapped), bytes));
}

absl::StatusOr<std::shared_ptr<Region>> Region::Register(const UniqueFd& memfd, uint64_t bytes) {
  if (bytes == 0) return absl::InvalidArgumentError("register_region.bytes: 0; expected at least 1");
  const int seals = fcntl(memfd.get(), F_GET_SEALS);
  if (seals < 0) return absl::InvalidArgumentError("register_region.descriptor: expected a memfd");
  if ((seals & F_SEAL_SHRINK) == 0) {
    return absl::InvalidArgumentError("register_region.descriptor: must be sealed with F_SEAL_SHRINK");
  }
  struct statfs filesystem;
  struct stat file;
  if (fstatfs(memfd.get(), &filesystem) != 0 || fstat(memfd.get(), &file) != 0) {
    return absl::InvalidArgumentError("register_region.descriptor: fstat failed");
  }
  // Touching a punched hole of a file on huge pages raises SIGBUS when the pool of huge pages is empty.
  if (filesystem.f_type == HUGETLBFS_MAGIC) {
    return absl::InvalidArgumentError("register_region.descriptor: memory on reserved huge pages is not supported");
  }
  if (bytes > static_cast<uint64_t>(file.st_size)) {
    return absl::InvalidArgumentError(
        absl::StrCat("register_region.bytes: the memfd has only ", file.st_size, " bytes"));
  }
  absl::StatusOr<std::shared_ptr<Region>> region = Map(memfd.get(), bytes);
  if (region.ok()) {
    if (absl::Status cut = CutAfterEnd(memfd.get()); !cut.ok()) return cut;
    (*region)->memfd_ = std::make_shared<const UniqueFd>(fcntl(memfd.get(), F_DUPFD_CLOEXEC, 0));
    if ((*region)->memfd_->valid()) return region;
    return absl::ResourceExhaustedError(
        "register_region.descriptor: the daemon has no file descriptors left; raise its limit (LimitNOFILE)");
  }
  if (absl::IsPermissionDenied(region.status())) {
    return absl::InvalidArgumentError(
        "register_region.descriptor: cannot be mapped for writing; open it for reading and writing, without a write "
        "seal");
  }
  return absl::ResourceExhaustedError(absl::StrCat("register_region.bytes: ", region.status().message()));
}

Region::Extent Region::Measure() const {
  struct stat file;
  if (memfd_ == nullptr || fstat(memfd_->get(), &file) != 0) return {.file_bytes = size_};
  const auto bytes = static_cast<uint64_t>(file.st_size), there = static_cast<uint64_t>(file.st_blocks) * kBlock;
  const uint64_t whole = InWholePages(bytes);
  return {.file_bytes = bytes, .missing_bytes = std::min(bytes, whole - std::min(whole, there))};
}

absl::Status Region::TakePages(uint64_t keep_free) const {
  const auto [bytes, missing] = Measure();
  const absl::Status taken =
      storage::ReservePages(memfd_->get(), bytes, {.present_bytes = bytes - missing, .keep_free = keep_free});
  if (taken.ok()) return taken;
  return absl::ResourceExhaustedError(absl::StrCat("register_region.bytes: ", missing,
                                                   " bytes of the memfd are not allocated; allocate them in the engine "
                                                   "(write to them, or fallocate). The daemon cannot allocate them: ",
                                                   taken.message()));
}

absl::Status Region::CheckWhole(absl::string_view field) const {
  if (lost()) {
    return absl::InvalidArgumentError(absl::StrCat(
        field, ": pages of the region were freed while the daemon used them; drop the region and register it again"));
  }
  const uint64_t missing = Measure().missing_bytes;
  if (missing == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": ", missing,
                   " bytes of the region were freed after registration; drop the region and register it again"));
}

absl::StatusOr<std::shared_ptr<Region>> Region::Import(const kernels::Gpu& gpu, const UniqueFd& descriptor,
                                                       uint64_t bytes) {
  if (bytes == 0) return absl::InvalidArgumentError("register_region.bytes: 0; expected at least 1");
  kernels::ArenaError error;
  std::unique_ptr<kernels::ArenaMemory> arena = gpu.ImportArena(descriptor.get(), bytes, &error);
  if (arena != nullptr) return std::shared_ptr<Region>(new Region(gpu, std::move(arena)));
  if (error.out_of_memory) return absl::ResourceExhaustedError(absl::StrCat("register_region.bytes: ", error.message));
  return absl::InvalidArgumentError(absl::StrCat("register_region.descriptor: ", error.message));
}

std::shared_ptr<Region> Region::UnmapOn(EventLoop& loop, storage::TenantId tenant, std::shared_ptr<Region> region) {
  Region* const address = region.get();
  return {address, [&loop, tenant, region = std::move(region)](Region*) mutable {
            loop.PostCompletion(tenant, [last = std::move(region)]() mutable { last = nullptr; });
          }};
}

Region::~Region() {
  guarded_ = nullptr;
  if (arena_ == nullptr) Unmap(data_, size_);
  arena_ = nullptr;
  memfd_ = nullptr;
  kept_ = nullptr;
  if (gone_) gone_();
}

}  // namespace ashlar::daemon
