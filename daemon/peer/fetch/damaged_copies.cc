// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/fetch/damaged_copies.h"

#include <algorithm>

namespace ashlar::daemon {

void DamagedCopies::Released(storage::RemoteCopyId copy, const Key& key, Members senders) {
  if (senders.empty()) return;
  if (released_.size() >= kMostReleased) released_.erase(released_.begin());
  released_[copy] = {key, std::move(senders)};
}

DamagedCopies::Members DamagedCopies::Found(storage::RemoteCopyId copy, storage::Nanos now) {
  const auto sent = released_.extract(copy);
  if (!sent) return {};
  for (const auto& member : sent.mapped().by) Add(*member, sent.mapped().key, now);
  return std::move(sent.mapped().by);
}

void DamagedCopies::Add(const Member& member, const Key& key, storage::Nanos now) {
  const std::pair place(member.incarnation, key);
  if (damaged_.size() >= kMostDamaged && !damaged_.contains(place)) {
    damaged_.erase(std::ranges::min_element(damaged_, {}, [](const auto& one) { return one.second; }));
  }
  damaged_[place] = now + kFor;
}

bool DamagedCopies::Contains(const Member& member, const Key& key, storage::Nanos now) const {
  const auto found = damaged_.find({member.incarnation, key});
  return found != damaged_.end() && found->second > now;
}

}  // namespace ashlar::daemon
