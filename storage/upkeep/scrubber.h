// SPDX-License-Identifier: Apache-2.0
// Scrubber: reads the copies of all objects one after another at a bounded rate, and verifies their checksums.
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

// A damaged or unreadable copy is dropped, and with the last copy the object: a lookup then misses it (kChecksumFailed,
// kTierError). Owned by the metadata thread; bytes are read and hashed on executors.
//
// A copy that is being verified stays, like one that is being copied between tiers. So the rate is kept between copies:
// each is read at full speed, and the next one waits until the rate permits it.
class Scrubber {
 public:
  // All must outlive it, and it must outlive everything in flight. Memory is hashed on `copying`.
  Scrubber(ObjectTable& table, SsdTier* disk, Executor& copying, const Clock& clock);
  ~Scrubber();

  // Sets the rate of continuous passes; 0: off. A running pass continues at the new rate, or ends.
  void SetRate(uint64_t bytes_per_second) { rate_ = bytes_per_second; }
  uint64_t rate() const { return rate_; }
  // Starts a pass over the current objects immediately, replacing a running one.
  void Start(uint64_t bytes_per_second);
  // Call it often: it starts what the rate permits.
  void Tick();

  struct Damage {
    TenantPool pool;
    NamespaceId ns;
    Key key;
    ObjectKind kind = ObjectKind::kSegment;
    TierKind tier = TierKind::kNone;
    uint64_t bytes = 0;
    MissReason reason = MissReason::kNone;  // kChecksumFailed, or kTierError if unreadable
  };
  // By TierKind.
  using ByTier = std::array<uint64_t, 4>;
  struct Report {
    bool running = false, asked = false;  // asked: started by Start
    uint64_t pass = 0;                    // its number
    Nanos began = 0, ended = 0;           // on the clock; 0: not yet
    ByTier copies{}, bytes{}, damaged{};
    uint64_t skipped = 0;         // copies in GPU memory, which are not verified
    std::deque<Damage> findings;  // the first ones
  };
  // The running pass, or else the last one.
  const Report& report() const { return report_; }
  // The last completed pass that Start started.
  const Report& last_asked() const { return last_asked_; }
  struct Totals {
    ByTier bytes{}, damaged{};
    uint64_t passes = 0;  // completed
    Nanos last_ended = 0, last_took = 0;
  };
  const Totals& totals() const { return totals_; }

 private:
  static constexpr size_t kFindings = 64;

  class Check;  // verifies one copy
  void Begin(uint64_t bytes_per_second, bool asked);
  void End();
  bool Next();  // returns false if no copy is left
  void Verified(Check& check, MissReason found, const absl::Status& error = absl::OkStatus());

  ObjectTable& table_;
  SsdTier* const disk_;
  Executor& copying_;
  const Clock& clock_;
  uint64_t rate_ = 0;
  uint64_t pass_rate_ = 0;
  Report report_, last_asked_;
  Totals totals_;
  ObjectId last_ = 0, at_ = 0;  // last object of the pass, and the current one
  size_t level_ = 0;            // its next copy
  double allowance_ = 0;        // bytes; negative after copies larger than the allowance
  Nanos paid_at_ = 0;
  std::shared_ptr<Check> check_;
};

}  // namespace ashlar::storage
