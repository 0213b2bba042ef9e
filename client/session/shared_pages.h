// SPDX-License-Identifier: Apache-2.0
// In-place sharing (MEPIC §3.2; docs/decisions): requests of one engine reference segments in its KV pool instead of
// holding copies. It is for engines that take the pool's memory from the daemon (Client::HostRegion) and let the daemon
// allocate its page ids (PagedCache::allocate). Their attention reads keys in place (kernels::AttendUnrotated,
// AttendRotatedQuery).
//
// A request is admitted with all its pages: one copy of every segment, which all requests reference, and own pages for
// the tokens that it recomputes and decodes. A request that gets kToFill for a segment fills the segment's pages by
// computing or landing it (Model::Land with a page table of the segment's pages and first_position =
// placement.first_slot), and then calls Admission::ReportFilled. For filled segments it lands only the tuples
// (LandSegment::tuples_only), because these may still need promotion.
//
// The first blocks of an exact prefix are shared in the same way (Model::Admit). Whole blocks are at the same positions
// in every request. The rest of the prefix lands on own pages (LandSegment::present_blocks).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "client/session/connection.h"
#include "client/session/process_bound.h"
#include "client/session/reconnector.h"
#include "client/session/region_memory.h"
#include "proto/outcome.h"
#include "proto/page_placement.h"

namespace ashlar::v1 {
class Admission;
}

namespace ashlar {

// The pages that a refused request lacks. Every page is free, reclaimable or held.
struct PageShortage {
  uint64_t needed = 0;  // excludes pages of segments that are already shared
  uint64_t free = 0;
  uint64_t reclaimable = 0;  // pages of segments that no request references and this one does not need
  uint64_t held = 0;         // pages of running requests, or of segments that this request would share
};

enum class AdmitOutcome : uint8_t {
  kAdmitted = 1,
  kNoPages = 2,      // PageShortage has the numbers; nothing has changed
  kOldRequests = 3,  // requests from before a reconnect still use pages that the daemon does not know; end them
  kBusy = 4,         // a bounded queue is full, or the limit of running requests is reached
  kInvalid = 5,      // the pages are not declared, or declared without `allocate`
  kUnavailable = 6,  // no answer from the daemon in time; nothing is held
};

// A running request's pages. The request owns them until it is destroyed or Release is called, which tells the daemon
// in the background. A landing into them that is still in progress withholds them from use until it is quiesced. One
// thread at a time.
class Admission {
 public:
  Admission(Admission&&) noexcept = default;
  Admission& operator=(Admission&& other) noexcept {
    if (this == &other) return *this;
    std::destroy_at(this);  // members end in the reverse order
    return *std::construct_at(this, std::move(other));
  }
  ~Admission() = default;

  struct Segment {
    PageContent content = PageContent::kFilled;
    PagePlacement placement;     // the slots of its tokens
    std::vector<int32_t> pages;  // shared pages in order; empty if the segment has no interior or is unshared
  };
  // One entry per segment of the prompt, then one per block of its prefix.
  const std::vector<Segment>& segments() const { return segments_; }
  const std::vector<int32_t>& own_pages() const { return own_pages_; }
  uint32_t page_tokens() const { return page_tokens_; }

  // The page table of one segment, for slots counted from its first page: −1 for pages that are not shared.
  std::vector<int32_t> PageTable(size_t segment) const;

  // Raises the number of own pages to `own_pages`, or changes nothing. Existing pages stay in their places.
  AdmitOutcome Extend(uint32_t own_pages, PageShortage* shortage = nullptr);
  // Reports to the daemon that kToFill segments now have their keys and values; requests may read them only afterwards.
  // False: the daemon did not answer, or another request fills a segment. Other threads may call other methods
  // meanwhile, except Release.
  bool ReportFilled(std::span<const uint32_t> segments) const;
  // The segments are kFilled from now on. Call it after ReportFilled.
  void SetFilled(std::span<const uint32_t> segments);
  // Asks for the state of segments that other requests fill, for at most `timeout`. False: the daemon did not answer.
  // `to_fill`: replaces the indices of the segments that this request can fill; those of them that no other request
  // fills become kToFill. It must not write to other shared pages any longer.
  bool Refresh(std::chrono::milliseconds timeout = std::chrono::hours(1),
               std::optional<std::span<const uint32_t>> to_fill = std::nullopt);

  // False once the session that holds the lease has ended. The request may finish on its pages, which no other request
  // gets before it ends (kOldRequests), but it can neither get nor share more pages.
  bool valid() const;
  void Release();

 private:
  friend class Model;
  Admission() = default;
  // Updates it from the daemon's message.
  void Take(const v1::Admission& admission);
  template <typename Request>
  Request Ask() const;
  bool usable() const { return lease_ != nullptr && !creator_.InChild() && !connection_->ended(); }

  std::shared_ptr<internal::Reconnector> reconnector_;
  std::shared_ptr<internal::Connection> connection_;
  std::shared_ptr<internal::RegionMemory> region_;  // stays hosted as long as the request runs
  std::shared_ptr<const void> counted_;             // among the model's requests
  std::shared_ptr<internal::LeaseHold> lease_;      // null: released
  uint32_t page_tokens_ = 0;
  std::vector<Segment> segments_;
  std::vector<int32_t> own_pages_;
  internal::CreatorProcess creator_;
};

struct Admitted {
  AdmitOutcome outcome = AdmitOutcome::kUnavailable;
  std::optional<Admission> admission;  // when admitted
  PageShortage shortage;               // if there are too few pages
};

}  // namespace ashlar
