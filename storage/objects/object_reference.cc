// SPDX-License-Identifier: Apache-2.0
#include "storage/objects/object_reference.h"

#include <utility>

#include "proto/limits.h"
#include "storage/objects/object_table.h"

namespace ashlar::storage {

ObjectReference::ObjectReference(Entry& entry, size_t level) : entry_(&entry), level_(static_cast<uint8_t>(level)) {
  ++entry.references;
  Placement& placement = entry.table->placement();
  placement.copies().Apply(entry, level, CopyEvent::kAddUser);
  if (entry.copies[level].state.users() == 1) placement.Changed(entry);
}

ObjectReference::ObjectReference(ObjectReference&& other) noexcept
    : entry_(std::exchange(other.entry_, nullptr)), level_(other.level_) {}

ObjectReference& ObjectReference::operator=(ObjectReference&& other) noexcept {
  std::swap(entry_, other.entry_);
  std::swap(level_, other.level_);
  return *this;
}

ObjectReference::~ObjectReference() {
  if (entry_ == nullptr) return;
  entry_->table->placement().copies().Apply(*entry_, level_, CopyEvent::kRemoveUser);
  const bool last = entry_->copies[level_].state.users() == 0;
  entry_->table->Unreference(*entry_, last);
}

ObjectReference ObjectReference::Share() const {
  if (entry_ == nullptr) return {};
  return ObjectReference(*entry_, level_);
}

const Tier& ObjectReference::tier() const {
  return entry_->table->levels().TierAt(level_);
}

void ObjectReference::WhenLoaded(uint64_t bytes, std::function<void()> call) const {
  const uint64_t extents = (bytes + limits::kExtentBytes - 1) / limits::kExtentBytes;
  entry_->table->placement().WhenLoaded(*entry_, level_, extents, std::move(call));
}

MissReason ObjectReference::Lost() const {
  return entry_->table->levels().Lost(*entry_, level_);
}

}  // namespace ashlar::storage
