// SPDX-License-Identifier: Apache-2.0
#include "daemon/session/hosted_memory.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "daemon/session/region.h"
#include "storage/memory/memory_reserve.h"

namespace ashlar::daemon {
namespace {

constexpr uint64_t kMaxFileBytes = std::numeric_limits<off_t>::max();

// Opens another file description of the same memfd. The original one of memfd_create is not given out, because the
// kernel does not count it among the writers that a lease checks.
UniqueFd OpenAgain(const UniqueFd& memfd) {
  return UniqueFd(open(absl::StrCat("/proc/self/fd/", memfd.get()).c_str(), O_RDWR | O_CLOEXEC));
}

}  // namespace

HostedMemory::Use::~Use() {
  if (memory_ != nullptr) memory_->Leave(block_);
}

uint64_t HostedMemory::BlocksOf(storage::TenantId tenant) {
  MutexLock lock(mutex_);
  return static_cast<uint64_t>(std::ranges::count_if(
      blocks_, [&](const auto& entry) { return entry.second.tenant == tenant && !entry.second.adopted; }));
}

uint64_t HostedMemory::AbandonedBlocks(storage::TenantId tenant) {
  MutexLock lock(mutex_);
  return static_cast<uint64_t>(std::ranges::count_if(blocks_, [&](const auto& entry) {
    return entry.second.tenant == tenant && entry.second.adopted && entry.second.uses == 0;
  }));
}

absl::StatusOr<HostedMemory::Made> HostedMemory::Make(const Owner& owner, uint64_t bytes) {
  if (bytes == 0) return absl::InvalidArgumentError("0; expected at least 1");
  if (bytes > kMaxFileBytes)
    return absl::InvalidArgumentError(absl::StrCat("out of range; expected at most ", kMaxFileBytes));
  if (BlocksOf(owner.tenant) >= owner.max_blocks) {
    return absl::ResourceExhaustedError(absl::StrCat("a tenant has at most ", owner.max_blocks, " hosted regions"));
  }
  absl::StatusOr<Budget::Charge> charge = Budget::Take(owner.budget, ChargedFor(bytes));
  if (!charge.ok()) return charge.status();
  const UniqueFd made(memfd_create("ashlar-region", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!made.valid() || ftruncate(made.get(), static_cast<off_t>(bytes)) != 0 ||
      fcntl(made.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return absl::ErrnoToStatus(errno, "cannot create a memfd");
  }
  Block block{.memfd = std::make_shared<const UniqueFd>(OpenAgain(made)),
              .tenant = owner.tenant,
              .bytes = bytes,
              .uses = 1,
              .charge = *std::move(charge)};
  UniqueFd engines = OpenAgain(made);
  struct stat file;
  // The lease is held for an instant. If a process opens the file meanwhile, the signal must be a harmless one.
  if (!block.memfd->valid() || !engines.valid() || fstat(made.get(), &file) != 0 ||
      fcntl(block.memfd->get(), F_SETSIG, SIGURG) != 0) {
    return absl::ErrnoToStatus(errno, "cannot reopen the memfd");
  }
  block.device = file.st_dev;
  block.inode = file.st_ino;
  if (absl::Status reserved = storage::ReservePages(made.get(), bytes); !reserved.ok()) return reserved;
  MutexLock lock(mutex_);
  blocks_.emplace(next_, std::move(block));
  return Made{Use(*this, next_++, bytes), std::move(engines)};
}

absl::StatusOr<HostedMemory::Adopted> HostedMemory::Adopt(storage::TenantId tenant, const UniqueFd& memfd,
                                                          uint64_t bytes, Budget::Charge charge) {
  struct stat file;
  Block block{.memfd = std::make_shared<const UniqueFd>(OpenAgain(memfd)),
              .tenant = tenant,
              .bytes = bytes,
              .uses = 1,
              .adopted = true,
              .charge = std::move(charge)};
  // The lock belongs to the description that the engine has: it lasts as long as that is open or mapped.
  if (!block.memfd->valid() || fstat(memfd.get(), &file) != 0 || fcntl(block.memfd->get(), F_SETSIG, SIGURG) != 0 ||
      flock(memfd.get(), LOCK_SH | LOCK_NB) != 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("register_region.descriptor: cannot be reopened and locked: ", std::strerror(errno)));
  }
  block.device = file.st_dev;
  block.inode = file.st_ino;
  MutexLock lock(mutex_);
  Block* there = nullptr;
  if (std::unique_ptr<Use> use = FindLocked(tenant, file.st_dev, file.st_ino, &there)) {
    return Adopted{std::move(use), there->memfd};
  }
  std::shared_ptr<const UniqueFd> own = block.memfd;
  blocks_.emplace(next_, std::move(block));
  return Adopted{std::make_unique<Use>(*this, next_++, bytes, /*adopted=*/true), std::move(own)};
}

std::unique_ptr<HostedMemory::Use> HostedMemory::Find(storage::TenantId tenant, const UniqueFd& memfd) {
  struct stat file;
  if (fstat(memfd.get(), &file) != 0) return nullptr;
  MutexLock lock(mutex_);
  Block* there = nullptr;
  std::unique_ptr<Use> use = FindLocked(tenant, file.st_dev, file.st_ino, &there);
  // The engine may use another description: each registered one is a holder.
  if (use != nullptr && use->adopted()) flock(memfd.get(), LOCK_SH | LOCK_NB);
  return use;
}

std::unique_ptr<HostedMemory::Use> HostedMemory::FindLocked(storage::TenantId tenant, dev_t device, ino_t inode,
                                                            Block** found) {
  for (auto& [id, block] : blocks_) {
    if (block.inode != inode || block.device != device || block.tenant != tenant) continue;
    ++block.uses;
    *found = &block;
    return std::make_unique<Use>(*this, id, block.bytes, block.adopted);
  }
  return nullptr;
}

void HostedMemory::Leave(BlockId id) {
  MutexLock lock(mutex_);
  --blocks_.at(id).uses;
}

void HostedMemory::Drop(BlockId id) {
  decltype(blocks_)::node_type dropped;
  {
    MutexLock lock(mutex_);
    const auto found = blocks_.find(id);
    if (found != blocks_.end() && found->second.uses == 0) dropped = blocks_.extract(found);
  }
  if (dropped) GiveBack(std::move(dropped.mapped()));
}

void HostedMemory::Sweep() {
  std::vector<Block> abandoned;
  {
    MutexLock lock(mutex_);
    for (auto entry = blocks_.begin(); entry != blocks_.end();) {
      Block& block = entry->second;
      const bool held = block.uses > 0 || HeldByOthers(block);
      if (!held) abandoned.push_back(std::move(block));
      entry = held ? std::next(entry) : blocks_.erase(entry);
    }
  }
  for (Block& block : abandoned) GiveBack(std::move(block));
}

// A write lease is granted only if no other file description has the file open for writing. If the kernel refuses it
// for another reason, the block counts as held and stays charged. The original description of an engine's own memfd is
// not counted; that one is locked.
bool HostedMemory::HeldByOthers(const Block& block) {
  const int memfd = block.memfd->get();
  if (block.adopted) {
    if (flock(memfd, LOCK_EX | LOCK_NB) != 0) return true;
    flock(memfd, LOCK_UN);
  }
  if (fcntl(memfd, F_SETLEASE, F_WRLCK) != 0) return !block.adopted || errno != EACCES;  // another user's file
  fcntl(memfd, F_SETLEASE, F_UNLCK);
  return false;
}

// Always emptied: a read-only descriptor, opened from the engine's, would also keep the pages.
void HostedMemory::GiveBack(Block block) {
  fallocate(block.memfd->get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(block.bytes));
  block.memfd = nullptr;
  block.charge = nullptr;
}

}  // namespace ashlar::daemon
