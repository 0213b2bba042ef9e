// SPDX-License-Identifier: Apache-2.0
#include "storage/upkeep/scrubber.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "kernels/checksum.h"
#include "kernels/rows.h"
#include "proto/limits.h"
#include "storage/tier/block_file.h"

namespace ashlar::storage {
namespace {

using limits::kExtentBytes;

constexpr uint64_t kDiskPiece = 4, kMemoryPiece = 64;  // extents read and hashed at a time
constexpr double kSecond = 1e9;
constexpr double kMostSaved = 0.25;  // saved seconds of the rate, so that a pause causes no burst

struct AlignedExtents {
  explicit AlignedExtents(uint64_t extents)
      : bytes(
            static_cast<std::byte*>(::operator new (extents* kExtentBytes, std::align_val_t{BlockFile::kBlockBytes}))) {
  }
  ~AlignedExtents() { ::operator delete (bytes, std::align_val_t{BlockFile::kBlockBytes}); }
  AlignedExtents(const AlignedExtents&) = delete;
  AlignedExtents& operator=(const AlignedExtents&) = delete;
  std::byte* const bytes;
};

// Verifies an object's bytes extent by extent: no unit spans two extents.
class Hashing {
 public:
  explicit Hashing(const ObjectHeader& header) : header_(header), start_(EncodeHeader(header)) {}

  // Returns false if the bytes differ from those published.
  bool Extent(uint64_t extent, const std::byte* bytes) {
    const uint64_t begin = extent * kExtentBytes;
    if (begin < start_.size()) {
      const size_t size = std::min<size_t>(start_.size() - begin, kExtentBytes);
      if (std::memcmp(bytes, start_.data() + begin, size) != 0) return false;
    }
    while (part_ < header_.parts.size()) {
      const Part& part = header_.parts[part_];
      if (part.Empty() || unit_ == part.units) {
        if (!part.Empty() && kernels::CombineChecksums(sums_) != part.checksum) return false;
        sums_.clear();
        unit_ = 0;
        ++part_;
        continue;
      }
      const uint64_t offset = part.UnitOffset(unit_);
      if (offset >= begin + kExtentBytes) return true;
      sums_.push_back(kernels::UnitChecksum(bytes + (offset - begin), part.UnitBytes(unit_)));
      ++unit_;
    }
    return true;
  }

 private:
  const ObjectHeader& header_;
  const std::string start_;
  size_t part_ = 0;
  uint32_t unit_ = 0;
  std::vector<uint64_t> sums_;  // checksums of the current part
};

}  // namespace

// Alternates between reads and hashes, a piece at a time, until the copy's end or the first fault.
class Scrubber::Check : public std::enable_shared_from_this<Check> {
 public:
  Entry& entry;  // held by this check
  const size_t level;

  Check(Scrubber& scrubber, Entry& held, size_t at)
      : entry(held),
        level(at),
        scrubber_(scrubber),
        disk_(scrubber.table_.levels().IsDisk(at)),
        extents_(held.header.Extents()),
        hashing_(held.header) {
    if (disk_) buffer_.emplace(std::min(kDiskPiece, extents_));
  }

  // Starts the next piece. If it is not busy afterwards, an executor was full: call it again.
  void Go() {
    busy_ = true;  // set first, because an executor may run immediately
    if (!Begun()) busy_ = false;
  }
  bool busy() const { return busy_; }

 private:
  bool Begun() {
    const Slot& slot = entry.copies[level].slot;
    const uint64_t count = std::min(disk_ ? kDiskPiece : kMemoryPiece, extents_ - next_);
    std::vector<std::byte*> places;
    for (uint64_t i = 0; disk_ && i < count; ++i) places.push_back(buffer_->bytes + i * kExtentBytes);
    if (disk_ && !read_) {
      return scrubber_.disk_->Read(slot, next_, places, [self = shared_from_this()](const absl::Status& status) {
        self->busy_ = false;
        if (!status.ok()) return self->scrubber_.Verified(*self, MissReason::kTierError, status);
        self->read_ = true;
        self->Go();
      });
    }
    if (!disk_) {
      const Tier& tier = scrubber_.table_.levels().TierAt(level);
      uint64_t skip = next_;
      for (const ExtentRun& run : slot.runs) {
        for (uint64_t i = std::min<uint64_t>(skip, run.count); i < run.count && places.size() < count; ++i) {
          places.push_back(tier.Address(run.arena, run.first + static_cast<uint32_t>(i)));
        }
        skip -= std::min<uint64_t>(skip, run.count);
      }
    }
    const auto same = std::make_shared<bool>(true);
    return scrubber_.copying_.Run(
        entry.pool.tenant,
        [self = shared_from_this(), places, same, first = next_] {
          for (size_t i = 0; i < places.size() && *same; ++i) *same = self->hashing_.Extent(first + i, places[i]);
        },
        [self = shared_from_this(), same, count] {
          self->busy_ = self->read_ = false;
          self->next_ += count;
          if (!*same) return self->scrubber_.Verified(*self, MissReason::kChecksumFailed);
          if (self->next_ == self->extents_) return self->scrubber_.Verified(*self, MissReason::kNone);
          self->Go();
        });
  }

