// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/transport/registered_areas.h"

#include <cstring>
#include <iterator>
#include <string>
#include <utility>

namespace ashlar::daemon {

absl::Status RegisteredAreas::Register(Ucx& ucx, std::byte* data, uint64_t bytes, MemoryType type,
                                       Transport::CopyIn copy_in) {
  if (!ucx.Reaches(type)) return absl::UnimplementedError("UCX cannot access this type of memory");
  if (copy_in) far_areas_[data] = {bytes, std::move(copy_in)};
  absl::StatusOr<std::string> key = ucx.Register(data, bytes, type);
  if (!key.ok()) return key.status();
  if (key->empty()) return absl::OkStatus();
  MutexLock lock(mutex_);
  areas_[data] = {*std::move(key), reinterpret_cast<uintptr_t>(data), bytes};
  bytes_ += bytes;
  return absl::OkStatus();
}

const Transport::CopyIn* RegisteredAreas::WayInto(const std::byte* data) const {
  const auto next = far_areas_.upper_bound(data);
  if (next == far_areas_.begin()) return nullptr;
  const auto& [begin, area] = *std::prev(next);
  return data < begin + area.bytes ? &area.copy_in : nullptr;
}

bool RegisteredAreas::CanCopyInto(const Ucx& ucx, const SpanList<std::byte>& targets) const {
  bool can = true;
  targets.ForEach(0, targets.bytes(), [&](std::span<std::byte> piece) {
    can = ucx.TypeOf(piece.data()) == MemoryType::kHost || WayInto(piece.data()) != nullptr;
    return can;
  });
  return can;
}

void RegisteredAreas::CopyIn(std::byte* to, std::span<const std::byte> from) const {
  if (const Transport::CopyIn* const way = WayInto(to)) {
    (*way)(to, from);
  } else {
    std::memcpy(to, from.data(), from.size());
  }
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
