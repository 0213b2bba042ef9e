// SPDX-License-Identifier: Apache-2.0
// CheckpointBudget: decides which checkpoints, with the pages they need, are kept within a capacity.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory_resource>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "storage/memory/huge_pages.h"
#include "storage/policy/reuse_model.h"
#include "storage/prefix/prefix_entry.h"

namespace ashlar::storage {

// States, pages and everything else kept for prefixes compete by one price: the FLOPs that a checkpoint saves, per byte
// that evicting it would free, per expected request. A checkpoint saves the FLOPs since the previous checkpoint, from
// which a prompt would resume otherwise. Evicting it frees its states, and the pages that no deeper checkpoint needs. A
// new checkpoint is admitted if everything that has to be evicted for it is cheaper.
//
// A span takes no pages: it has the keys and values of its own tokens. It depends on the states of its base checkpoint,
// so these stay as long as the span.
//
// This class only does the accounting; the owner of the store has the bytes. One thread only.
class CheckpointBudget {
 public:
  CheckpointBudget(const PrefixCosts& costs, uint64_t capacity_bytes, const ReuseModel& model, uint64_t seed)
      : costs_(costs), capacity_(capacity_bytes), model_(model), random_(seed) {}

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
  void Refresh(PrefixNode& node);
  // `gone` is called for every checkpoint that is evicted for another one, after the other is kept.
  void WhenGone(std::function<void(PrefixNode&)> gone) { gone_ = std::move(gone); }

  // Bytes that keeping the states would take.
  uint64_t StatesTake(const PrefixNode& node) const { return Bytes(node, Paged(node)); }
  // The deepest kept prefix before it, or the root.
  static const PrefixNode& Before(const PrefixNode& node);
  // The price of a checkpoint, kept or not: FLOPs per byte per request.
  double Price(const PrefixNode& node, RequestTime now) const;
  // The prices of several checkpoints on one path, by depth. None of them is kept, nor any checkpoint between them. One
  // pass over the path.
  std::vector<double> Prices(std::span<const PrefixNode* const> way, RequestTime now) const;
  void ForEachKept(absl::FunctionRef<void(const PrefixNode&)> visit) const {
    for (const Kept& kept : kept_) visit(*kept.node);
  }
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
  // A kept checkpoint and the inputs of its price. The records are contiguous: checkpoints sampled for an eviction are
  // not in the CPU cache, so reading a few neighbours costs two cache misses, without touching the node of the previous
  // checkpoint.
  struct Kept {
    PrefixNode* node = nullptr;
    float worth = 0;    // FLOPs saved per byte freed, as last computed
    uint32_t used = 0;  // low bits of the last use
    ReuseModel::Class model;
    bool cheap : 1 = false;  // in the list of cheap checkpoints below
    bool held : 1 = false;   // leased, or with dependent spans; must not be evicted
  };
  static_assert(sizeof(Kept) == 24);
  struct Cheap {
    double price;  // as last computed
    size_t place;  // index among the kept ones
  };
  static constexpr uint64_t kLeastShare = 16, kStep = 256;  // fractions of the capacity
  static constexpr size_t kSamples = 256;       // if there are more, only a sample is examined, this many at first
  static constexpr size_t kFresh = 16;          // sampled each time
  static constexpr size_t kNeighbours = 4;      // contiguous ones per sample
  static constexpr size_t kCheap = 8;           // remembered cheap ones
  static constexpr size_t kNearby = 8;          // checkpoints after a changed one whose prices are recomputed
  static constexpr double kPriceMemory = 0.95;  // weight of the old going price per eviction

  static bool MayGo(const PrefixNode& node) { return node.data.leases == 0 && node.data.hanging.empty(); }
  uint64_t StateBytes(const PrefixNode& node) const;
  static const PrefixNode& Paged(const PrefixNode& node);
  // Returns the bytes that keeping the checkpoint takes or evicting it frees. A page in which an edge begins belongs to
  // that edge completely, because its first part may belong to another prompt's tail.
  uint64_t Bytes(const PrefixNode& node, const PrefixNode& paged) const;
  // Returns the FLOPs that the checkpoint saves, per byte that it takes.
  double Worth(const PrefixNode& node, const PrefixNode& before, const PrefixNode& paged) const;
  double Price(const PrefixNode& node, const PrefixNode& before, const PrefixNode& paged, RequestTime now) const;
  double Price(const Kept& kept, RequestTime now) const;
  void Put(PrefixNode& node);
  void NoteHeld(PrefixNode& node);
  void Remove(PrefixNode& node);  // may be added again
  void RefreshAround(PrefixNode& node);
  // Returns the cheapest evictable checkpoint except `spared`; null if there is none. With many checkpoints, it chooses
  // among a few samples and earlier cheap ones, so that the cost of an eviction does not depend on their number.
  PrefixNode* Cheapest(const PrefixNode* spared, RequestTime now, double& price);
  PrefixNode* CheapestOfAll(const PrefixNode* spared, RequestTime now, double& price) const;
  void DrawCheap(RequestTime now);
  void DrawAhead();
  size_t PlaceOf(uint32_t draw) const { return uint64_t{draw} * (kept_.size() - kNeighbours + 1) >> 32; }
  std::vector<Cheap>::iterator CheapestDrawn();  // by the last computed price
  void DropCheap(size_t place);

  const PrefixCosts costs_;
  const uint64_t capacity_;
  uint64_t limit_ = capacity_;  // part of the capacity that is available, as far as known
  const ReuseModel& model_;
  // Knuth's generator, whose high bits choose samples. It takes no memory and displaces nothing from the CPU cache.
  std::linear_congruential_engine<uint64_t, 6364136223846793005, 1442695040888963407, 0> random_;
  uint64_t bytes_ = 0, peak_bytes_ = 0;
  double going_price_ = 0;
  uint64_t evictions_ = 0, refusals_ = 0;
  HugePages memory_;
  std::pmr::vector<Kept> kept_{&memory_};
  size_t spans_ = 0;
  uint64_t saved_bytes_ = 0;
  std::vector<Cheap> cheap_;
  double dearest_ = 0;  // highest price of these if the list is full
  // Indices of the next samples, whose memory is already prefetched.
  std::array<uint32_t, kFresh / kNeighbours> ahead_{};
  std::function<void(PrefixNode&)> gone_;
};

}  // namespace ashlar::storage
