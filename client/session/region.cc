// SPDX-License-Identifier: Apache-2.0
#include "client/session/region.h"

#include <utility>

#include "client/session/process_bound.h"
#include "client/session/region_memory.h"

namespace ashlar {
namespace internal {

RegionMemory::~RegionMemory() {
  if (const std::shared_ptr<Connection> connection = connection_.lock()) connection->channel().DropRegion(id_);
}

std::optional<uint64_t> RegionMemory::IdOn(const Connection& connection) const {
  MutexLock lock(mutex_);
  if (generation_ != connection.generation()) return std::nullopt;
  return id_;
}

std::optional<uint64_t> RegionMemory::OffsetOf(const std::byte* data, uint64_t bytes) const {
  const auto start = reinterpret_cast<uintptr_t>(place_.data);
  const auto begin = reinterpret_cast<uintptr_t>(data);
  if (begin < start || begin - start > place_.size || bytes > place_.size - (begin - start)) return std::nullopt;
  return begin - start;
}

absl::Status RegionMemory::Restore(const std::shared_ptr<Connection>& connection, Deadline deadline) {
  if (IdOn(*connection).has_value())
    return absl::OkStatus();  // a model that has its pages here restored the region first
  absl::StatusOr<uint64_t> id =
      connection->channel().RegisterRegion(descriptor_.get(), place_.size, place_.kind, place_.lies_on, deadline);
  if (!id.ok()) return id.status();
  SetId(connection, *id);
  return absl::OkStatus();
}

void RegionMemory::SetId(const std::shared_ptr<Connection>& connection, uint64_t id) {
  MutexLock lock(mutex_);
  connection_ = connection;
  generation_ = connection->generation();
  id_ = id;
}

}  // namespace internal

std::byte* Region::data() const {
  return memory_ == nullptr ? nullptr : memory_->place().data;
}
size_t Region::size() const {
  return memory_ == nullptr ? 0 : memory_->place().size;
}
kernels::MemoryKind Region::memory() const {
  return memory_ == nullptr ? kernels::MemoryKind::kHost : memory_->place().kind;
}

}  // namespace ashlar
