// SPDX-License-Identifier: Apache-2.0
#include "storage/testing/simulated_disk.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/status/status.h"

namespace ashlar::storage {
namespace {

constexpr size_t kBlock = BlockFile::kBlockBytes;
constexpr size_t kSector = 512;

}  // namespace

void SimulatedDisk::Block::CopyTo(std::byte* target) const {
  if (bytes == nullptr) {
    std::memset(target, 0, kBlock);
  } else {
    std::memcpy(target, bytes->data() + offset, kBlock);
  }
}

SimulatedDisk::SimulatedDisk(uint64_t bytes, uint64_t seed)
    : bytes_(bytes / kBlock * kBlock), random_(seed), current_(bytes / kBlock), durable_(bytes / kBlock) {}

void SimulatedDisk::set_faults(const Faults& faults) {
  MutexLock lock(mutex_);
  faults_ = faults;
}

SimulatedDisk::Counts SimulatedDisk::counts() const {
  MutexLock lock(mutex_);
  return counts_;
}

void SimulatedDisk::CrashAfter(uint64_t points) {
  MutexLock lock(mutex_);
  crash_at_ = points_ + points;
}

void SimulatedDisk::Crash() {
  MutexLock lock(mutex_);
  if (!off_) PowerOff();
}

bool SimulatedDisk::crashed() const {
  MutexLock lock(mutex_);
  return off_;
}

uint64_t SimulatedDisk::points() const {
  MutexLock lock(mutex_);
  return points_;
}

void SimulatedDisk::Restart() {
  MutexLock lock(mutex_);
  if (!off_) PowerOff();
  off_ = false;
}

void SimulatedDisk::FlipBit(uint64_t offset, int bit) {
  MutexLock lock(mutex_);
  for (std::vector<Block>* image : {&current_, &durable_}) {
    Block& block = image->at(offset / kBlock);
    auto bytes = std::make_shared<std::vector<std::byte>>(kBlock);
    block.CopyTo(bytes->data());
    (*bytes)[offset % kBlock] ^= std::byte{1} << bit;
    block = {std::move(bytes), 0};
  }
}

bool SimulatedDisk::Chance(double probability) {
  // Always draws a number, so that a rate changes nothing but its own fault.
  return std::uniform_real_distribution<double>(0, 1)(random_) < probability;
}

absl::Status SimulatedDisk::CheckPower() const {
  return off_ ? absl::UnavailableError("simulated disk: power is off") : absl::OkStatus();
}

bool SimulatedDisk::FailsHere() {
  if (crash_at_ == points_++) PowerOff();
  return off_;
}

void SimulatedDisk::PowerOff() {
  off_ = true;
  crash_at_.reset();
  ++counts_.crashes;
  for (Unsynced& write : unsynced_) {
    switch (random_() % 4) {
      case 0:
        ++counts_.dropped_writes;
        break;
      case 1:
        ++counts_.kept_writes;
        for (size_t i = 0; i < write.blocks.size(); ++i) Keep(write, i);
        break;
      case 2:
        ++counts_.torn_writes;
        KeepSome(write, kBlock);
        break;
      default:
        ++counts_.torn_writes;
        KeepSome(write, kSector);
    }
  }
  unsynced_.clear();
  current_ = durable_;
}

void SimulatedDisk::Keep(Unsynced& write, size_t block) {
  if (!write.settled[block]) durable_[write.first + block] = write.blocks[block];
}

void SimulatedDisk::KeepSome(Unsynced& write, size_t sector) {
  for (size_t i = 0; i < write.blocks.size(); ++i) {
    if (write.settled[i]) continue;
    Block& durable = durable_[write.first + i];
    if (sector == kSector) {
      durable = Torn(durable, write.blocks[i]);
    } else if (random_() % 2 == 0) {
      durable = write.blocks[i];
    }
  }
}

SimulatedDisk::Block SimulatedDisk::Torn(const Block& before, const Block& after) {
  auto bytes = std::make_shared<std::vector<std::byte>>(kBlock);
  std::array<std::byte, kBlock> newer;
  before.CopyTo(bytes->data());
  after.CopyTo(newer.data());
  const uint64_t kept = random_();
  for (size_t sector = 0; sector < kBlock / kSector; ++sector) {
    if (kept >> sector & 1) std::memcpy(bytes->data() + sector * kSector, newer.data() + sector * kSector, kSector);
  }
  return {std::move(bytes), 0};
}

// Unresolved blocks of earlier writes under a durable write are settled: they never come back.
void SimulatedDisk::SettleUnder(const Unsynced& write) {
  for (Unsynced& older : unsynced_) {
    if (!older.unresolved) continue;
    const uint64_t first = std::max(older.first, write.first);
    const uint64_t end = std::min(older.first + older.blocks.size(), write.first + write.blocks.size());
    for (uint64_t block = first; block < end; ++block) older.settled[block - older.first] = true;
  }
}

uint64_t SimulatedDisk::File::size() const {
  return disk_.bytes_;
}

absl::Status SimulatedDisk::File::Read(uint64_t offset, std::span<std::byte> target) {
  MutexLock lock(disk_.mutex_);
  if (absl::Status status = disk_.CheckPower(); !status.ok()) return status;
  if (offset % kBlock != 0 || target.size() % kBlock != 0 || offset + target.size() > size()) {
    return absl::InvalidArgumentError("simulated disk: read: not whole blocks of the file");
  }
  ++disk_.counts_.reads;
  if (disk_.Chance(disk_.faults_.read_error)) {
    ++disk_.counts_.read_errors;
    std::fill(target.begin(), target.end(), std::byte{0xEE});
    return absl::DataLossError("simulated disk: read error");
  }
  for (size_t i = 0; i < target.size() / kBlock; ++i) {
    disk_.current_[offset / kBlock + i].CopyTo(target.data() + i * kBlock);
  }
  if (disk_.Chance(disk_.faults_.bit_flip)) {
    ++disk_.counts_.bit_flips;
    const uint64_t drawn = disk_.random_();
    target[(drawn >> 3) % target.size()] ^= std::byte{1} << (drawn & 7);
  }
  return absl::OkStatus();
}

absl::Status SimulatedDisk::File::Write(uint64_t offset, std::span<const std::byte> source) {
  MutexLock lock(disk_.mutex_);
  if (absl::Status status = disk_.CheckPower(); !status.ok()) return status;
  if (offset % kBlock != 0 || source.size() % kBlock != 0 || offset + source.size() > size()) {
    return absl::InvalidArgumentError("simulated disk: write: not whole blocks of the file");
  }
  if (disk_.FailsHere()) return disk_.CheckPower();
  ++disk_.counts_.writes;
  if (disk_.faults_.full) {
    ++disk_.counts_.refused_full;
    return absl::ResourceExhaustedError("simulated disk: full");
  }
  const std::optional<uint64_t>& bad = disk_.faults_.bad_at;
  const bool broken =
      disk_.Chance(disk_.faults_.write_error) || (bad.has_value() && *bad >= offset && *bad - offset < source.size());
  disk_.counts_.write_errors += broken;
  const bool no_space = disk_.Chance(disk_.faults_.no_space) && !broken;
  disk_.counts_.short_writes += no_space;
  const bool fails = broken || no_space;
  const auto bytes = std::make_shared<const std::vector<std::byte>>(source.begin(), source.end());
  Unsynced write{.first = offset / kBlock};
  for (size_t i = 0; i < source.size() / kBlock; ++i) {
    Block& current = disk_.current_[write.first + i];
    if (!fails || disk_.random_() % 2 == 0) current = {bytes, i * kBlock};
    write.blocks.push_back(current);
  }
  write.settled.resize(write.blocks.size());
  disk_.unsynced_.push_back(std::move(write));
  if (disk_.FailsHere()) return disk_.CheckPower();
  if (no_space) return absl::ResourceExhaustedError("simulated disk: no space for all of a write");
  return broken ? absl::UnavailableError("simulated disk: write error") : absl::OkStatus();
}

absl::Status SimulatedDisk::File::Sync() {
  MutexLock lock(disk_.mutex_);
  if (absl::Status status = disk_.CheckPower(); !status.ok()) return status;
  if (disk_.FailsHere()) return disk_.CheckPower();
  ++disk_.counts_.syncs;
  if (disk_.Chance(disk_.faults_.lost_flush)) {
    ++disk_.counts_.lost_flushes;
    return absl::OkStatus();
  }
  const bool fails = disk_.Chance(disk_.faults_.sync_error);
  disk_.counts_.sync_errors += fails;
  for (Unsynced& write : disk_.unsynced_) {
    if (write.unresolved) continue;
    if (fails) {
      write.unresolved = true;
      continue;
    }
    disk_.SettleUnder(write);
    for (size_t i = 0; i < write.blocks.size(); ++i) disk_.Keep(write, i);
  }
  std::erase_if(disk_.unsynced_, [](const Unsynced& write) { return !write.unresolved; });
  if (disk_.FailsHere()) return disk_.CheckPower();
  return fails ? absl::UnavailableError("simulated disk: sync error") : absl::OkStatus();
}

absl::Status SimulatedDisk::Records::Load(absl::FunctionRef<absl::Status(std::string_view, std::string_view)> visit) {
  std::map<std::string, std::string, std::less<>> table;
  {
    MutexLock lock(disk_.mutex_);
    if (absl::Status status = disk_.CheckPower(); !status.ok()) return status;
    table = disk_.table_;
  }
  for (const auto& [name, value] : table) {
    if (absl::Status status = visit(name, value); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status SimulatedDisk::Records::Write(std::span<const Change> batch) {
  MutexLock lock(disk_.mutex_);
  if (absl::Status status = disk_.CheckPower(); !status.ok()) return status;
  if (disk_.FailsHere()) return disk_.CheckPower();
  ++disk_.counts_.batches;
  if (disk_.faults_.full) {
    ++disk_.counts_.refused_full;
    return absl::ResourceExhaustedError("simulated disk: full");
  }
  const bool fails = disk_.Chance(disk_.faults_.record_error);
  disk_.counts_.batch_errors += fails;
  if (!fails || disk_.random_() % 2 == 0) {
    for (const Change& change : batch) {
      if (change.value.has_value()) {
        disk_.table_.insert_or_assign(change.name, *change.value);
      } else {
        disk_.table_.erase(change.name);
      }
    }
  }
  if (disk_.FailsHere()) return disk_.CheckPower();
  return fails ? absl::UnavailableError("simulated disk: records: write error") : absl::OkStatus();
}

}  // namespace ashlar::storage
