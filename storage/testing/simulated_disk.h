// SPDX-License-Identifier: Apache-2.0
// SimulatedDisk: a disk that fails as disks do, and in the same way again for the same seed.
//
// The fault model:
// - Power may fail before or after any write, sync or batch of records takes effect (CrashAfter, Crash). Then every
//   call fails until Restart.
// - A write since the last successful sync survives a power failure whole, not at all, or torn: each of its sectors,
//   of 4 KiB or of 512 bytes, on its own. Writes survive independently of each other, hence in any order.
// - A call may fail (rates in `faults`). A read that fails leaves rubbish in its target. A write that fails has written
//   some of its sectors. A sync that fails has made some of what it covered durable; reads still return all of it, but
//   no later sync makes the rest durable. A batch of records that fails was made, or was not.
// - A full disk refuses writes and batches, and changes nothing. One that runs full while it writes has written some
//   sectors.
// - Bits flip: once in what a read returns (`faults`), or permanently (FlipBit).
// - A sync may lie: OK, though nothing became durable (`lost_flush`). No promise covers that: it is there to show that
//   tests would see it.
// - A batch of records that succeeded is atomic and durable. RocksDB's own recovery is not simulated.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "kernels/mutex.h"
#include "storage/tier/block_file.h"
#include "storage/tier/record_store.h"

namespace ashlar::storage {

class SimulatedDisk {
 public:
  // Probabilities per call.
  struct Faults {
    double read_error = 0;
    double write_error = 0;
    double sync_error = 0;
    double record_error = 0;
    double no_space = 0;  // a write ends in the middle, as if the file system had space for a part of it
    double bit_flip = 0;  // one block of the bytes that a read returns has a wrong bit
    double lost_flush = 0;
    bool full = false;
    std::optional<uint64_t> bad_at;  // offset: each write of this place fails
  };
  // Counts of the events so far.
  struct Counts {
    uint64_t reads = 0, writes = 0, syncs = 0, batches = 0;
    uint64_t read_errors = 0, write_errors = 0, sync_errors = 0, batch_errors = 0;
    uint64_t bit_flips = 0, lost_flushes = 0, refused_full = 0, short_writes = 0;
    uint64_t crashes = 0, dropped_writes = 0, torn_writes = 0, kept_writes = 0;  // unsynced when power failed
  };

  // `bytes` is a multiple of BlockFile::kBlockBytes.
  SimulatedDisk(uint64_t bytes, uint64_t seed);

  // Both live as long as the disk, and refer to it after every crash. Thread-safe.
  BlockFile& file() { return file_; }
  RecordStore& records() { return records_; }

  void set_faults(const Faults& faults);
  Counts counts() const;

  // Power fails at the `points`-th point from now, counted from 0: there are two in every write, sync and batch.
  void CrashAfter(uint64_t points);
  void Crash();  // now
  bool crashed() const;
  uint64_t points() const;  // passed so far
  // Power returns: only what survived is left.
  void Restart();

  void FlipBit(uint64_t offset, int bit);

 private:
  class File final : public BlockFile {
   public:
    explicit File(SimulatedDisk& disk) : disk_(disk) {}
    uint64_t size() const override;
    absl::Status Read(uint64_t offset, std::span<std::byte> target) override;
    absl::Status Write(uint64_t offset, std::span<const std::byte> source) override;
    absl::Status Sync() override;

   private:
    SimulatedDisk& disk_;
  };
  class Records final : public RecordStore {
   public:
    explicit Records(SimulatedDisk& disk) : disk_(disk) {}
    absl::Status Load(absl::FunctionRef<absl::Status(std::string_view, std::string_view)> visit) override;
    absl::Status Write(std::span<const Change> batch) override;

   private:
    SimulatedDisk& disk_;
  };

  // Contents of a block: a place in the bytes of its write. None: zeros.
  struct Block {
    std::shared_ptr<const std::vector<std::byte>> bytes;
    size_t offset = 0;
    void CopyTo(std::byte* target) const;
  };
  struct Unsynced {
    uint64_t first = 0;  // block
    std::vector<Block> blocks;
    std::vector<bool> settled;  // indexed by block: true if a later write to it is durable
    bool unresolved = false;    // a sync of it failed: no later one covers it
  };

  bool Chance(double probability) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckPower() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool FailsHere() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // passes one point
  void PowerOff() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Keep(Unsynced& write, size_t block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void KeepSome(Unsynced& write, size_t sector) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Block Torn(const Block& before, const Block& after) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SettleUnder(const Unsynced& write) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  File file_{*this};
  Records records_{*this};

  const uint64_t bytes_;
  mutable Mutex mutex_;
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_);
  Faults faults_ ABSL_GUARDED_BY(mutex_);
  Counts counts_ ABSL_GUARDED_BY(mutex_);
  uint64_t points_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<uint64_t> crash_at_ ABSL_GUARDED_BY(mutex_);
  bool off_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Block> current_ ABSL_GUARDED_BY(mutex_);      // the bytes that reads return
  std::vector<Block> durable_ ABSL_GUARDED_BY(mutex_);      // the bytes after a crash, apart from unsynced_
  std::vector<Unsynced> unsynced_ ABSL_GUARDED_BY(mutex_);  // ordered as written
  std::map<std::string, std::string, std::less<>> table_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ashlar::storage
