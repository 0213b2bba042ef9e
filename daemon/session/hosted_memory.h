// SPDX-License-Identifier: Apache-2.0
// HostedMemory: memory that the daemon created for engines, or allocated the pages of, and its charge until it is
// freed.
//
// The charge must not end before the memory. An engine may keep or pass on its descriptor, and the pages live as long
// as any descriptor or mapping. The memory also must not be emptied under an engine that has only lost its session,
// because the engine keeps using it and registers it with its next session. Therefore a block is emptied, by punching a
// hole, and its charge ends:
// - when the engine drops it and no other session has a region in it;
// - when no session has it, and no process outside the daemon holds it. Usually that process has exited, in whatever
//   PID namespace; the kernel is asked about the memory, not about a process.
// Until then the tenant is charged, even after the session has ended. A process that touches the memory afterwards
// allocates new pages, as with its own memfd. Stopping the daemon empties nothing.
//
// The daemon adopts an engine's own memfd if it allocated pages of it. Charging and emptying are the same, except that
// dropping the region empties nothing. Such memory counts as held while the registered file description is open or
// mapped anywhere. A process that keeps the memory only through a separate open (from /proc) finds it empty.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "daemon/runtime/unique_fd.h"
#include "daemon/session/budget.h"
#include "kernels/mutex.h"
#include "storage/tier/tier.h"

namespace ashlar::daemon {

// Thread-safe, except Make and the destructor. All uses must be gone before destruction.
class HostedMemory {
 public:
  using BlockId = uint64_t;  // never 0, never reused

  // A session's use of a block. Movable.
  class Use {
   public:
    Use(HostedMemory& memory, BlockId block, uint64_t bytes, bool adopted = false)
        : memory_(&memory), block_(block), bytes_(bytes), adopted_(adopted) {}
    Use(Use&& other) noexcept
        : memory_(std::exchange(other.memory_, nullptr)),
          block_(other.block_),
          bytes_(other.bytes_),
          adopted_(other.adopted_) {}
    Use& operator=(Use&&) = delete;
    ~Use();

    BlockId block() const { return block_; }
    uint64_t bytes() const { return bytes_; }
    bool adopted() const { return adopted_; }

   private:
    HostedMemory* memory_;
    BlockId block_;
    uint64_t bytes_;
    bool adopted_;
  };

  struct Made {
    Use use;
    // The engine's descriptor. The block is held while it, a copy, or a mapping of it is open.
    UniqueFd memfd;
  };
  // Most blocks of a tenant for every session that it may have. Each block keeps a descriptor open in the daemon.
  static constexpr uint64_t kBlocksPerSession = 4;
  struct Owner {
    storage::TenantId tenant = 0;
    std::shared_ptr<Budget> budget;  // the budget to charge
    uint64_t max_blocks = 0;
  };
  // Creates a memfd of `bytes` with all its pages, sealed against shrinking and growing. RESOURCE_EXHAUSTED if the
  // owner's budget or the machine's memory is used up. Takes seconds for many gigabytes. One thread at a time.
  absl::StatusOr<Made> Make(const Owner& owner, uint64_t bytes);

  // Keeps `charge` for an engine's memfd of `bytes` with all pages allocated, while a process holds it.
  // RESOURCE_EXHAUSTED if the daemon has no descriptors left.
  struct Adopted {
    std::unique_ptr<Use> use;
    std::shared_ptr<const UniqueFd> memfd;  // the block's own descriptor, which the region uses too
  };
  absl::StatusOr<Adopted> Adopt(storage::TenantId tenant, const UniqueFd& memfd, uint64_t bytes, Budget::Charge charge);
  // Number of a tenant's adopted blocks without a session. Each keeps a descriptor open, like a region.
  uint64_t AbandonedBlocks(storage::TenantId tenant);

  // Returns the block of an engine's descriptor, for another session of the same tenant; null for any other file.
  std::unique_ptr<Use> Find(storage::TenantId tenant, const UniqueFd& memfd);

  // The engine no longer needs this block. If no other session has it, it is emptied before this returns.
  void Drop(BlockId block);

  // Frees blocks without a session or holder. Call it periodically.
  void Sweep();

 private:
  struct Block {
    // A separate file description, so that other holders can be detected.
    std::shared_ptr<const UniqueFd> memfd;
    dev_t device = 0;
    ino_t inode = 0;
    storage::TenantId tenant = 0;
    uint64_t bytes = 0;
    int uses = 0;
    bool adopted = false;
    Budget::Charge charge;
  };
  uint64_t BlocksOf(storage::TenantId tenant);
  std::unique_ptr<Use> FindLocked(storage::TenantId tenant, dev_t device, ino_t inode, Block** found)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Leave(BlockId block);
  static bool HeldByOthers(const Block& block);
  static void GiveBack(Block block);

  Mutex mutex_;
  BlockId next_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<BlockId, Block> blocks_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ashlar::daemon
