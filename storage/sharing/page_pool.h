// SPDX-License-Identifier: Apache-2.0
// PagePool: allocates the pages of one hosted region, so that requests of its engine share segments in place (MEPIC
// §3.2).
//
// A request is admitted with all the pages it needs, or refused immediately with its shortage. All requests that
// reference a segment share one copy of its pages; a request's own pages are exclusive. Pages of running requests stay.
// A segment without references keeps its pages and bytes until space is needed. Then such segments are reclaimed as a
// whole, least recently used first, and only as many as needed.
//
// A deterministic state machine of page numbers, without access to memory. One thread only, except for its destruction.
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
  using AdmissionId = uint64_t;  // a request from admission to end; ascending, never 0

  // Pages 0 … pages − 1, all free; at most limits::kMaxAllocatedPages. `charge` is kept as long as the pool.
  explicit PagePool(uint32_t pages, std::shared_ptr<const void> charge = nullptr);
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  struct Want {
    Key key;
    uint32_t pages = 0;  // shared pages; the same for every Want of a key
  };

  // The pages that a request lacks. Every page is free, reclaimable or held.
  struct Shortage {
    uint64_t needed = 0;  // pages beyond those that its segments already have
    uint64_t free = 0;
    uint64_t reclaimable = 0;  // pages of segments without references, except the requested ones
    uint64_t held = 0;         // pages of running requests, or of the segments that it would share
  };
  struct Answer {
    AdmissionId admission = 0;  // 0: refused without a change
    Shortage shortage;          // set if refused
  };
  // Grants all of `segments` (repetitions allowed) and `own_pages` own pages, or nothing. Allocates at most `own_now`
  // own pages immediately; the rest by Extend, which succeeds if no other request comes between. `fills`: whether the
  // request can fill its segments now; otherwise it calls SetFills.
  Answer Admit(std::span<const Want> segments, uint64_t own_pages, uint64_t own_now = UINT64_MAX, bool fills = true);
  // Number of table entries: admissions and the segments they list.
  uint64_t references() const { return references_; }
  // Heap bytes of the table for that many pages.
  static uint64_t MemoryBytes(uint32_t pages) { return uint64_t{pages} * (sizeof(Page) + sizeof(PageId)); }

  // The first request that can fill a new segment fills it; other requests hold the same pages meanwhile. If that
  // request ends early, the oldest of the other requests that can fill the segment must do so, once nothing writes to
  // the pages: the landing of an ended request may still write bytes that its checksums will reject.
  struct Segment {
    PageContent content = PageContent::kFilled;
    std::span<const PageId> pages;
  };
  // Returns the request's segments in the order of the request, and its own pages. Spans are valid until the next
  // non-const call.
  std::vector<Segment> Segments(AdmissionId admission) const;
  std::span<const PageId> OwnPages(AdmissionId admission) const;

  // Extends the request's own pages to `own_pages` in total; existing pages keep their places, and fewer than existing
  // has no effect. Returns false without a change if pages are missing; `shortage` says how many. Allocates at most
  // `most` at once if all are available; call again for the rest.
  bool Extend(AdmissionId admission, uint64_t own_pages, Shortage& shortage, uint64_t most = UINT64_MAX);

  // Replaces the segments that the request can fill, by index. It must no longer write to the pages of the others.
  void SetFills(AdmissionId admission, std::span<const uint32_t> segments);

  // The request has filled its segment `segment`. Returns false without a change if the request was not its filler.
  // Repeating it for a filled segment has no effect.
  bool Filled(AdmissionId admission, size_t segment);

  // The request ends. Pages that are being written stay unavailable until Unpin.
  void End(AdmissionId admission);

  // Returns whether a page may be written now: it belongs to one request, or waits to be filled.
  enum class Writable : uint8_t { kNo, kOwn, kToFill };
  Writable MayWrite(PageId page) const;
  // Returns whether requests for `key` find `page` as their page `index`.
  bool Holds(const Key& key, size_t index, PageId page) const;
  // A pinned page is given to no other request, even after its own request has ended. Pins are counted; only writable
  // pages are pinned.
  void Pin(std::span<const PageId> pages);
  void Unpin(std::span<const PageId> pages);

  // Frees the pages of unused segments. Segments in use are not shared with later requests, and are freed when their
  // last request ends.
  void Erase();

  struct Levels {
    uint64_t pages = 0;
    uint64_t free = 0;
    uint64_t idle = 0;    // pages of unused segments
    uint64_t shared = 0;  // pages of segments that are referenced or being written, each counted once
    uint64_t own = 0;     // own pages of requests, including pinned ones of ended requests
    uint64_t admissions = 0;
    uint64_t segments = 0;            // segments with pages
    uint64_t reclaimed_segments = 0;  // reclaimed so far
    bool operator==(const Levels&) const = default;
  };
  Levels levels() const;
  bool InUse() const { return !admissions_.empty() || pinned_pages_ > 0; }

  // Another pool has replaced this one: no further admissions.
  void Close() { closed_ = true; }
  bool closed() const { return closed_; }

 private:
  struct Resident {  // a segment with pages
    Key key;
    std::vector<PageId> pages;
    bool filled = false;
    std::set<AdmissionId> references;
    std::set<AdmissionId> fillers;        // while not filled: the references that can fill it
    AdmissionId filler = 0;               // while not filled; 0: none can, or an ended request still writes
    uint64_t pins = 0;                    // number of pins of its pages
    bool erased = false;                  // its key is no longer found
    std::list<Resident*>::iterator idle;  // place in idle_ while there are no references or pins
  };
  struct Admission {
    std::vector<Resident*> segments;  // ordered as in the request; null for segments without shared pages
    std::vector<PageId> own;
  };
  struct Page {
    Resident* segment = nullptr;
    bool own = false;  // belongs to a request; if neither own nor shared: free, or pinned without an owner
    uint32_t pins = 0;
  };

  Shortage Lacking(std::span<const Want> segments, uint64_t own_pages) const;
  void Reclaim(uint64_t pages);
  PageId Take();
  void TakeOwn(uint64_t pages, std::vector<PageId>& own);
  void GiveBack(std::span<const PageId> pages);
  Resident& Reference(const Want& want, AdmissionId admission, bool fills);
  void Unreference(Resident& segment, AdmissionId admission);
  void PassDuty(Resident& segment);
  void RestIfUnused(Resident& segment);
  void Drop(Resident& segment);

  const std::shared_ptr<const void> charge_;
  std::vector<Page> pages_;
  std::vector<PageId> free_;  // the last one is allocated first
  absl::flat_hash_map<Key, std::unique_ptr<Resident>> segments_;
  std::list<Resident*> idle_;  // least recently used first
  uint64_t idle_pages_ = 0, shared_pages_ = 0, pinned_pages_ = 0;
  uint64_t references_ = 0;  // entries of `segments` of all admissions, plus the admissions
  uint64_t reclaimed_segments_ = 0;
  uint64_t erased_ = 0;  // segments erased while in use, so far
  bool closed_ = false;
  AdmissionId next_ = 1;
  std::map<AdmissionId, Admission> admissions_;
};

}  // namespace ashlar::storage
