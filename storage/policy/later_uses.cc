// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/later_uses.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace ashlar::storage {
namespace {

constexpr size_t kFollowed = 8192;  // spells
constexpr size_t kLeastRefresh = 16, kRefreshPart = 16;
// Weight, in objects, of what is assumed of a class without data: a text that was continued before is used again, and
// others are not.
constexpr double kPriorWeight = 16;

}  // namespace

uint64_t LaterUses::NameOf(const Key& key) {
  uint64_t name = 0;
  std::memcpy(&name, key.bytes.data(), sizeof name);
  return name;
}

double LaterUses::Evicted(const Key& key, const Subject& subject, uint64_t extents, uint64_t horizon) {
  now_ += extents;
  while (!begun_.empty() && now_ - begun_.front().at > horizon) {
    const auto spell = spells_.find(begun_.front().name);
    if (spell != spells_.end() && spell->second.began == begun_.front().at) End(spell->first, /*used=*/false);
    begun_.pop_front();
  }
  // After a text was continued, prompts hardly ever resume at its former end.
  const bool continued = subject.uses > 0 && subject.kind != ReuseKind::kContinued;
  double& came = came_[2 * static_cast<size_t>(subject.kind) + (subject.uses > 0 ? 1 : 0)];
  const double learned = 1 - std::exp(-model_.Hazards(subject, std::min(horizon, now_)));
  const double likelihood = (came * learned + (continued ? kPriorWeight : 0)) / (came + kPriorWeight);
  const uint64_t name = NameOf(key);
  if (IsFollowed(name)) {
    came += 1;
    Follow(name, subject);
  }
  return likelihood;
}

void LaterUses::Follow(uint64_t name, const Subject& subject) {
  if (spells_.contains(name)) End(name, /*used=*/false);  // published again meanwhile
  spells_[name] = {now_, subject};
  begun_.push_back({name, now_});
  while (begun_.size() > kFollowed) {
    stride_ *= 2;
    std::erase_if(begun_, [this](const Begun& begun) { return !IsFollowed(begun.name); });
    absl::erase_if(spells_, [this](const auto& spell) { return !IsFollowed(spell.first); });
  }
  Refresh();
}

void LaterUses::Used(const Key& key) {
  const uint64_t name = NameOf(key);
  if (!spells_.contains(name)) return;
  End(name, /*used=*/true);
  Refresh();
}

void LaterUses::End(uint64_t name, bool used) {
  const auto spell = spells_.find(name);
  model_.Ended(spell->second.subject, now_ - spell->second.began, used);
  spells_.erase(spell);
}

void LaterUses::Refresh() {
  if (++events_ < std::max(kLeastRefresh, spells_.size() / kRefreshPart)) return;
  events_ = 0;
  for (const Begun& begun : begun_) {
    const auto spell = spells_.find(begun.name);
    if (spell != spells_.end() && spell->second.began == begun.at) {
      model_.GoesOn(spell->second.subject, now_ - begun.at);
    }
  }
  model_.Refresh();
}

void LaterUses::Erase() {
  begun_.clear();
  spells_.clear();
}

}  // namespace ashlar::storage
