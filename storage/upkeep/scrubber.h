// SPDX-License-Identifier: Apache-2.0
// Scrubber: reads the copies of all objects, one after another, at a bounded rate, and verifies their checksums.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "proto/object.h"
#include "storage/executor.h"
#include "storage/objects/object_table.h"
#include "storage/tier/tiers.h"

namespace ashlar::storage {

// A copy that is not what was published, or that a disk cannot read, goes, and with the last one the object: a look-up
// misses it (kChecksumFailed, kTierError). The metadata thread owns it; bytes are read and hashed on executors.
//
// A copy that is being verified stays, like one that is on its way between tiers. So the rate is kept between copies:
// each is read as fast as it comes, and the next one waits until the rate allows for it.
class Scrubber {
 public:
  // All must outlive it, and it everything in flight. Memory is hashed on `copying`.
  Scrubber(ObjectTable& table, SsdTier* disk, Executor& copying, const Clock& clock);
  ~Scrubber();

  // The rate of passes that follow one another without end; 0: none. One that is under way goes on at it, or ends.
  void SetRate(uint64_t bytes_per_second) { rate_ = bytes_per_second; }
  uint64_t rate() const { return rate_; }
  // Begins a pass at once, in place of one that is under way, over the objects that are there now.
  void Start(uint64_t bytes_per_second);
  // Call it often: it begins what the rate allows.
  void Tick();

  struct Damage {
    TenantPool pool;
    NamespaceId ns;
    Key key;
    ObjectKind kind = ObjectKind::kSegment;
    TierKind tier = TierKind::kNone;
    uint64_t bytes = 0;
    MissReason reason = MissReason::kNone;  // kChecksumFailed; kTierError: it cannot be read
  };
  // By TierKind.
  using ByTier = std::array<uint64_t, 4>;
  struct Report {
    bool running = false, asked = false;  // asked: by Start
    uint64_t pass = 0;                    // its number
    Nanos began = 0, ended = 0;           // on the clock; 0: it has not
    ByTier copies{}, bytes{}, damaged{};
    uint64_t skipped = 0;         // in a GPU's memory, where nothing is verified
    std::deque<Damage> findings;  // the first ones
  };
  // Of the pass under way, or else of the last one.
  const Report& report() const { return report_; }
  // Of the last pass that was begun by Start and has ended.
  const Report& last_asked() const { return last_asked_; }
  struct Totals {
    ByTier bytes{}, damaged{};
    uint64_t passes = 0;  // that were ended
    Nanos last_ended = 0, last_took = 0;
  };
  const Totals& totals() const { return totals_; }

 private:
  static constexpr size_t kFindings = 64;

  class Check;  // of one copy
  void Begin(uint64_t bytes_per_second, bool asked);
  void End();
  bool Next();  // false: no copy is left
  void Verified(Check& check, MissReason found, const absl::Status& error = absl::OkStatus());

  ObjectTable& table_;
  SsdTier* const disk_;
  Executor& copying_;
  const Clock& clock_;
  uint64_t rate_ = 0;
  uint64_t pass_rate_ = 0;
  Report report_, last_asked_;
  Totals totals_;
  ObjectId last_ = 0, at_ = 0;  // of the pass; the object in turn
  size_t level_ = 0;            // its next copy
  double allowance_ = 0;        // bytes; below 0: the last copies were larger
  Nanos paid_at_ = 0;
  std::shared_ptr<Check> check_;
};

}  // namespace ashlar::storage
