// SPDX-License-Identifier: Apache-2.0
// The pages of one request whose cache shares segments in place (Memory::share_in_place), and the filling of the
// segments that fall to this request.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ashlar/engine.h"
#include "client/engine/cache_state.h"
#include "client/session/shared_pages.h"
#include "kernels/mutex.h"
#include "proto/outcome.h"

namespace ashlar::engine {

// Thread-safe, except that Extend and pages() must be called on the request's thread. Filling continues in the
// background after the request has ended, because other requests may wait for it; the pages are held until then.
class InPlacePages : public std::enable_shared_from_this<InPlacePages> {
 public:
  explicit InPlacePages(Admission admission);

  // Raises the number of own pages to `own_pages`.
  Status Extend(uint32_t own_pages, PageShortage* shortage);
  const AdmittedPages& pages() const { return pages_; }

  enum class State : uint8_t {
    kFilled = 1,   // whether all segments can be read in place
    kFilling = 2,  // this or another request fills some of the segments
    kFailed = 3,   // a segment failed to land, or the session has ended
  };
  // Returns the state of `segments`, which `match` has found. Starts landing the segments that this request fills. If
  // other requests fill some, asks the daemon about them, for at most `timeout`.
  State Fill(CacheState& cache, const ashlar::Match& match, std::span<const uint32_t> segments,
             std::chrono::milliseconds timeout);
  // kNone: the segment can be read in place. Otherwise the reason: its landing's, or kTimedOut.
  MissReason WhyNotFilled(uint32_t segment) const;
  // Waits until a landing of this request ends, or for `timeout`.
  void WaitForChange(std::chrono::milliseconds timeout);

 private:
  // The landing of a segment by this request.
  struct Filling {
    bool under_way = false;
    MissReason failed = MissReason::kNone;
  };
  void TakeOwnPages() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Land(CacheState& cache, const ashlar::Match& match, std::span<const uint32_t> segments)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Landed(std::span<const uint32_t> segments, std::vector<Landing>& landings, std::chrono::milliseconds timeout);

  mutable Mutex mutex_;
  CondVar changed_;
  Admission admission_ ABSL_GUARDED_BY(mutex_);
  std::vector<Filling> filling_ ABSL_GUARDED_BY(mutex_);  // one entry per segment
  // The index of the first segment with the same pages, because a segment may occur twice in a prompt.
  std::vector<uint32_t> first_;

  std::vector<std::vector<int32_t>> tables_;
  std::vector<SharedSegment> segments_;
  std::vector<int32_t> own_pages_;
  AdmittedPages pages_;
};

// Admits a request for `prompt`. kOk: `out` has its pages.
Status AdmitInPlace(CacheState& cache, const ashlar::Prompt& prompt, uint32_t own_pages, PageShortage* shortage,
                    std::shared_ptr<InPlacePages>* out);

}  // namespace ashlar::engine
