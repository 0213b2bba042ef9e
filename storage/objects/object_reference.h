// SPDX-License-Identifier: Apache-2.0
// ObjectReference: a use of an object.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "proto/outcome.h"
#include "storage/objects/entry.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// While the reference lives, the header stays, and the copy at its level: the tier that the engine lands from and maps.
// Must not outlive the object's table.
class ObjectReference {
 public:
  ObjectReference() = default;
  ObjectReference(Entry& entry, size_t level);
  ObjectReference(ObjectReference&& other) noexcept;
  ObjectReference& operator=(ObjectReference&& other) noexcept;
  ~ObjectReference();

  ObjectReference Share() const;  // Returns another use of the same copy.
  explicit operator bool() const { return entry_ != nullptr; }
  const Entry* operator->() const { return entry_; }
  const Entry& operator*() const { return *entry_; }
  Entry& entry() const { return *entry_; }  // storage/objects uses it to change entries
  size_t level() const { return level_; }
  const Copy& copy() const { return entry_->copies[level_]; }
  const Tier& tier() const;

  // Calls `call` when the first `bytes` of the copy are loaded or lost (Lost), at once if they already are. Deletes it
  // without a call if the last reference to the copy ends first.
  void WhenLoaded(uint64_t bytes, std::function<void()> call) const;
  // Returns why the missing rest of the copy does not come (Levels::Lost); kNone: it does.
  MissReason Lost() const;

 private:
  Entry* entry_ = nullptr;
  uint8_t level_ = 0;
};

// What a lookup found for one query.
struct FoundObject {
  MissReason reason = MissReason::kNone;  // kNone: `object` is set
  TierKind tier = TierKind::kNone;        // the tier where it was found
  ObjectReference object;
};

}  // namespace ashlar::storage
