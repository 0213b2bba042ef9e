// SPDX-License-Identifier: Apache-2.0
#include "daemon/session/region_guard.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "daemon/runtime/log.h"
#include "daemon/runtime/named_thread.h"

namespace ashlar::daemon {
namespace {

constexpr uint64_t kPageBytes = 4096;
constexpr int kEmptyEveryMs = 100;

uffdio_range RangeOf(std::byte* data, uint64_t bytes) {
  return {.start = reinterpret_cast<uintptr_t>(data), .len = bytes};
}

}  // namespace

std::shared_ptr<RegionGuard> RegionGuard::Make() {
  // Only faults in user mode, which need no privilege.
  UniqueFd faults(static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY)));
  UniqueFd stop(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  uffdio_api api{};
  api.api = UFFD_API;
  api.features = UFFD_FEATURE_MISSING_SHMEM;
  if (!faults.valid() || !stop.valid() || ioctl(faults.get(), UFFDIO_API, &api) != 0) {
    Log(LogLevel::kWarning, "userfaultfd is not permitted: region pages freed by an engine are detected late",
        {{"error", std::string(std::strerror(errno))}});
    return nullptr;
  }
  return std::shared_ptr<RegionGuard>(new RegionGuard(std::move(faults), std::move(stop)));
}

RegionGuard::RegionGuard(UniqueFd faults, UniqueFd stop)
    : faults_(std::move(faults)), stop_(std::move(stop)), thread_(NamedThread("region-guard", [this] { Run(); })) {}

RegionGuard::~RegionGuard() {
  eventfd_write(stop_.get(), 1);
  thread_.join();
}

std::unique_ptr<RegionGuard::Guarded> RegionGuard::Guard(std::byte* data, uint64_t bytes) {
  const uint64_t whole = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  std::unique_ptr<Guarded> guarded(new Guarded(shared_from_this(), data, whole));
  {
    MutexLock lock(mutex_);
    guarded_.emplace(data, guarded.get());
  }
  uffdio_register asked{};
  asked.range = RangeOf(data, whole);
  asked.mode = UFFDIO_REGISTER_MODE_MISSING;
  if (ioctl(faults_.get(), UFFDIO_REGISTER, &asked) != 0) return nullptr;
  return guarded;
}

RegionGuard::Guarded::~Guarded() {
  MutexLock lock(guard_->mutex_);
  guard_->guarded_.erase(data_);
}

void RegionGuard::Run() {
  for (int timeout = -1;;) {
    pollfd watched[] = {{faults_.get(), POLLIN, 0}, {stop_.get(), POLLIN, 0}};
    if (poll(watched, std::size(watched), timeout) < 0 && errno != EINTR) return;
    if (watched[1].revents != 0) return;
    Answer();
    timeout = EmptyReplaced() ? kEmptyEveryMs : -1;
  }
}

void RegionGuard::Answer() {
  uffd_msg message;
  while (read(faults_.get(), &message, sizeof message) == static_cast<ssize_t>(sizeof message)) {
    if (message.event != UFFD_EVENT_PAGEFAULT) continue;
    const auto address = static_cast<uintptr_t>(message.arg.pagefault.address) / kPageBytes * kPageBytes;
    ReplaceLost(reinterpret_cast<std::byte*>(address));
  }
}

void RegionGuard::ReplaceLost(std::byte* page) {
  MutexLock lock(mutex_);
  const auto next = guarded_.upper_bound(page);
  Guarded* const region = next == guarded_.begin() ? nullptr : std::prev(next)->second;
  if (region == nullptr || page >= region->data_ + region->bytes_) return;  // the faulting threads have ended
  if (!region->lost_.exchange(true)) {
    region->replaced_ = mmap(region->data_, region->bytes_, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED;
  }
  // If that much memory cannot even be reserved, each call in flight gets only the pages that it touches.
  uffdio_zeropage zero{};
  zero.range = RangeOf(page, kPageBytes);
  if (!region->replaced_ && ioctl(faults_.get(), UFFDIO_ZEROPAGE, &zero) == 0) return;
  uffdio_range all = RangeOf(region->data_, region->bytes_);
  ioctl(faults_.get(), UFFDIO_WAKE, &all);
}

bool RegionGuard::EmptyReplaced() {
  MutexLock lock(mutex_);
  bool any = false;
  for (const auto& [data, region] : guarded_) {
    if (!region->replaced_) continue;
    any = true;
    madvise(data, region->bytes_, MADV_DONTNEED);
  }
  return any;
}

}  // namespace ashlar::daemon
