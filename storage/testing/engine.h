// SPDX-License-Identifier: Apache-2.0
// A test engine: a small hybrid layout, objects with known contents, and pages to publish from and land into.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kernels/linear.h"
#include "proto/layout.h"
#include "proto/object.h"
#include "storage/tier/tier.h"
#include "storage/transfer/transfer.h"

namespace ashlar::storage {

// Layers: linear, attention, linear, linear, attention, linear. A segment of 64 tokens takes 3 extents.
Layout TestLayout();
inline constexpr uint32_t kTestAttentionLayers[] = {1, 4};
inline constexpr uint32_t kTestLinearLayers[] = {0, 2, 3, 5};
kernels::LinearShape TestShape();  // shape of every linear layer

// The plan of the object of text `text`. Different texts, kinds or tenants have different keys.
ObjectHeader TestPlan(uint64_t text, uint64_t tokens, ObjectKind kind = ObjectKind::kSegment, TenantId tenant = 1);

// Keys and values of all attention layers in pages, in random page order.
class TestPages {
 public:
  explicit TestPages(uint32_t pages);
  static uint32_t Holding(uint64_t positions);  // number of pages for that many positions

  // The same memory through another page table.
  TestPages Through(std::vector<int32_t> page_table) const;

  std::vector<PagedRows> Rows() const;
  const std::vector<int32_t>& page_table() const { return page_table_; }
  std::span<float> memory() { return *memory_; }
  std::shared_ptr<const void> keep() const { return memory_; }

  // The row of one token, head and attention layer (0, 1 of kTestAttentionLayers).
  float* Key(size_t attention, uint64_t position, uint32_t head) const;
  float* Value(size_t attention, uint64_t position, uint32_t head) const;

 private:
  TestPages(std::vector<int32_t> page_table, std::shared_ptr<std::vector<float>> memory)
      : page_table_(std::move(page_table)), memory_(std::move(memory)) {}
  float* Page(size_t attention, uint64_t position) const;

  std::vector<int32_t> page_table_;
  std::shared_ptr<std::vector<float>> memory_;
};

// Everything that text `text` publishes, laid out as an engine would: dense tensors, keys and values in pages. The
// contents depend only on text, layer, part and position.
PublishSource TestSource(const ObjectHeader& plan, uint64_t text);

// Writes the rows of the object of text `text` as its engine computes them, with unrotated keys. Its token 0 is at
// `first_position`.
void WriteRows(const TestPages& pages, const ObjectHeader& header, uint64_t text, uint64_t first_position);

// A target over all of `pages`.
LandTarget TestTarget(const TestPages& pages, std::vector<LandTarget::Segment> segments);

// Largest absolute difference between the pages and the expected contents of text `text`, landed with its token 0 at
// `first_position`: exact values, and rotated keys.
double LandingError(const TestPages& pages, const ObjectHeader& header, uint64_t text, uint64_t first_position);
// The same for the object's tuples, in place.
double TupleError(const Tier& tier, const Slot& slot, const ObjectHeader& header, uint64_t text);

}  // namespace ashlar::storage
