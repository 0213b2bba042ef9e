// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/eviction.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace ashlar::storage {
namespace {

constexpr size_t kMostSkipped = 1024;  // dirty copies that one search skips

void Unlink(Rank& copy) {
  copy.older->younger = copy.younger;
  copy.younger->older = copy.older;
}

}  // namespace

EvictionPolicy::Search::Search(std::span<const Allowance> pools, uint64_t extents, EvictionPolicy::Purpose purpose)
    : extents_(extents), purpose_(purpose), skips_dirty_(purpose == Purpose::kEvict) {
  for (const Allowance& from : pools) allowed_.push_back(from.extents);
}

bool EvictionPolicy::Search::Offer(const Rank& copy, size_t pool) {
  if (copy.extents > allowed_[pool]) return false;
  if (!copy.dirty || !skips_dirty_) return Add(copy, pool);
  dirty_.push_back({&copy, pool});
  if (dirty_.size() == kMostSkipped) AddDirty();
  return true;
}

bool EvictionPolicy::Search::Add(const Rank& copy, size_t pool) {
  if (copy.extents > allowed_[pool]) return false;
  victims_.push_back(copy.object);
  found_ += copy.extents;
  allowed_[pool] -= copy.extents;
  return true;
}

void EvictionPolicy::Search::AddDirty() {
  for (const auto& [copy, pool] : std::exchange(dirty_, {})) {
    if (!ended()) Add(*copy, pool);
  }
  skips_dirty_ = false;
}

std::vector<RankedObject*> EvictionPolicy::Search::Take() {
  AddDirty();
  if (found_ < extents_ && purpose_ == Purpose::kEvict) victims_.clear();
  return std::move(victims_);
}

Rank& LruPolicy::Order(const TenantPool& pool) {
  const auto [found, fresh] = orders_.try_emplace(pool);
  Rank& order = found->second;
  if (fresh) order.older = order.younger = &order;
  return order;
}

void LruPolicy::Track(const TenantPool& pool, Rank& copy) {
  copy.order = &Order(pool);
  copy.older = copy.younger = &copy;  // a ring of one
  MoveToRecentEnd(copy);
}

void LruPolicy::Touch(Rank& copy) {
  MoveToRecentEnd(copy);
}

void LruPolicy::MoveToRecentEnd(Rank& copy) {
  copy.used = ++uses_;
  Unlink(copy);
  copy.younger = copy.order;
  copy.older = copy.order->older;
  copy.older->younger = &copy;
  copy.order->older = &copy;
}

void LruPolicy::Erase(Rank& copy) {
  Unlink(copy);
  copy.order = nullptr;
}

std::vector<RankedObject*> LruPolicy::Victims(std::span<const Allowance> pools, uint64_t extents,
                                              EvictionPolicy::Purpose purpose) {
  std::vector<Cursor> cursors;
  for (const Allowance& from : pools) {
    Rank& order = Order(from.pool);
    cursors.push_back({&order, order.younger, cursors.size()});
  }
  const uint64_t before = uses_;  // ranks with a later use were moved by this call
  Search search(pools, extents, purpose);
  while (!search.ended()) {
    Cursor* oldest = nullptr;
    for (Cursor& cursor : cursors) {
      const bool ended = cursor.next == cursor.order || cursor.next->used > before;
      if (!ended && (oldest == nullptr || cursor.next->used < oldest->next->used)) oldest = &cursor;
    }
    if (oldest == nullptr) break;
    Rank& current = *oldest->next;
    oldest->next = current.younger;
    if (!current.idle) {
      MoveToRecentEnd(current);
    } else if (!search.Offer(current, oldest->pool)) {
      oldest->next = oldest->order;
    }
  }
  return search.Take();
}

double PricePolicy::WorthOf(const Rank& copy) const {
  const double computing = copy.object->reuse.saves_a_byte;
  if (copy.lower == TierKind::kNone) return computing;
  const auto costs = costs_.find(copy.object->pool.tenant);
  const double loading = costs == costs_.end() ? 0 : costs->second.FlopsPerByte(copy.lower);
  return loading > 0 ? std::min(computing, loading) : computing;
}

Rank& PricePolicy::RingOf(const TenantPool& pool, const Rank& copy) {
  const ReuseModel::Class model = ReuseModels::ClassOf(copy.object->reuse);
  const double worth = std::clamp(WorthOf(copy), kLeastWorth, kMostWorth);
  const auto half_octave = static_cast<int>(std::lround(2 * std::log2(worth)));
  const uint32_t name = (model.kind * 256u + model.uses) << 8 | static_cast<uint8_t>(half_octave);
  Shelf& shelf = shelves_[pool];
  const auto [found, fresh] = shelf.by_class.try_emplace(name, shelf.rings.size());
  if (fresh) {
    auto ring = std::make_unique<Ring>(
        Ring{.place = {}, .model = model, .worth = static_cast<float>(std::exp2(half_octave / 2.0))});
    ring->place.older = ring->place.younger = &ring->place;
    shelf.rings.push_back(std::move(ring));
  }
  return shelf.rings[found->second]->place;
}

