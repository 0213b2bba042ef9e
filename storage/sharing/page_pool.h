// SPDX-License-Identifier: Apache-2.0
// PagePool: the pages of one hosted region, allocated here, so that requests of its engine share segments in place
// (MEPIC §3.2).
//
// A request is admitted with all the pages that it needs, or refused at once with its shortage. A segment's pages are
// one copy for all requests that reference it; a request's own pages are its alone. Pages of running requests stay. A
// segment without references keeps its pages and its bytes until space is needed. Then such segments are reclaimed
// whole, least recently used first, and no more of them than are needed.
//
// A deterministic state machine of page numbers; it sees no memory. One thread, except for its destruction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "proto/key.h"
#include "proto/outcome.h"

namespace ashlar::storage {

using PageId = int32_t;

class PagePool {
 public:
  using AdmissionId = uint64_t;  // a request, from its admission to its end; ascending, never 0

  // Pages 0 … pages − 1, all free; at most limits::kMaxAllocatedPages. `charge` is kept as long as the pool is.
  explicit PagePool(uint32_t pages, std::shared_ptr<const void> charge = nullptr);
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  struct Want {
    Key key;
    uint32_t pages = 0;  // that are shared; the same for every Want of a key
  };

  // The pages that a request lacks. Every page is free, reclaimable or held.
  struct Shortage {
    uint64_t needed = 0;  // beyond those that stand there already for its segments
    uint64_t free = 0;
    uint64_t reclaimable = 0;  // of segments that nobody references, those it asks for not counted
    uint64_t held = 0;         // by running requests, or by the segments that it would share
  };
  struct Answer {
    AdmissionId admission = 0;  // 0: refused, nothing has changed
    Shortage shortage;          // where it was refused
  };
  // All of `segments` (the same one may be named more than once) and `own_pages` pages of its own, or nothing. Takes at
  // most `own_now` of its own at once: the rest by Extend, which finds them if no other request comes between.
  Answer Admit(std::span<const Want> segments, uint64_t own_pages, uint64_t own_now = UINT64_MAX);
  // The entries of its tables: admissions, and the segments that they name.
  uint64_t references() const { return references_; }
  // Heap that the table of so many pages takes.
  static uint64_t MemoryBytes(uint32_t pages) { return uint64_t{pages} * (sizeof(Page) + sizeof(PageId)); }

  // The first request that references a new segment fills it; later requests hold the same pages meanwhile. If the
  // first one ends without filling it, the duty passes to the oldest of the others, once nothing writes to the pages
  // any more: an ended request's landing may still write bytes that its checksums will refuse.
  struct Segment {
    PageContent content = PageContent::kFilled;
    std::span<const PageId> pages;
  };
  // The request's segments in the order in which it named them, and the pages of its own. Spans are valid until the
  // next call that is not const.
  std::vector<Segment> Segments(AdmissionId admission) const;
  std::span<const PageId> OwnPages(AdmissionId admission) const;

  // Brings the request's own pages to `own_pages` in all: those that it has stay, in their places. Fewer than it has
  // changes nothing. False: what it lacks is in `shortage`, and nothing has changed. Takes at most `most` at once,
  // where there are all: call it again for the rest.
  bool Extend(AdmissionId admission, uint64_t own_pages, Shortage& shortage, uint64_t most = UINT64_MAX);

  // The request has filled its segment number `segment`. False, and nothing changes: it was not its to fill. Saying so
  // again, of one that is filled, is harmless.
  bool Filled(AdmissionId admission, size_t segment);

  // The request is over. Pages that are being written stay out of use until Unpin.
  void End(AdmissionId admission);

  // Returns whether a page may be written now: it is a request's own, or it is to be filled.
  enum class Writable : uint8_t { kNo, kOwn, kToFill };
  Writable MayWrite(PageId page) const;
  // A pinned page is given to no other request, even after its own request has ended. Pins are counted; only pages that
  // may be written are pinned.
  void Pin(std::span<const PageId> pages);
  void Unpin(std::span<const PageId> pages);

  // Segments that nobody uses give up their pages; others are shared with no later request, and give them up when their
  // last one ends.
  void Erase();

  struct Levels {
    uint64_t pages = 0;
    uint64_t free = 0;
    uint64_t idle = 0;    // of segments that nobody uses
    uint64_t shared = 0;  // of segments that are referenced or being written, each counted once
    uint64_t own = 0;     // of requests, and those of ended ones that are pinned
    uint64_t admissions = 0;
    uint64_t segments = 0;            // that have pages
    uint64_t reclaimed_segments = 0;  // so far
    bool operator==(const Levels&) const = default;
  };
  Levels levels() const;
  bool InUse() const { return !admissions_.empty() || pinned_pages_ > 0; }

  // Another pool has taken this one's place: nothing more is to be admitted.
  void Close() { closed_ = true; }
  bool closed() const { return closed_; }

 private:
  struct Resident {  // a segment that has pages
    Key key;
    std::vector<PageId> pages;
    bool filled = false;
    std::set<AdmissionId> references;
    AdmissionId filler = 0;               // of them, while it is not filled; 0: an ended one still writes
    uint64_t pins = 0;                    // of its pages
    bool erased = false;                  // under a key that no engine names
    std::list<Resident*>::iterator idle;  // in idle_, while there is neither
  };
  struct Admission {
    std::vector<Resident*> segments;  // as named; null where no page is shared
    std::vector<PageId> own;
  };
  struct Page {
    Resident* segment = nullptr;
    bool own = false;  // of a request. Neither: free, or, while it is pinned, nobody's
    uint32_t pins = 0;
  };

  Shortage Lacking(std::span<const Want> segments, uint64_t own_pages) const;
  void Reclaim(uint64_t pages);
  PageId Take();
  void TakeOwn(uint64_t pages, std::vector<PageId>& own);
  void GiveBack(std::span<const PageId> pages);
  Resident& Reference(const Want& want, AdmissionId admission);
  void Unreference(Resident& segment, AdmissionId admission);
  void PassDuty(Resident& segment);
  void RestIfUnused(Resident& segment);
  void Drop(Resident& segment);

  const std::shared_ptr<const void> charge_;
  std::vector<Page> pages_;
  std::vector<PageId> free_;  // the last one goes first
  absl::flat_hash_map<Key, std::unique_ptr<Resident>> segments_;
  std::list<Resident*> idle_;  // least recently used first
  uint64_t idle_pages_ = 0, shared_pages_ = 0, pinned_pages_ = 0;
  uint64_t references_ = 0;  // entries of `segments` of all admissions, and the admissions
  uint64_t reclaimed_segments_ = 0;
  uint64_t erased_ = 0;  // segments that were in use, ever
  bool closed_ = false;
  AdmissionId next_ = 1;
  std::map<AdmissionId, Admission> admissions_;
};

}  // namespace ashlar::storage
