// SPDX-License-Identifier: Apache-2.0
// Landing: a landing in progress, its layers and its verdict.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "client/session/connection.h"
#include "client/session/land_call.h"
#include "client/session/mapped_object.h"
#include "client/session/opened_model.h"
#include "client/session/process_bound.h"
#include "client/session/region_memory.h"
#include "kernels/mutex.h"
#include "proto/layout.h"
#include "proto/outcome.h"

namespace ashlar {

namespace internal {

// Maps counts of layers to counts of layers with pages. The daemon reports progress in these only, and handles other
// layers together with the next layer with pages.
class AttentionLayers {
 public:
  explicit AttentionLayers(const Layout& layout) {
    for (uint32_t i = 0; i < layout.layers.size(); ++i) {
      if (HasRows(layout.layers[i])) attention_.push_back(i);
    }
  }
  // Returns how many attention layers the daemon must have finished before the first `layers` layers are all done.
  // UINT32_MAX: the whole landing.
  uint32_t CountFor(uint32_t layers) const {
    if (layers == 0) return 0;
    const auto last = std::ranges::lower_bound(attention_, layers - 1);
    return last == attention_.end() ? UINT32_MAX : static_cast<uint32_t>(last - attention_.begin()) + 1;
  }

 private:
  std::vector<uint32_t> attention_;  // layers, ascending
};

}  // namespace internal

// One segment to land: its index in the match, and the position of its first token.
struct LandSegment {
  // The match's prefix, at position 0. Land takes it whole, with one verdict. Advance uses its cached
  // states; if it has a span, these are the states before the span.
  static constexpr uint32_t kPrefix = UINT32_MAX;
  uint32_t segment = 0;
  uint64_t first_position = 0;
  // For Land: the segment's keys and values are already in pages (another request has filled them, shared_pages.h), or
  // are not wanted. Only its tuples are promoted and verified, and no slot is written. If this is set for all segments,
  // no pages need be declared.
  bool tuples_only = false;
  // For Land: the rotary position of the segment's first key minus first_position. Rotary positions of several axes
  // count an image's tokens differently from slots; a segment at another position is shifted by one number on all axes.
  // A daemon of protocol 2 does not support shifts: such segments miss (kInvalidRequest).
  int64_t rotary_shift = 0;
  // For Land of the match's prefix: the number of its first blocks whose keys and values are already in the pages. They
  // are neither verified nor written.
  uint32_t present_blocks = 0;
  // Above 0, for Land of the match's prefix: lands the blocks [present_blocks, end_block) only, without states.
  uint32_t end_block = 0;
};

// A landing in progress. From Model::Land until Wait returns a verdict, the target slots belong to the daemon.
class Landing {
 public:
  Landing(Landing&&) noexcept;
  Landing& operator=(Landing&&) noexcept;
  ~Landing();  // cancels, and waits until nothing writes to the slots any longer, however long the daemon takes

  // Waits until the daemon has finished the first `layers` layers of the model for all segments: keys and values of its
  // attention layers are in their slots; tuples of its linear layers have been promoted and are equal to the published
  // ones. Linear layers arrive together with the next attention layer, or, after the last attention layer, with the
  // verdict. Work on finished layers may overlap with the rest, but no token may be emitted before the verdict. True
  // does not mean that every segment is valid: only the verdict names a segment that was found corrupt in one of those
  // layers. False: the landing ended with a miss, the daemon did not have to be asked, or the timeout passed.
  bool WaitLayers(uint32_t layers, std::chrono::milliseconds timeout);

  // The final verdict, one reason per segment given to Land (kNone: landed). If the daemon does not answer in time, the
  // landing is cancelled and every segment is a miss; then `quiesced()` returns whether the slots may be reused.
  std::vector<MissReason> Wait(std::chrono::milliseconds timeout);

  // True once nothing can write into the target slots any longer: the verdict arrived, the daemon confirmed that it has
  // stopped writing, or the kernel confirmed that the daemon is dead. It may still be false after Wait(timeout)
  // returned misses: then do not use the slots until WaitQuiesced returns true.
  bool quiesced() const;
  bool WaitQuiesced(std::chrono::milliseconds timeout);

 private:
  friend class Model;
  struct State;
  explicit Landing(std::unique_ptr<State> state) : state_(std::move(state)) {}
  std::unique_ptr<State> state_;
};

struct Landing::State {
  explicit State(const Layout& layout) : attention_layers(layout) {}
  // Tuples of the first `layers` layers may be used from now on.
  void Arrived(uint32_t layers) const {
    for (const auto& object : tuples) {
      if (object != nullptr) object->Arrived(layers);
    }
  }

  const internal::AttentionLayers attention_layers;
  Mutex mutex;
  std::vector<MissReason> reasons ABSL_GUARDED_BY(mutex);  // known from the start for segments that were not requested
  bool decided ABSL_GUARDED_BY(mutex) = false;
  std::vector<std::shared_ptr<internal::MappedObject>> tuples;  // one entry per reason; null: no tuples
  std::vector<size_t> asked;                                    // index in `reasons` of each object of the call

  // These members keep memory in place while the daemon may write to it. `call` is last, so it is destroyed first, and
  // waits until it is quiesced.
  std::shared_ptr<const internal::ModelHandle> model;
  std::shared_ptr<internal::LeaseHold> lease;
  std::shared_ptr<internal::RegionMemory> pages;
  std::shared_ptr<internal::LandCall> call;  // null: the daemon was not asked
  internal::CreatorProcess creator;
};

}  // namespace ashlar
