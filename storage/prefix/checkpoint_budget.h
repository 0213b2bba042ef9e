// SPDX-License-Identifier: Apache-2.0
// CheckpointBudget: decides which checkpoints, with the pages they need, are kept within a capacity.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include "absl/functional/function_ref.h"
#include "storage/policy/reuse_model.h"
#include "storage/prefix/checkpoint_prices.h"
#include "storage/prefix/kept_checkpoints.h"
#include "storage/prefix/prefix_entry.h"

namespace ashlar::storage {

// States, pages and everything else kept for prefixes compete by one price (CheckpointPrices). A new checkpoint is
// admitted if everything that has to be evicted for it is cheaper.
//
// A span takes no pages: it has the keys and values of its own tokens. It depends on the states of its base checkpoint,
// so these stay as long as the span.
//
// This class only does the accounting; the owner of the store has the bytes. One thread only.
class CheckpointBudget {
 public:
  CheckpointBudget(const PrefixCosts& costs, uint64_t capacity_bytes, const ReuseModel& model, uint64_t seed)
      : prices_(costs, model), kept_(prices_, seed), capacity_(capacity_bytes) {}

  // Other objects have taken bytes of the capacity. Until they are available again, no more is kept than now. The limit
  // then rises slightly with each request.
  void ReduceLimit();
  void RaiseLimit();

  // Keeps the checkpoint at `node`, which must not be kept yet, and all pages before it. Returns false without a change
  // if it is worth less than the checkpoints that would have to be evicted, or larger than the capacity.
  bool Admit(PrefixNode& node, RequestTime now);
  // Keeps a span at `node` that depends on `base`, an earlier prefix kept by states. Otherwise like Admit.
  bool AdmitSpan(PrefixNode& node, PrefixNode& base, uint64_t bytes, RequestTime now);
  // Drops a kept checkpoint without dependent spans.
  void Drop(PrefixNode& node);
  // Every user that resumes from a kept checkpoint leases it; it stays until all have released it.
  void Lease(PrefixNode& node);
  void Release(PrefixNode& node);
  // A kept checkpoint was used, or its neighbours may have changed.
  void Refresh(PrefixNode& node) { kept_.Refresh(node); }
  // `gone` is called for every checkpoint that is evicted for another one, after the other is kept.
  void WhenGone(std::function<void(PrefixNode&)> gone) { gone_ = std::move(gone); }

  const CheckpointPrices& prices() const { return prices_; }
  void ForEachKept(absl::FunctionRef<void(const PrefixNode&)> visit) const { kept_.ForEach(visit); }
  // Returns the price of the next checkpoint to evict if there is no space for another one, so that nothing cheaper
  // will be admitted; 0 otherwise.
  double LeastPrice(RequestTime now);
  // Returns the recent price per byte of admissions that evicted something; 0 before the first one.
  double going_price() const { return going_price_; }

  uint64_t bytes() const { return bytes_; }
  uint64_t peak_bytes() const { return peak_bytes_; }  // between calls
  uint64_t capacity_bytes() const { return capacity_; }
  uint64_t limit_bytes() const { return limit_; }
  size_t checkpoints() const { return kept_.size() - spans_; }
  size_t spans() const { return spans_; }
  // Returns how many more bytes states would take than the spans that replace them, without keys and values.
  uint64_t saved_bytes() const { return saved_bytes_; }
  uint64_t evictions() const { return evictions_; }
  uint64_t refusals() const { return refusals_; }

 private:
  static constexpr uint64_t kLeastShare = 16, kStep = 256;  // fractions of the capacity
  static constexpr double kPriceMemory = 0.95;              // weight of the old going price per eviction

  void Put(PrefixNode& node);
  void Remove(PrefixNode& node);  // may be put again

  const CheckpointPrices prices_;
  KeptCheckpoints kept_;
  const uint64_t capacity_;
  uint64_t limit_ = capacity_;  // part of the capacity that is available, as far as known
  uint64_t bytes_ = 0, peak_bytes_ = 0;
  double going_price_ = 0;
  uint64_t evictions_ = 0, refusals_ = 0;
  size_t spans_ = 0;
  uint64_t saved_bytes_ = 0;
  std::function<void(PrefixNode&)> gone_;
};

}  // namespace ashlar::storage
