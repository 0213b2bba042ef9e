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
  // `blocks`: number of the admission's parts that are blocks. `fills_later`: as in Model::Admit.
  InPlacePages(Admission admission, uint32_t blocks, bool fills_later);

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
  // The request no longer reads parts other than `parts`. Lets other requests fill those; asks the daemon for at most
  // `timeout`.
  void FillOnly(std::span<const uint32_t> parts, std::chrono::milliseconds timeout);
  // kNone: the part can be read in place. Otherwise the reason: its landing's, or kTimedOut.
  MissReason WhyNotFilled(uint32_t part) const;
  // Waits until a landing of this request ends, or for `timeout`.
  void WaitForChange(std::chrono::milliseconds timeout);

 private:
  // The landing of a part by this request.
  struct Filling {
    bool wanted = true;      // false: this request does not fill the part, unless a landing is under way
    bool under_way = false;  // it may write to the part's pages
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
  // The landings of `parts` can write no more. Lets other requests fill those that failed.
  void Quiesced(std::span<const uint32_t> parts);
  void SetWanted(uint32_t part, bool wanted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Asks the daemon for the state of the parts. Reports which parts this request fills, if that has changed.
  bool Refresh(std::chrono::milliseconds timeout) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  CondVar changed_;
  Admission admission_ ABSL_GUARDED_BY(mutex_);
  std::vector<Filling> filling_ ABSL_GUARDED_BY(mutex_);  // one entry per part
  bool reported_ ABSL_GUARDED_BY(mutex_) = true;          // the daemon knows which parts this request fills
  // The index of the first part with the same pages, because a segment may occur twice in a prompt.
  std::vector<uint32_t> first_;

  std::vector<std::vector<int32_t>> tables_;  // one entry per part
  std::vector<SharedSegment> segments_;       // one entry per part
  std::vector<int32_t> prefix_;               // shared pages of the prefix, from position 0
  std::vector<int32_t> own_pages_;
  AdmittedPages pages_;
};

// The parts of a prompt that a request shares.
struct Sharing {
  uint32_t blocks = 0;             // number of the prefix's first blocks
  std::vector<uint32_t> unshared;  // segments that are not shared
  bool fills_later = false;        // the request fills no part before it calls InPlacePages::Fill
};

// Admits a request for `prompt`. kOk: `out` has its pages.
Status AdmitInPlace(CacheState& cache, const ashlar::Prompt& prompt, uint32_t own_pages, const Sharing& sharing,
                    PageShortage* shortage, std::shared_ptr<InPlacePages>* out);

}  // namespace ashlar::engine
