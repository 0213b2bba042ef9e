// SPDX-License-Identifier: Apache-2.0
// HugePages, NodePool: memory for random access, in huge pages if available.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory_resource>
#include <new>
#include <utility>
#include <vector>

namespace ashlar::storage {

// Requests huge pages for allocations of at least their size, because otherwise most accesses to many megabytes miss
// the TLB. Smaller allocations use the heap. Huge pages are a hint.
class HugePages : public std::pmr::memory_resource {
 public:
  static constexpr size_t kBytes = size_t{2} << 20;

 private:
  void* do_allocate(size_t bytes, size_t alignment) override;
  void do_deallocate(void* at, size_t bytes, size_t alignment) override;
  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override { return this == &other; }
};

// Nodes of one type in contiguous chunks. The slot of a deleted node, still in the CPU cache, is reused first. Memory
// is freed with the pool, which must outlive its nodes.
template <typename T>
class NodePool {
 public:
  NodePool() = default;
  NodePool(const NodePool&) = delete;
  NodePool& operator=(const NodePool&) = delete;
  ~NodePool() {
    for (const Chunk& chunk : chunks_) memory_.deallocate(chunk.nodes, chunk.bytes, alignof(Place));
  }

#ifdef __SANITIZE_ADDRESS__  // detects use after delete only if slots are not reused
  T* New() {
    return new T();
  }
  void Delete(T* node) {
    delete node;
  }
#else
  T* New() {
    Place* const place = free_ != nullptr ? std::exchange(free_, free_->next) : Carve();
    return new (place) T();
  }
  void Delete(T* node) {
    node->~T();
    free_ = new (static_cast<void*>(node)) Place{.next = free_};
  }
#endif

 private:
  static constexpr size_t kFirstBytes = size_t{4} << 10, kMostBytes = 8 * HugePages::kBytes;

  union Place {
    Place* next;
    alignas(T) std::byte node[sizeof(T)];
  };
  struct Chunk {
    Place* nodes;
    size_t bytes;
  };

  // Each chunk is twice as large as the previous one, up to a limit.
  Place* Carve() {
    if (left_ == 0) {
      const size_t bytes =
          chunks_.empty() ? std::max(kFirstBytes, sizeof(Place)) : std::min(2 * chunks_.back().bytes, kMostBytes);
      chunks_.push_back({static_cast<Place*>(memory_.allocate(bytes, alignof(Place))), bytes});
      left_ = bytes / sizeof(Place);
    }
    return chunks_.back().nodes + --left_;
  }

  HugePages memory_;
  std::vector<Chunk> chunks_;
  size_t left_ = 0;  // free slots at the start of the last chunk
  Place* free_ = nullptr;
};

}  // namespace ashlar::storage
