// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/transport/registered_areas.h"

#include <algorithm>
#include <utility>

namespace ashlar::daemon {

void RegisteredAreas::Add(std::byte* data, uint64_t bytes, std::string key) {
  MutexLock lock(mutex_);
  areas_[data] = {std::move(key), reinterpret_cast<uintptr_t>(data), bytes};
  bytes_ += bytes;
}

RemoteMemory RegisteredAreas::Describe(const Spans& spans, size_t most_arenas, size_t most_runs) const {
  MutexLock lock(mutex_);
  RemoteMemory memory;
  std::map<uint64_t, uint32_t> numbers;  // index in the list, by base
  for (const auto& span : spans) {
    auto next = areas_.upper_bound(span.data());
    if (next == areas_.begin()) return {};
    const RemoteArena& area = std::prev(next)->second;
    const uint64_t offset = reinterpret_cast<uintptr_t>(span.data()) - area.base;
    if (offset > area.bytes || span.size() > area.bytes - offset) return {};
    const auto [known, added] = numbers.emplace(area.base, static_cast<uint32_t>(memory.arenas.size()));
    if (added) memory.arenas.push_back(area);
    RemoteRun* const last = memory.runs.empty() ? nullptr : &memory.runs.back();
    if (last != nullptr && last->arena == known->second && last->offset + last->bytes == offset) {
      last->bytes += span.size();
    } else {
      memory.runs.push_back({known->second, offset, span.size()});
    }
    if (memory.arenas.size() > most_arenas || memory.runs.size() > most_runs) return {};
  }
  return memory;
}

uint64_t RegisteredAreas::bytes() const {
  MutexLock lock(mutex_);
  return bytes_;
}

}  // namespace ashlar::daemon
