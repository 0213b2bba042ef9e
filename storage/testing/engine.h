// SPDX-License-Identifier: Apache-2.0
// An engine for tests: a small hybrid layout, objects whose every number is known, pages to publish from and land into.
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
kernels::LinearShape TestShape();  // of every linear layer

// The plan of the object that text number `text` has. Different texts, kinds or tenants have different keys.
ObjectHeader TestPlan(uint64_t text, uint64_t tokens, ObjectKind kind = ObjectKind::kSegment, TenantId tenant = 1);

// Keys and values of all attention layers in pages, the pages in no order.
class TestPages {
 public:
  explicit TestPages(uint32_t pages);
  static uint32_t Holding(uint64_t positions);  // the number of pages that so many positions take

  // The same memory through another page table: entries are pages of it.
  TestPages Through(std::vector<int32_t> page_table) const;

  std::vector<PagedRows> Rows() const;
  const std::vector<int32_t>& page_table() const { return page_table_; }
  std::span<float> memory() { return *memory_; }
  std::shared_ptr<const void> keep() const { return memory_; }

  // Row of one token, head and attention layer (0, 1 of kTestAttentionLayers).
  float* Key(size_t attention, uint64_t position, uint32_t head) const;
  float* Value(size_t attention, uint64_t position, uint32_t head) const;

 private:
  TestPages(std::vector<int32_t> page_table, std::shared_ptr<std::vector<float>> memory)
      : page_table_(std::move(page_table)), memory_(std::move(memory)) {}
  float* Page(size_t attention, uint64_t position) const;

  std::vector<int32_t> page_table_;
  std::shared_ptr<std::vector<float>> memory_;
};

// Everything that text number `text` publishes, laid out as an engine would: tensors densely, keys and values in pages.
// The content is a function of the text, layer, part and place alone.
PublishSource TestSource(const ObjectHeader& plan, uint64_t text);

// The rows of what the object stores of text number `text`, as its engine computes them: keys unturned. Its token 0
// stands at `first_position`.
void WriteRows(const TestPages& pages, const ObjectHeader& header, uint64_t text, uint64_t first_position);

// A target over all of `pages`.
LandTarget TestTarget(const TestPages& pages, std::vector<LandTarget::Segment> segments);

// Largest absolute difference between what stands in the pages and what text number `text`, landed with its token 0 at
// `first_position`, should have put there: exact values, keys turned by the position.
double LandingError(const TestPages& pages, const ObjectHeader& header, uint64_t text, uint64_t first_position);
// The same for the object's tuples, in place.
double TupleError(const Tier& tier, const Slot& slot, const ObjectHeader& header, uint64_t text);

}  // namespace ashlar::storage
