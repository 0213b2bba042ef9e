// SPDX-License-Identifier: Apache-2.0
// CheckpointBudget: which checkpoints, and the pages that they need, are kept within a capacity.
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

// States, pages and everything else that is kept for prefixes compete for the same bytes by one price: the FLOPs that
// the checkpoint saves, per byte that giving it up would free, per expected request. A checkpoint saves the FLOPs from
// the checkpoint before it, from which a prompt would resume instead. Giving it up frees its states, and the pages that
// no deeper checkpoint needs. Admission uses the same price: a new checkpoint is kept if everything that has to leave
// for it is cheaper.
//
// A span takes no pages: it has the keys and values of its own tokens. It is of use only with the states that it hangs
// on, so these stay as long as the span does, whatever they are worth by themselves.
//
// Accounting only: the owner of the store has the bytes. One thread.
class CheckpointBudget {
 public:
  CheckpointBudget(const PrefixCosts& costs, uint64_t capacity_bytes, const ReuseModel& model, uint64_t seed)
      : costs_(costs), capacity_(capacity_bytes), model_(model), random_(seed) {}

  // Others took bytes that were counted on: until there is more again, no more is kept than is there now. Each request
  // then dares a little more.
  void Pressed();
  void Dare();

  // Keeps the checkpoint at `node`, which is not kept yet, and all pages before it. False, and nothing has changed: it
  // is worth less than the checkpoints that would have to leave for it, or is larger than the capacity.
  bool Admit(PrefixNode& node, RequestTime now);
  // Keeps a span at `node` that hangs on `base`, an earlier prefix that is kept by states. Otherwise as Admit.
  bool AdmitSpan(PrefixNode& node, PrefixNode& base, uint64_t bytes, RequestTime now);
  // Drops a kept checkpoint on which no spans hang.
  void Drop(PrefixNode& node);
  // Every user that resumes from a kept checkpoint leases it: it stays until all have released it.
  void Lease(PrefixNode& node);
  void Release(PrefixNode& node);
  // A kept checkpoint was used, or its neighbours may have changed.
  void Refresh(PrefixNode& node);
  // `gone` is called for every checkpoint that leaves for another one, once the other one is kept.
  void WhenGone(std::function<void(PrefixNode&)> gone) { gone_ = std::move(gone); }

  // Bytes that keeping its states would take.
  uint64_t StatesTake(const PrefixNode& node) const { return Bytes(node, Paged(node)); }
  // The deepest prefix before it that is kept; the root.
  static const PrefixNode& Before(const PrefixNode& node);
  // The price of a checkpoint, kept or not: FLOPs a byte, a request.
  double Price(const PrefixNode& node, RequestTime now) const;
  // The prices of several checkpoints on one way, by depth. None of them is kept, nor is any checkpoint between them.
  // One pass over the way.
  std::vector<double> Prices(std::span<const PrefixNode* const> way, RequestTime now) const;
  void ForEachKept(absl::FunctionRef<void(const PrefixNode&)> visit) const {
    for (const Kept& kept : kept_) visit(*kept.node);
  }
  // Returns the price of the checkpoint that would leave first, if there is no room for another: nothing cheaper will
  // be admitted; else 0.
  double LeastPrice(RequestTime now);
  // Returns the recent price of a byte, over admissions that had to evict; 0 before the first one.
  double going_price() const { return going_price_; }

  uint64_t bytes() const { return bytes_; }
  uint64_t peak_bytes() const { return peak_bytes_; }  // between calls
  uint64_t capacity_bytes() const { return capacity_; }
  uint64_t limit_bytes() const { return limit_; }
  size_t checkpoints() const { return kept_.size() - spans_; }
  size_t spans() const { return spans_; }
  // Returns how many more bytes states in place of the spans would take, keys and values not counted.
  uint64_t saved_bytes() const { return saved_bytes_; }
  uint64_t evictions() const { return evictions_; }
  uint64_t refusals() const { return refusals_; }

