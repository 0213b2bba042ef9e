// SPDX-License-Identifier: Apache-2.0
// HostedMemory: memory that the daemon has made for engines, or has taken pages for, and its charge from then until it
// is given back.
//
// The charge must not end before the memory: an engine may keep the descriptor that it was given, or pass it on, and
// the pages live as long as any descriptor or mapping. And memory must not be emptied under an engine that has only
// lost its session: the engine keeps using it, and registers it with its next session. Hence the rule. A block is
// emptied, by punching a hole, and then its charge ends:
//   - when the engine drops it, and no region of another session lies in it;
//   - when no session has it any more, and nobody outside the daemon holds it. Death, in whatever PID namespace, is the
//     usual reason; the kernel is asked about the memory, not about a process.
// Until then the tenant is charged, whatever became of the session. A process that touches the memory after that
// allocates pages anew, as with a memfd of its own. The daemon's end empties nothing.
//
// The daemon adopts an engine's own memfd whose pages it has taken. Charge and emptying are the same, but for one
// thing: dropping the region empties nothing. The memory counts as held as long as the file description that was
// registered is open or mapped anywhere. A process that keeps the memory by a description of its own opening alone
// (from /proc) finds it empty.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/status/statusor.h"
#include "daemon/runtime/unique_fd.h"
#include "daemon/session/budget.h"
#include "storage/tier/tier.h"

namespace ashlar::daemon {

// Thread-safe but for Make and for its destruction, before which all uses must be gone.
class HostedMemory {
 public:
  using BlockId = uint64_t;  // never 0, never used twice

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
    // The engine's descriptor. As long as it, a copy or a mapping of it is open, somebody holds the block.
    UniqueFd memfd;
  };
  // Each block keeps a descriptor open in the daemon. So a tenant has no more of them than so many for every session
  // that it may have.
  static constexpr uint64_t kBlocksPerSession = 4;
  struct Owner {
    storage::TenantId tenant = 0;
    std::shared_ptr<Budget> budget;  // the budget that is charged
    uint64_t max_blocks = 0;
  };
  // Makes a memfd of `bytes`, sealed against shrinking and growing, with all its pages. RESOURCE_EXHAUSTED where the
  // owner has no more room, or the machine no more memory. Many gigabytes take seconds. One thread at a time.
  absl::StatusOr<Made> Make(const Owner& owner, uint64_t bytes);

  // Keeps `charge` for an engine's memfd of `bytes`, all of whose pages are there, as long as anybody holds it.
  // RESOURCE_EXHAUSTED where the daemon has no descriptor left.
  struct Adopted {
    std::unique_ptr<Use> use;
    std::shared_ptr<const UniqueFd> memfd;  // the block's own, for the region to use as well
  };
  absl::StatusOr<Adopted> Adopt(storage::TenantId tenant, const UniqueFd& memfd, uint64_t bytes, Budget::Charge charge);
  // Adopted blocks of a tenant that no session has any more: each keeps a descriptor open, as a region does.
  uint64_t Forsaken(storage::TenantId tenant);

  // The block behind an engine's descriptor, for one more session of the same tenant; null for any other file.
  std::unique_ptr<Use> Find(storage::TenantId tenant, const UniqueFd& memfd);

  // The engine that had this block needs it no more. If no other session has it, it is emptied before this returns.
  void Drop(BlockId block);
  // Draws a name for memory that is not kept here: a GPU's, whose other holders cannot be asked for.
  BlockId NewName();

  // Gives back what no session has and nobody holds. Call it every now and then.
  void Sweep();

 private:
  struct Block {
    // Of a file description of its own: what others hold can then be told from it.
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
  std::unique_ptr<Use> FindLocked(storage::TenantId tenant, dev_t device, ino_t inode, Block** found);
  void Leave(BlockId block);
  static bool HeldByOthers(const Block& block);
  static void GiveBack(Block block);

  std::mutex mutex_;
  BlockId next_ = 1;                 // guarded by mutex_
  std::map<BlockId, Block> blocks_;  // guarded by mutex_
};

}  // namespace ashlar::daemon
