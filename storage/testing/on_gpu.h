// SPDX-License-Identifier: Apache-2.0
// OnGpu: an engine's memory on one GPU.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/gpu.h"
#include "storage/testing/engine.h"

namespace ashlar::storage {

class OnGpu {
 public:
  explicit OnGpu(const kernels::Gpu& gpu) : gpu_(gpu), arena_(gpu.MakeArena(8 << 20, &error_)) {}

  void Reset() { used_ = 0; }
  std::byte* Put(const void* data, uint64_t bytes) {
    std::byte* const taken = arena_->data() + used_;
    used_ += (bytes + 255) / 256 * 256;
    EXPECT_LE(used_, arena_->bytes());
    gpu_.CopyToDevice(taken, data, bytes);
    return taken;
  }
  // The rows, of which the first layer's keys begin the memory, are moved here.
  void Move(std::vector<PagedRows>& rows, uint64_t bytes) {
    const auto* const near = static_cast<const std::byte*>(rows.front().keys.base);
    std::byte* const far = Put(near, bytes);
    for (PagedRows& layer : rows) {
      layer.gpu = &gpu_;
      for (kernels::PagedSlots* slots : {&layer.keys, &layer.values}) {
        slots->base = far + (static_cast<const std::byte*>(slots->base) - near);
      }
    }
  }
  // Like TestSource. Replaces all earlier contents.
  PublishSource Source(const ObjectHeader& plan, uint64_t text) {
    Reset();
    PublishSource source = TestSource(plan, text);
    for (PublishSource::Tensor& tensor : source.tensors) {
      tensor.data = Put(tensor.data, plan.Find(tensor.layer, tensor.form)->Bytes());
      tensor.gpu = &gpu_;
    }
    const kernels::PagedSlots& slots = source.rows.front().keys;
    Move(source.rows, source.page_table->size() * slots.page_stride * sizeof(float));
    return source;
  }
  const kernels::Gpu& gpu() const { return gpu_; }

 private:
  const kernels::Gpu& gpu_;
  kernels::ArenaError error_;
  const std::unique_ptr<kernels::ArenaMemory> arena_;
  uint64_t used_ = 0;
};

}  // namespace ashlar::storage