 private:
  // A kept checkpoint and the inputs of its price. The records stand side by side: the checkpoints drawn for an
  // eviction are in no processor's cache, so reading a few neighbours costs two places in memory, and no access to the
  // node of the checkpoint before.
  struct Kept {
    PrefixNode* node = nullptr;
    float worth = 0;    // FLOPs saved a byte freed, when it was last looked at
    uint32_t used = 0;  // low bits
    ReuseModel::Class model;
    bool cheap : 1 = false;  // among those below
    bool held : 1 = false;   // by a lease, or spans that hang on it: it may not go
  };
  static_assert(sizeof(Kept) == 24);
  struct Cheap {
    double price;  // when it was last looked at
    size_t place;  // among those that are kept
  };
  static constexpr uint64_t kLeastShare = 16, kStep = 256;  // parts of the capacity
  static constexpr size_t kSamples = 256;                   // no more are all looked at; else this many to begin with
  static constexpr size_t kFresh = 16;                      // drawn each time,
  static constexpr size_t kNeighbours = 4;                  // so many side by side
  static constexpr size_t kCheap = 8;                       // remembered
  static constexpr size_t kNearby = 8;                      // behind one whose prices may have changed with it
  static constexpr double kPriceMemory = 0.95;              // of the going price, an eviction on

  static bool MayGo(const PrefixNode& node) { return node.data.leases == 0 && node.data.hanging.empty(); }
  uint64_t StateBytes(const PrefixNode& node) const;
  static const PrefixNode& Paged(const PrefixNode& node);
  // Returns the bytes that keeping the checkpoint takes, or giving it up frees. A page in which an edge begins belongs
  // to that edge, whole: the part before it may belong to another prompt's tail.
  uint64_t Bytes(const PrefixNode& node, const PrefixNode& paged) const;
  // Returns the FLOPs that the checkpoint saves, per byte that it takes.
  double Worth(const PrefixNode& node, const PrefixNode& before, const PrefixNode& paged) const;
  double Price(const PrefixNode& node, const PrefixNode& before, const PrefixNode& paged, RequestTime now) const;
  double Price(const Kept& kept, RequestTime now) const;
  void Put(PrefixNode& node);
  void NoteHeld(PrefixNode& node);
  void Remove(PrefixNode& node);  // and may be put back
  void RefreshAround(PrefixNode& node);
  // Returns the cheapest checkpoint that may leave, except `spared`; null: none. If there are many, it chooses among a
  // few that it draws and the cheap ones drawn before, so that an eviction costs the same however many there are.
  PrefixNode* Cheapest(const PrefixNode* spared, RequestTime now, double& price);
  PrefixNode* CheapestOfAll(const PrefixNode* spared, RequestTime now, double& price) const;
  void DrawCheap(RequestTime now);
  void DrawAhead();
  size_t PlaceOf(uint32_t draw) const { return uint64_t{draw} * (kept_.size() - kNeighbours + 1) >> 32; }
  std::vector<Cheap>::iterator CheapestDrawn();  // when it was last looked at
  void DropCheap(size_t place);

  const PrefixCosts costs_;
  const uint64_t capacity_;
  uint64_t limit_ = capacity_;  // the part of it that is there, as far as is known
  const ReuseModel& model_;
  // Knuth's, of whose high bits places are drawn: it takes no memory that would be in what is drawn from's way.
  std::linear_congruential_engine<uint64_t, 6364136223846793005, 1442695040888963407, 0> random_;
  uint64_t bytes_ = 0, peak_bytes_ = 0;
  double going_price_ = 0;
  uint64_t evictions_ = 0, refusals_ = 0;
  HugePages memory_;
  std::pmr::vector<Kept> kept_{&memory_};
  size_t spans_ = 0;
  uint64_t saved_bytes_ = 0;
  std::vector<Cheap> cheap_;
  double dearest_ = 0;  // of these, where they are as many as are remembered
  // The places of the next draw: their memory is prefetched now, and has come by then.
  std::array<uint32_t, kFresh / kNeighbours> ahead_{};
  std::function<void(PrefixNode&)> gone_;
};

}  // namespace ashlar::storage
