#include "daemon/region.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>

#include <cerrno>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ashlar::daemon {
absl::StatusOr<std::shared_ptr<Region>> Region::Map(int fd, uint64_t bytes) {
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) return absl::ErrnoToStatus(errno, "cannot map the region");
  return std::shared_ptr<Region>(new Region(static_cast<std::byte*>(mapped), bytes));
}

absl::StatusOr<std::shared_ptr<Region>> Region::Register(const UniqueFd& memfd, uint64_t bytes) {
  if (bytes == 0) return absl::InvalidArgumentError("register_region.bytes: zero");
  const int seals = fcntl(memfd.get(), F_GET_SEALS);
  if (seals < 0) return absl::InvalidArgumentError("register_region.descriptor: not a memfd");
  if ((seals & F_SEAL_SHRINK) == 0) {
    return absl::InvalidArgumentError("register_region.descriptor: not sealed with F_SEAL_SHRINK");
  }
  struct statfs filesystem;
  struct stat file;
  if (fstatfs(memfd.get(), &filesystem) != 0 || fstat(memfd.get(), &file) != 0) {
    return absl::InvalidArgumentError("register_region.descriptor: cannot be examined");
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
  if (!region.ok() && absl::IsPermissionDenied(region.status())) {
    return absl::InvalidArgumentError("register_region.descriptor: cannot be mapped for writing");
  }
  return region;
}

absl::StatusOr<std::shared_ptr<Region>> Region::Import(const kernels::Gpu& gpu, const UniqueFd& descriptor,
                                                       uint64_t bytes) {
  if (bytes == 0) return absl::InvalidArgumentError("register_region.bytes: zero");
  kernels::ArenaError error;
  std::unique_ptr<kernels::ArenaMemory> arena = gpu.ImportArena(descriptor.get(), bytes, &error);
  if (arena != nullptr) return std::shared_ptr<Region>(new Region(std::move(arena)));
  if (error.out_of_memory) return absl::ResourceExhaustedError(absl::StrCat("register_region.bytes: ", error.message));
  return absl::InvalidArgumentError(absl::StrCat("register_region.descriptor: ", error.message));
}

absl::StatusOr<Region::OnGpu> Region::Make(const kernels::Gpu& gpu, uint64_t bytes) {
  if (bytes == 0) return absl::InvalidArgumentError("zero");
  kernels::ArenaError error;
  std::unique_ptr<kernels::ArenaMemory> arena = gpu.MakeArena(bytes, &error);
  if (arena == nullptr) return absl::ResourceExhaustedError(error.message);
  UniqueFd descriptor(fcntl(arena->descriptor(), F_DUPFD_CLOEXEC, 0));
  if (!descriptor.valid()) return absl::ErrnoToStatus(errno, "cannot pass the region");
  return OnGpu{std::shared_ptr<Region>(new Region(std::move(arena))), std::move(descriptor)};
}

std::shared_ptr<Region> Region::UnmapOn(EventLoop& loop, storage::TenantId tenant, std::shared_ptr<Region> region) {
  Region* const address = region.get();
  return {address, [&loop, tenant, region = std::move(region)](Region*) mutable {
            loop.PostCompletion(tenant, [last = std::move(region)]() mutable { last = nullptr; });
          }};
}

Region::~Region() {
  if (arena_ == nullptr) munmap(data_, size_);
  arena_ = nullptr;
  kept_ = nullptr;
  if (gone_) gone_();
}

}  // namespace ashlar::daemon