void PricePolicy::Append(Rank& copy, Rank& place) {
  copy.used = ++uses_;
  copy.at = models_.now(copy.object->pool.tenant);
  copy.order = &place;
  copy.younger = &place;
  copy.older = place.older;
  copy.older->younger = &copy;
  place.older = &copy;
}

void PricePolicy::Track(const TenantPool& pool, Rank& copy) {
  Append(copy, RingOf(pool, copy));
}

void PricePolicy::Touch(Rank& copy) {
  Unlink(copy);
  Append(copy, RingOf(copy.object->pool, copy));
}

void PricePolicy::Erase(Rank& copy) {
  Unlink(copy);
  copy.order = nullptr;
}

void PricePolicy::SetLower(Rank& copy, TierKind lower) {
  if (copy.lower == lower) return;
  copy.lower = lower;
  if (!copy.tracked()) return;
  Rank& place = RingOf(copy.object->pool, copy);
  if (&place == copy.order) return;
  Unlink(copy);
  // Copies are written down when they are new or before they would be evicted, so the place is near one of the ends.
  Rank *older = place.older, *younger = place.younger;
  for (int steps = 0; steps < kMostSteps && older != &place && older->used > copy.used; ++steps) {
    if (younger == &place || younger->used > copy.used) {
      older = younger->older;
      break;
    }
    older = older->older;
    younger = younger->younger;
  }
  copy.order = &place;
  copy.older = older;
  copy.younger = older->younger;
  copy.older->younger = &copy;
  copy.younger->older = &copy;
}

void PricePolicy::Advance(Cursor& cursor, TenantId tenant, uint64_t before) {
  Rank* const place = &cursor.ring->place;
  while (cursor.next != place && cursor.next->used <= before && !cursor.next->idle) {
    Rank& in_use = *cursor.next;
    cursor.next = in_use.younger;
    Unlink(in_use);  // its release moves it there
    Append(in_use, *place);
  }
  if (cursor.next == place || cursor.next->used > before) {
    cursor.next = nullptr;
    return;
  }
  cursor.price = models_.Rate(tenant, cursor.ring->model, cursor.next->at) * cursor.ring->worth;
}

std::vector<RankedObject*> PricePolicy::Victims(std::span<const Allowance> pools, uint64_t extents,
                                                EvictionPolicy::Purpose purpose) {
  const uint64_t before = uses_;  // ranks with a later use were moved by this call
  std::vector<Cursor> cursors;
  for (size_t pool = 0; pool < pools.size(); ++pool) {
    const Allowance& from = pools[pool];
    for (const auto& ring : shelves_[from.pool].rings) {
      cursors.push_back({ring.get(), ring->place.younger, pool, 0});
      Advance(cursors.back(), from.pool.tenant, before);
    }
  }
  Search search(pools, extents, purpose);
  while (!search.ended()) {
    std::erase_if(cursors, [](const Cursor& cursor) { return cursor.next == nullptr; });
    const auto cheapest = std::ranges::min_element(
        cursors, {}, [](const Cursor& cursor) { return std::pair(cursor.price, cursor.next->used); });
    if (cheapest == cursors.end()) break;
    Rank& copy = *cheapest->next;
    const size_t pool = cheapest->pool;
    if (!search.Offer(copy, pool)) {
      for (Cursor& cursor : cursors) cursor.next = cursor.pool == pool ? nullptr : cursor.next;
      continue;
    }
    cheapest->next = copy.younger;
    Advance(*cheapest, pools[pool].pool.tenant, before);
  }
  return search.Take();
}

double PricePolicy::PriceOf(const RankedObject& object) const {
  const Reuse& reuse = object.reuse;
  return models_.Rate(object.pool.tenant, ReuseModels::ClassOf(reuse), reuse.used) *
         std::clamp<double>(reuse.saves_a_byte, kLeastWorth, kMostWorth);
}

bool PricePolicy::IsDearer(const RankedObject& coming, std::span<RankedObject* const> than) const {
  constexpr double kHalfOctave = 1.4142;  // resolution of the rings
  const double price = PriceOf(coming);
  return std::ranges::all_of(than, [&](const RankedObject* object) { return kHalfOctave * PriceOf(*object) < price; });
}

}  // namespace ashlar::storage
