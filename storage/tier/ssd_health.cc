// SPDX-License-Identifier: Apache-2.0
#include "storage/tier/ssd_health.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/limits.h"
#include "storage/tier/ssd_format.h"

namespace ashlar::storage {
namespace {

// A probe writes to the block after the slab's header, and deletes a record that never exists.
constexpr uint64_t kProbeOffset = BlockFile::kBlockBytes;
constexpr std::string_view kProbeName = "probe";
static_assert(kSlabHeaderBytes <= kProbeOffset && kProbeOffset + BlockFile::kBlockBytes <= limits::kExtentBytes);

constexpr Nanos kSecond = 1'000'000'000;
constexpr Nanos kFirstProbe = kSecond, kSlowestProbe = 5 * kSecond;
constexpr Nanos kLateTick = 2 * kSecond;
constexpr Nanos kWell = 60 * kSecond;  // after this long without errors, the next probe is immediate

}  // namespace

SsdHealth::SsdHealth(const Executor& io, DiskQueue& disk, CommitQueue& commits, std::function<void()> recovered)
    : io_(io), disk_(disk), commits_(commits), recovered_(std::move(recovered)), patience_(kFirstProbe) {}

void SsdHealth::Opened(BlockFile& file) {
  file_ = &file;
  status_ = absl::OkStatus();
  well_since_ = now_;
}

void SsdHealth::Failed(const absl::Status& status) {
  if (degraded()) return;
  status_ = status;
  next_probe_ = now_ + patience_;
  commits_.HoldDeletions(true);
}

// No probe can succeed while the disk stalls; one is due immediately after it answers. If this Tick is late, the
// process may have been stopped (SIGSTOP, a paused machine), so the next Tick judges.
void SsdHealth::CheckStall(Nanos since_last_tick) {
  stood_still_ = since_last_tick > kLateTick && !stood_still_ && !stalled_;
  if (stood_still_) return;
  const bool before = std::exchange(stalled_, file_ != nullptr && io_.LongestRun() >= kDeadline);
  if (stalled_ && !before) {
    const absl::Status why = absl::UnavailableError(
        absl::StrCat("the disk hangs; an operation has not returned for ", kDeadline / kSecond, " s"));
    Failed(why);
    status_ = why;
  } else if (before && !stalled_) {
    next_probe_ = now_;
  }
}

void SsdHealth::Tick(Nanos now) {
  CheckStall(now - std::exchange(now_, now));
  if (!degraded() && now - well_since_ >= kWell) patience_ = kFirstProbe;
  if (now >= next_probe_) Probe([] {});
}

bool SsdHealth::Probe(std::function<void()> done) {
  if (!degraded() || probing_ || file_ == nullptr) return false;
  probing_ = true;
  const uint64_t failed_syncs = commits_.failed_syncs();
  disk_.RunNext(
      [this](size_t) {
        alignas(BlockFile::kBlockBytes) static constexpr std::array<std::byte, BlockFile::kBlockBytes> kZeros{};
        return file_->Write(kProbeOffset, kZeros);
      },
      [this, failed_syncs, done = std::move(done)](const absl::Status& written) {
        if (!written.ok()) {
          Probed(written);
          return done();
        }
        commits_.Put(std::string(kProbeName), std::nullopt, failed_syncs, [this, done](CommitQueue::Outcome outcome) {
          Probed(outcome.status);
          done();
        });
      });
  return true;
}

void SsdHealth::Probed(const absl::Status& status) {
  probing_ = false;
  patience_ = std::min(2 * patience_, kSlowestProbe);
  next_probe_ = now_ + patience_;
  // ABORTED follows another failure that is already known. While an operation hangs, the success of others means
  // nothing.
  if (!absl::IsAborted(status) && !stalled_) status_ = status;
  if (degraded()) return;
  well_since_ = now_;
  commits_.HoldDeletions(false);
  recovered_();
}

}  // namespace ashlar::storage
