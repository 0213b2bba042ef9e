// SPDX-License-Identifier: Apache-2.0
// The pages of one request whose cache shares segments and prefixes in place (Memory::share_in_place), and the filling
// of the parts that fall to this request.
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
//
// Its parts are numbered as in Admission::segments(): the prompt's segments, then the blocks of the prefix.
class InPlacePages : public std::enable_shared_from_this<InPlacePages> {
 public:
  // `blocks`: number of the admission's parts that are blocks.
  InPlacePages(Admission admission, uint32_t blocks);

  // Raises the number of own pages to `own_pages`.
  Status Extend(uint32_t own_pages, PageShortage* shortage);
  const AdmittedPages& pages() const { return pages_; }
  uint32_t blocks() const { return static_cast<uint32_t>(segments_.size()) - pages_.segment_count; }
  // The page table of the prefix: the shared pages of its first `blocks` blocks, then the own pages.
  std::vector<int32_t> PrefixTable(uint32_t blocks) const;

  enum class State : uint8_t {
    kFilled = 1,   // all parts can be read in place
    kFilling = 2,  // this or another request fills some of the parts
    kFailed = 3,   // a part failed to land, or the session has ended
  };
  // Returns the state of `parts`, which `match` has found; blocks are last and ascend. Starts landing the parts that
  // this request fills. If other requests fill some, asks the daemon about them, for at most `timeout`.
  State Fill(CacheState& cache, const ashlar::Match& match, std::span<const uint32_t> parts,
             std::chrono::milliseconds timeout);
  // kNone: the part can be read in place. Otherwise the reason: its landing's, or kTimedOut.
  MissReason WhyNotFilled(uint32_t part) const;
  // Waits until a landing of this request ends, or for `timeout`.
  void WaitForChange(std::chrono::milliseconds timeout);

 private:
  // The landing of a part by this request.
  struct Filling {
    bool under_way = false;
    MissReason failed = MissReason::kNone;
  };
  // One landing, of one segment or of consecutive blocks.
  struct PartsLanding {
    std::vector<uint32_t> parts;
    Landing landing;
  };
  void TakeOwnPages() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Land(CacheState& cache, const ashlar::Match& match, std::span<const uint32_t> parts)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Landed(PartsLanding& landed, std::chrono::milliseconds timeout);

  mutable Mutex mutex_;
  CondVar changed_;
  Admission admission_ ABSL_GUARDED_BY(mutex_);
  std::vector<Filling> filling_ ABSL_GUARDED_BY(mutex_);  // one entry per part
  // The index of the first part with the same pages, because a segment may occur twice in a prompt.
  std::vector<uint32_t> first_;

  std::vector<std::vector<int32_t>> tables_;  // one entry per part
  std::vector<SharedSegment> segments_;       // one entry per part
  std::vector<int32_t> prefix_;               // shared pages of the prefix, from position 0
  std::vector<int32_t> own_pages_;
  AdmittedPages pages_;
};

// Admits a request for `prompt` that shares its segments except `unshared`, and the first `blocks` blocks of its
// prefix. kOk: `out` has its pages.
Status AdmitInPlace(CacheState& cache, const ashlar::Prompt& prompt, uint32_t own_pages, uint32_t blocks,
                    std::span<const uint32_t> unshared, PageShortage* shortage, std::shared_ptr<InPlacePages>* out);

}  // namespace ashlar::engine
