// SPDX-License-Identifier: Apache-2.0
// The implementation behind Landing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <variant>
#include <vector>

#include "ashlar/client.h"
#include "client/calls/land_call.h"
#include "client/session/connection.h"
#include "client/session/mapped_object.h"
#include "client/session/opened_model.h"
#include "client/session/process_bound.h"
#include "client/session/region_memory.h"

namespace ashlar {

namespace internal {

// Maps counts of layers to counts of attention layers. The daemon reports progress in attention layers only, and takes
// linear layers together with the attention layer behind them.
class AttentionLayers {
 public:
  explicit AttentionLayers(const Layout& layout) {
    for (uint32_t i = 0; i < layout.layers.size(); ++i) {
      if (std::holds_alternative<AttentionLayer>(layout.layers[i])) attention_.push_back(i);
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

struct Landing::Impl {
  explicit Impl(const Layout& layout) : attention_layers(layout) {}
  // Tuples of the first `layers` layers may be used from now on.
  void Arrived(uint32_t layers) const {
    for (const auto& object : tuples) {
      if (object != nullptr) object->Arrived(layers);
    }
  }

  const internal::AttentionLayers attention_layers;
  std::mutex mutex;
  std::vector<MissReason> reasons;  // guarded by mutex; of segments that were not asked for: known from the start
  bool decided = false;             // guarded by mutex
  std::vector<std::shared_ptr<internal::MappedObject>> tuples;  // one a reason; null where there are none
  std::vector<size_t> asked;                                    // for each object of the call, its place in `reasons`

  // These members keep memory in place while the daemon may write to it. `call` is last: it is destroyed first, and
  // waits until it is quiet.
  std::shared_ptr<const internal::ModelHandle> model;
  std::shared_ptr<internal::LeaseHold> lease;
  std::shared_ptr<internal::RegionMemory> pages;
  std::shared_ptr<internal::LandCall> call;  // null: nothing had to be asked
  internal::CreatorProcess creator;
};

}  // namespace ashlar
