// SPDX-License-Identifier: Apache-2.0
// Admission policies: which objects are worth writing to a disk. Data that is used once should not wear the disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "proto/key.h"
#include "storage/policy/later_uses.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// Counts recent uses of keys in little memory: a count-min sketch of four rows of 4-bit counters, all halved after ten
// uses per counter column (TinyLFU, Einziger, Friedman and Manes 2017, §3). A count is never below the true one since
// the last halving, and rarely above.
class FrequencySketch {
 public:
  // `keys` is the expected number of distinct keys. The sketch has a power of two of at least that, and takes twice as
  // many bytes.
  explicit FrequencySketch(size_t keys);

  void Add(TenantId tenant, const Key& key);
  uint32_t Estimate(TenantId tenant, const Key& key) const;  // at most 15

 private:
  static constexpr size_t kRows = 4;
  static constexpr uint32_t kMost = 15;
  size_t Place(TenantId tenant, const Key& key, size_t row) const;
  uint32_t Count(size_t place) const { return counters_[place / 16] >> (place % 16 * 4) & kMost; }
  void Halve();

  const size_t columns_;
  std::vector<uint64_t> counters_;  // 16 per word
  uint64_t added_ = 0;
};

enum class AdmissionMode : uint8_t {
  kAll,        // every published object
  kSecondUse,  // objects that were published or looked up before
  kTinyLfu,    // everything while there is space; afterwards objects used more often than their victim
};

class AdmissionPolicy {
 public:
  AdmissionPolicy(AdmissionMode mode, size_t keys) : mode_(mode), seen_(keys) {}

  AdmissionMode mode() const { return mode_; }
  // Records a publication or a lookup.
  void Seen(TenantId tenant, const Key& key);
  // Records that a lookup wanted this key, whether it hit or missed.
  void RecordDemand(TenantId tenant, const Key& key) { later_[tenant].Used(key); }
  // `victim` is the object that would be evicted; empty if there is free space.
  bool Admits(TenantId tenant, const Key& key, const std::optional<Key>& victim) const;
  // Returns whether to write an object because memory is about to evict it: it is likely enough to be used while a
  // disk of `horizon` extents keeps it.
  bool AdmitsEvicted(TenantId tenant, const Key& key, const LaterUses::Subject& subject, uint64_t extents,
                     uint64_t horizon);
  // Erases what is known of a tenant's evicted keys.
  void EraseEvicted(TenantId tenant) { later_[tenant].Erase(); }

 private:
  const AdmissionMode mode_;
  FrequencySketch seen_;
  std::map<TenantId, LaterUses> later_;
};

}  // namespace ashlar::storage
