// SPDX-License-Identifier: Apache-2.0
#include "daemon/session/open_layouts.h"

#include <utility>
#include <variant>

namespace ashlar::daemon {
namespace {

template <typename Vector>
uint64_t HeapOf(const Vector& vector) {
  return vector.capacity() == 0 ? 0 : vector.capacity() * sizeof(vector[0]) + kHeapOverhead;
}

struct Shared {
  const Budget::Charge charge;  // ends after the memory
  const Layout layout;
};

}  // namespace

uint64_t MemoryOf(const Layout& layout) {
  uint64_t bytes = kLeastHeapBytes + sizeof(layout) + HeapOf(layout.layers);
  for (const Layer& layer : layout.layers) {
    if (const auto* attention = std::get_if<AttentionLayer>(&layer)) bytes += HeapOf(attention->rope.frequencies);
    if (const auto* linear = std::get_if<LinearLayer>(&layer))
      bytes += HeapOf(linear->rope.frequencies) + HeapOf(linear->decay_table);
  }
  return bytes;
}

std::shared_ptr<const Layout> OpenLayouts::Find(const NamespaceId& ns, const TensorShard& shard) const {
  MutexLock lock(mutex_);
  const auto found = layouts_.find(KeyOf(ns, shard));
  return found == layouts_.end() ? nullptr : found->second.lock();
}

std::shared_ptr<const Layout> OpenLayouts::Share(const NamespaceId& ns, const TensorShard& shard, Layout layout,
                                                 Budget::Charge charge) {
  const std::shared_ptr<const Shared> fresh(new Shared{std::move(charge), std::move(layout)});
  MutexLock lock(mutex_);
  std::erase_if(layouts_, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<const Layout>& place = layouts_[KeyOf(ns, shard)];
  if (std::shared_ptr<const Layout> known = place.lock(); known != nullptr) return known;
  std::shared_ptr<const Layout> shared(fresh, &fresh->layout);
  place = shared;
  return shared;
}

size_t OpenLayouts::size() const {
  MutexLock lock(mutex_);
  return layouts_.size();
}

}  // namespace ashlar::daemon
