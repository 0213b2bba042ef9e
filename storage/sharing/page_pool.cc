// SPDX-License-Identifier: Apache-2.0
#include "storage/sharing/page_pool.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"

namespace ashlar::storage {

PagePool::PagePool(uint32_t pages, std::shared_ptr<const void> charge)
    : charge_(std::move(charge)), pages_(pages), free_(pages) {
  std::iota(free_.rbegin(), free_.rend(), 0);
}

PagePool::Shortage PagePool::Lacking(std::span<const Want> segments, uint64_t own_pages) const {
  Shortage lacking{.needed = own_pages, .free = free_.size(), .reclaimable = idle_pages_};
  absl::flat_hash_set<Key> seen;
  for (const Want& want : segments) {
    if (!seen.insert(want.key).second) continue;
    const auto found = segments_.find(want.key);
    if (found == segments_.end()) {
      lacking.needed += want.pages;
    } else if (found->second->references.empty() && found->second->pins == 0) {
      lacking.reclaimable -= want.pages;
    }
  }
  lacking.held = pages_.size() - lacking.free - lacking.reclaimable;
  return lacking;
}

PagePool::Answer PagePool::Admit(std::span<const Want> segments, uint64_t own_pages, uint64_t own_now, bool fills) {
  const Shortage lacking = Lacking(segments, own_pages);
  if (lacking.needed > lacking.free + lacking.reclaimable) return {.shortage = lacking};
  const AdmissionId id = next_++;
  Admission& admission = admissions_[id];
  references_ += segments.size() + 1;
  // Resident segments are referenced before pages are reclaimed.
  for (const Want& want : segments) {
    const bool resident = want.pages > 0 && segments_.contains(want.key);
    admission.segments.push_back(resident ? &Reference(want, id, fills) : nullptr);
  }
  const uint64_t now = std::min(own_pages, own_now);
  Reclaim(lacking.needed - (own_pages - now));
  for (size_t i = 0; i < segments.size(); ++i) {
    if (segments[i].pages > 0 && admission.segments[i] == nullptr)
      admission.segments[i] = &Reference(segments[i], id, fills);
  }
  admission.own.reserve(own_pages);
  TakeOwn(now, admission.own);
  return {.admission = id};
}

// Reclaims until this number of pages is free. At least that many must be idle.
void PagePool::Reclaim(uint64_t pages) {
  while (free_.size() < pages) {
    Resident& oldest = *idle_.front();
    idle_.pop_front();
    idle_pages_ -= oldest.pages.size();
    ++reclaimed_segments_;
    Drop(oldest);
  }
}

PageId PagePool::Take() {
  const PageId page = free_.back();
  free_.pop_back();
  return page;
}

void PagePool::TakeOwn(uint64_t pages, std::vector<PageId>& own) {
  while (own.size() < pages) {
    own.push_back(Take());
    pages_[own.back()].own = true;
  }
}

void PagePool::GiveBack(std::span<const PageId> pages) {
  for (size_t i = pages.size(); i-- > 0;) {
    Page& page = pages_[pages[i]];
    page.own = false;
    page.segment = nullptr;
    if (page.pins == 0) free_.push_back(pages[i]);
  }
}

PagePool::Resident& PagePool::Reference(const Want& want, AdmissionId admission, bool fills) {
  std::unique_ptr<Resident>& segment = segments_[want.key];
  if (segment == nullptr) {
    segment = std::make_unique<Resident>(Resident{.key = want.key});
    for (uint32_t i = 0; i < want.pages; ++i) {
      segment->pages.push_back(Take());
      pages_[segment->pages.back()].segment = segment.get();
    }
    shared_pages_ += want.pages;
  } else if (segment->references.empty() && segment->pins == 0) {
    idle_.erase(segment->idle);
    idle_pages_ -= segment->pages.size();
    shared_pages_ += segment->pages.size();
  }
  assert(segment->pages.size() == want.pages);
  segment->references.insert(admission);
  if (fills && !segment->filled) segment->fillers.insert(admission);
  PassDuty(*segment);
  return *segment;
}

void PagePool::Unreference(Resident& segment, AdmissionId admission) {
  segment.references.erase(admission);
  segment.fillers.erase(admission);
  if (segment.filled) return RestIfUnused(segment);
  if (segment.references.empty()) {
    shared_pages_ -= segment.pages.size();
    return Drop(segment);
  }
  if (segment.filler == admission) segment.filler = 0;
  PassDuty(segment);
}

void PagePool::PassDuty(Resident& segment) {
  if (segment.filler == 0 && segment.pins == 0 && !segment.fillers.empty()) segment.filler = *segment.fillers.begin();
}

void PagePool::SetFills(AdmissionId admission, std::span<const uint32_t> segments) {
  const std::vector<Resident*>& all = admissions_.at(admission).segments;
  absl::flat_hash_set<const Resident*> fills;
  for (const uint32_t index : segments) fills.insert(all[index]);
  for (Resident* const segment : all) {
    if (segment == nullptr || segment->filled) continue;
    if (fills.contains(segment)) {
      segment->fillers.insert(admission);
    } else {
      segment->fillers.erase(admission);
      if (segment->filler == admission) segment->filler = 0;
    }
    PassDuty(*segment);
  }
}

void PagePool::RestIfUnused(Resident& segment) {
  if (!segment.references.empty() || segment.pins > 0) return;
  if (segment.erased) {
    shared_pages_ -= segment.pages.size();
    return Drop(segment);
  }
  segment.idle = idle_.insert(idle_.end(), &segment);
  idle_pages_ += segment.pages.size();
  shared_pages_ -= segment.pages.size();
}

void PagePool::Erase() {
  Reclaim(free_.size() + idle_pages_);
  std::vector<Key> used;
  for (const auto& [key, segment] : segments_) {
    if (!segment->erased) used.push_back(key);
  }
  std::ranges::sort(used);
  for (const Key& key : used) {
    std::unique_ptr<Resident> segment = std::move(segments_.extract(key).mapped());
    segment->erased = true;
    segment->key = Key();  // a hash is never a small number followed by zeros
    const uint64_t number = ++erased_;
    std::memcpy(segment->key.bytes.data(), &number, sizeof number);
    const Key anew = segment->key;
    segments_.emplace(anew, std::move(segment));
  }
}

void PagePool::Drop(Resident& segment) {
  GiveBack(segment.pages);
  segments_.erase(Key(segment.key));
}

std::vector<PagePool::Segment> PagePool::Segments(AdmissionId admission) const {
  std::vector<Segment> segments;
  for (const Resident* resident : admissions_.at(admission).segments) {
    Segment segment;
    if (resident != nullptr) {
      segment.pages = resident->pages;
      const bool fills = resident->filler == admission;
      if (!resident->filled) segment.content = fills ? PageContent::kToFill : PageContent::kBeingFilled;
    }
    segments.push_back(segment);
  }
  return segments;
}

std::span<const PageId> PagePool::OwnPages(AdmissionId admission) const {
  return admissions_.at(admission).own;
}

bool PagePool::Extend(AdmissionId admission, uint64_t own_pages, Shortage& shortage, uint64_t most) {
  std::vector<PageId>& own = admissions_.at(admission).own;
  if (own_pages <= own.size()) return true;
  const Shortage lacking = Lacking({}, own_pages - own.size());
  if (lacking.needed > lacking.free + lacking.reclaimable) {
    shortage = lacking;
    return false;
  }
  const uint64_t taken = std::min(most, lacking.needed);
  Reclaim(taken);
  TakeOwn(own.size() + taken, own);
  return true;
}

bool PagePool::Filled(AdmissionId admission, size_t segment) {
  const std::vector<Resident*>& segments = admissions_.at(admission).segments;
  if (segment >= segments.size() || segments[segment] == nullptr) return false;
  Resident& resident = *segments[segment];
  if (!resident.filled && resident.filler != admission) return false;
  resident.filled = true;
  resident.fillers.clear();
  return true;
}

void PagePool::End(AdmissionId admission) {
  const auto node = admissions_.extract(admission);
  references_ -= node.mapped().segments.size() + 1;
  absl::flat_hash_set<const Resident*> seen;  // a segment named twice counts as one reference, and may have ended
  for (Resident* segment : node.mapped().segments) {
    if (segment != nullptr && seen.insert(segment).second) Unreference(*segment, admission);
  }
  GiveBack(node.mapped().own);
}

PagePool::Writable PagePool::MayWrite(PageId page) const {
  const Page& written = pages_[page];
  if (written.own) return Writable::kOwn;
  const bool fillable = written.segment != nullptr && !written.segment->filled && written.segment->filler != 0;
  return fillable ? Writable::kToFill : Writable::kNo;
}

bool PagePool::Holds(const Key& key, size_t index, PageId page) const {
  const auto found = segments_.find(key);
  return found != segments_.end() && index < found->second->pages.size() && found->second->pages[index] == page;
}

void PagePool::Pin(std::span<const PageId> pages) {
  for (const PageId id : pages) {
    Page& page = pages_[id];
    if (page.pins++ == 0) ++pinned_pages_;
    if (page.segment != nullptr) ++page.segment->pins;
  }
}

void PagePool::Unpin(std::span<const PageId> pages) {
  for (const PageId id : pages) {
    Page& page = pages_[id];
    if (--page.pins == 0) --pinned_pages_;
    if (page.segment != nullptr) {
      --page.segment->pins;
      if (page.segment->filled) {
        RestIfUnused(*page.segment);
      } else {
        PassDuty(*page.segment);
      }
    } else if (page.pins == 0 && !page.own) {
      free_.push_back(id);
    }
  }
}

PagePool::Levels PagePool::levels() const {
  Levels levels{.pages = pages_.size(), .free = free_.size(), .idle = idle_pages_, .shared = shared_pages_};
  levels.own = levels.pages - levels.free - levels.idle - levels.shared;
  levels.admissions = admissions_.size();
  levels.segments = segments_.size();
  levels.reclaimed_segments = reclaimed_segments_;
  return levels;
}

}  // namespace ashlar::storage