  Scrubber& scrubber_;
  const bool disk_;
  const uint64_t extents_;
  Hashing hashing_;
  std::optional<AlignedExtents> buffer_;  // for a piece of the disk
  uint64_t next_ = 0;
  bool read_ = false;  // the buffer has the piece that starts at next_
  bool busy_ = false;
};

Scrubber::Scrubber(ObjectTable& table, SsdTier* disk, Executor& copying, const Clock& clock)
    : table_(table), disk_(disk), copying_(copying), clock_(clock) {}

Scrubber::~Scrubber() = default;

void Scrubber::Begin(uint64_t bytes_per_second, bool asked) {
  report_ = {.running = true, .asked = asked, .pass = report_.pass + 1, .began = clock_.Now()};
  pass_rate_ = bytes_per_second;
  last_ = table_.index().newest();
  at_ = 0;
  level_ = table_.levels().size();
  allowance_ = 0;
  paid_at_ = clock_.Now();
}

void Scrubber::Start(uint64_t bytes_per_second) {
  Begin(bytes_per_second, true);
}

void Scrubber::End() {
  report_.running = false;
  report_.ended = clock_.Now();
  if (report_.asked) last_asked_ = report_;
  ++totals_.passes;
  totals_.last_ended = report_.ended;
  totals_.last_took = report_.ended - report_.began;
}

void Scrubber::Tick() {
  if (check_ != nullptr) {
    if (!check_->busy()) check_->Go();
    return;
  }
  const bool empty = table_.objects() == 0;
  if (!report_.running && rate_ > 0 && !empty) Begin(rate_, false);
  if (!report_.running) return;
  if (!report_.asked) pass_rate_ = rate_;
  if (pass_rate_ == 0) return End();
  const Nanos now = clock_.Now();
  const auto rate = static_cast<double>(pass_rate_);
  allowance_ = std::min(allowance_ + static_cast<double>(now - paid_at_) / kSecond * rate, kMostSaved * rate);
  paid_at_ = now;
  if (allowance_ < 0) return;
  if (!Next()) End();
}

// Holds the next copy and starts its check. Skips only a few objects without a verifiable copy per call.
bool Scrubber::Next() {
  constexpr size_t kPassed = 256;
  Slice few(kPassed);
  while (true) {
    for (; level_ < table_.levels().size(); ++level_) {
      Entry* const entry = table_.index().Live(at_);
      if (entry == nullptr) break;
      if (!table_.placement().copies().Hold(*entry, level_)) {
        report_.skipped += entry->copies[level_].whole() ? 1 : 0;
        continue;
      }
      check_ = std::make_shared<Check>(*this, *entry, level_++);
      const std::shared_ptr<Check> started = check_;  // an executor that runs immediately may have ended it
      started->Go();
      return true;
    }
    bool found = false;
    const bool ended = table_.index().Walk(at_, last_, few, [&](Entry&) { return !(found = true); });
    if (!found) return !ended;
    level_ = 0;
  }
}

void Scrubber::Verified(Check& check, MissReason found, const absl::Status& error) {
  const std::shared_ptr<Check> ends = std::exchange(check_, nullptr);
  Placement& placement = table_.placement();
  Entry& entry = check.entry;
  const auto tier = static_cast<size_t>(table_.levels().kind(check.level));
  const uint64_t bytes = entry.header.bytes;
  allowance_ -= static_cast<double>(bytes);
  ++report_.copies.at(tier);
  report_.bytes.at(tier) += bytes;
  totals_.bytes.at(tier) += bytes;
  const Damage damage = {.pool = entry.pool,
                         .ns = entry.header.ns,
                         .key = entry.header.key,
                         .kind = entry.header.kind,
                         .tier = table_.levels().kind(check.level),
                         .bytes = bytes,
                         .reason = found};
  const ObjectId id = entry.id;
  const size_t level = check.level;
  if (!error.ok()) placement.Unreadable(damage.pool.tenant, level, error);
  placement.copies().Unhold(entry, level);
  if (found == MissReason::kNone) return;
  ++report_.damaged.at(tier);
  ++totals_.damaged.at(tier);
  if (report_.findings.size() < kFindings) report_.findings.push_back(damage);
  if (Entry* const left = table_.index().Live(id)) placement.copies().Damaged(*left, level, found);
}

}  // namespace ashlar::storage
