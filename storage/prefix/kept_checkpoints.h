// SPDX-License-Identifier: Apache-2.0
// KeptCheckpoints: the kept checkpoints, and the search for the cheapest of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <random>
#include <vector>

#include "absl/functional/function_ref.h"
#include "storage/memory/huge_pages.h"
#include "storage/policy/reuse_model.h"
#include "storage/prefix/checkpoint_prices.h"
#include "storage/prefix/prefix_entry.h"

namespace ashlar::storage {

class KeptCheckpoints {
 public:
  // `prices` must outlive this object.
  KeptCheckpoints(const CheckpointPrices& prices, uint64_t seed) : prices_(prices), random_(seed) {}

  // Set `kept` and `kept_place` of the node, and recompute the prices of its neighbours.
  void Add(PrefixNode& node);
  void Remove(PrefixNode& node);  // may be added again
  // A kept checkpoint was used, or its neighbours may have changed. No effect if it is not kept.
  void Refresh(PrefixNode& node);
  // The leases or the dependent spans of the node have changed. No effect if it is not kept.
  void NoteHeld(const PrefixNode& node);
  // Returns the cheapest evictable checkpoint except `spared`; null if there is none. With many checkpoints, it chooses
  // among a few samples and earlier cheap ones, so that the cost of an eviction does not depend on their number.
  PrefixNode* Cheapest(const PrefixNode* spared, RequestTime now, double& price);

  size_t size() const { return kept_.size(); }
  void ForEach(absl::FunctionRef<void(const PrefixNode&)> visit) const {
    for (const Kept& kept : kept_) visit(*kept.node);
  }

 private:
  // A kept checkpoint and the inputs of its price. The records are contiguous: checkpoints sampled for an eviction are
  // not in the CPU cache, so reading a few neighbours costs two cache misses, without touching the node of the previous
  // checkpoint.
  struct Kept {
    PrefixNode* node = nullptr;
    float worth = 0;    // FLOPs saved per byte freed, as last computed
    uint32_t used = 0;  // low bits of the last use
    ReuseModel::Class model;
    bool cheap : 1 = false;  // the list of cheap checkpoints below has it
    bool held : 1 = false;   // leased, or with dependent spans; must not be evicted
  };
  static_assert(sizeof(Kept) == 24);
  struct Cheap {
    double price;  // as last computed
    size_t place;  // index among the kept ones
  };
  static constexpr size_t kSamples = 256;   // if there are more, only a sample is examined, this many at first
  static constexpr size_t kFresh = 16;      // sampled each time
  static constexpr size_t kNeighbours = 4;  // contiguous ones per sample
  static constexpr size_t kCheap = 8;       // remembered cheap ones
  static constexpr size_t kNearby = 8;      // checkpoints after a changed one whose prices are recomputed

  static bool MayGo(const PrefixNode& node) { return node.data.leases == 0 && node.data.hanging.empty(); }
  double Price(const Kept& kept, RequestTime now) const {
    return prices_.Rate(kept.model, static_cast<uint32_t>(now) - kept.used) * kept.worth;
  }
  void RefreshAround(PrefixNode& node);
  PrefixNode* CheapestOfAll(const PrefixNode* spared, RequestTime now, double& price) const;
  void DrawCheap(RequestTime now);
  void DrawAhead();
  size_t PlaceOf(uint32_t draw) const { return uint64_t{draw} * (kept_.size() - kNeighbours + 1) >> 32; }
  std::vector<Cheap>::iterator CheapestDrawn();  // compares the last computed prices
  void DropCheap(size_t place);

  const CheckpointPrices& prices_;
  // Knuth's generator, whose high bits choose samples. It takes no memory and displaces nothing from the CPU cache.
  std::linear_congruential_engine<uint64_t, 6364136223846793005, 1442695040888963407, 0> random_;
  HugePages memory_;
  std::pmr::vector<Kept> kept_{&memory_};
  std::vector<Cheap> cheap_;
  double dearest_ = 0;  // highest price of these if the list is full
  // Indices of the next samples, whose memory is already prefetched.
  std::array<uint32_t, kFresh / kNeighbours> ahead_{};
};

}  // namespace ashlar::storage
