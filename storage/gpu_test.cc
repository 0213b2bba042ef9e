// Publishing from and landing into a GPU's memory, on the emulated one: a processor that touches that memory dies.
#include "kernels/gpu.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/emulator/driver.h"
#include "storage/gpu_lane.h"
#include "storage/testing/rig.h"

namespace ashlar::storage {
namespace {

using kernels::MemoryKind;
using kernels::cuda::emulator::Reaches;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

const kernels::Gpu& EmulatedGpu() {
  static std::string why;
  static const kernels::Gpu* const gpu = kernels::FindGpu(0, &why);
  if (gpu == nullptr) std::abort();
  return *gpu;
}

// An engine's memory on the GPU.
class FarMemory {
 public:
  std::byte* Take(uint64_t bytes) {
    std::byte* const taken = arena_->data() + used_;
    used_ += (bytes + 255) / 256 * 256;
    EXPECT_LE(used_, arena_->bytes());
    return taken;
  }
  std::byte* CopyIn(const void* data, uint64_t bytes) {
    std::byte* const taken = Take(bytes);
    EmulatedGpu().kernels().memory()->CopyIn(taken, data, bytes);
    return taken;
  }

 private:
  kernels::ArenaError error_;
  const std::unique_ptr<kernels::ArenaMemory> arena_ = EmulatedGpu().MakeArena(32 << 20, &error_);
  uint64_t used_ = 0;
};

// The rows of pages that begin where the first layer's keys do, moved to `far`.
void Rebase(std::vector<PagedRows>& rows, std::byte* far) {
  const auto* const near = static_cast<const std::byte*>(rows.front().keys.base);
  for (PagedRows& layer : rows) {
    layer.memory = MemoryKind::kDevice;
    for (kernels::PagedSlots* slots : {&layer.keys, &layer.values}) {
      slots->base = far + (static_cast<const std::byte*>(slots->base) - near);
    }
  }
}

class GpuMoves : public ::testing::Test {
 protected:
  struct Object {
    ObjectHeader header;
    Slot slot;
    uint64_t text;
  };
  enum class Where { kRows, kTensors, kAll };  // of a source that lies on the GPU

  GpuMoves() {
    tier_ = *MemoryTier::Make({.capacity_bytes = 64 * limits::kExtentBytes,
                               .arena_bytes = 8 * limits::kExtentBytes,
                               .arena = {.gpu = &EmulatedGpu()}});
    EXPECT_TRUE(tier_->AddTenant(1, 64 * limits::kExtentBytes).ok());
    lane_ = *GpuLane::Make(EmulatedGpu(), 1);
    mover_.emplace(kernels::Host(), workers_, executor_, *tier_, /*turn_bytes=*/1, lane_.get());
  }

  PublishSource FarSource(const ObjectHeader& plan, uint64_t text, Where where) {
    PublishSource source = TestSource(plan, text);
    if (where != Where::kRows) {
      for (PublishSource::Tensor& tensor : source.tensors) {
        tensor.data = far_.CopyIn(tensor.data, plan.Find(tensor.layer, tensor.form)->Bytes());
        tensor.memory = MemoryKind::kDevice;
      }
    }
    if (where != Where::kTensors) {
      const kernels::PagedSlots& slots = source.rows.front().keys;
      Rebase(source.rows, far_.CopyIn(slots.base, source.page_table->size() * slots.page_stride * sizeof(float)));
    }
    return source;
  }

  Object Publish(uint64_t text, uint64_t tokens, Where where = Where::kAll) {
    Object object{TestPlan(text, tokens), {}, text};
    object.slot = *tier_->Allocate(1, object.header.Extents());
    EXPECT_TRUE(mover_->Publish(object.header, object.slot, FarSource(object.header, text, where), CancelFlag(),
                                [&](std::optional<ObjectHeader> header) { object.header = header.value(); }));
    executor_.CompleteAll();
    return object;
  }

  // Which sources are corrupt. `pages` then hold what stands in those of the GPU.
  std::vector<size_t> Land(const std::vector<std::pair<const Object*, uint64_t>>& objects, TestPages& pages) {
    std::vector<LandSource> sources;
    for (const auto& [object, position] : objects) sources.push_back({&object->header, &object->slot, position});
    std::byte* const far = far_.CopyIn(pages.memory().data(), pages.memory().size_bytes());
    LandTarget target = TestTarget(pages, {});
    Rebase(target.rows, far);
    std::vector<size_t> corrupt;
    std::vector<uint32_t> progress;
    std::optional<MissReason> done;
    mover_->Land(std::move(sources), std::move(target), CancelFlag(),
                 {.progress = [&](uint32_t layers) { progress.push_back(layers); },
                  .corrupt = [&](size_t source) { corrupt.push_back(source); },
                  .done = [&](MissReason outcome) { done = outcome; }});
    executor_.CompleteAll();
    EXPECT_EQ(done, MissReason::kNone);
    EXPECT_THAT(progress, ElementsAre(1, 2));
    EmulatedGpu().kernels().memory()->CopyOut(pages.memory().data(), far, pages.memory().size_bytes());
    return corrupt;
  }

  FarMemory far_;
  std::unique_ptr<MemoryTier> tier_;
  std::unique_ptr<GpuLane> lane_;
  ManualExecutor executor_;
  InlineWorkers workers_;
  std::optional<Mover> mover_;
};

TEST_F(GpuMoves, LandWhatWasPublished) {
  for (const Where where : {Where::kAll, Where::kRows, Where::kTensors}) {
    SCOPED_TRACE(static_cast<int>(where));
    const Object object = Publish(1, 77, where);
    EXPECT_EQ(TupleError(*tier_, object.slot, object.header, object.text), 0.0);
    TestPages pages(30);
    EXPECT_THAT(Land({{&object, 333}, {&object, 33}}, pages), IsEmpty());
    EXPECT_LT(LandingError(pages, object.header, object.text, 333), 1e-5);
    EXPECT_LT(LandingError(pages, object.header, object.text, 33), 1e-5);
    tier_->Free(object.slot);
  }
}

TEST_F(GpuMoves, ChecksumsDoNotDependOnTheMemory) {
  const Object object = Publish(5, 100);
  std::optional<ObjectHeader> expected;
  const Slot slot = *tier_->Allocate(1, object.header.Extents());
  ASSERT_TRUE(mover_->Publish(TestPlan(5, 100), slot, TestSource(object.header, 5), CancelFlag(),
                              [&](std::optional<ObjectHeader> header) { expected = std::move(header); }));
  executor_.CompleteAll();
  EXPECT_EQ(expected, object.header);
}

TEST_F(GpuMoves, FindEveryCorruptPartAndLandTheOthers) {
  const Object good = Publish(1, 80);
  for (const Part& part : TestPlan(2, 120).parts) {
    SCOPED_TRACE(std::string(Name(part.form)) + " of layer " + std::to_string(part.layer));
    const Object bad = Publish(2, 120, Where::kRows);
    Corrupt(*tier_, bad.slot, bad.header, part.layer, part.form);
    TestPages pages(20);
    EXPECT_THAT(Land({{&bad, 0}, {&good, 200}}, pages), ElementsAre(0));
    EXPECT_LT(LandingError(pages, good.header, good.text, 200), 1e-5);
    tier_->Free(bad.slot);
  }
}

TEST_F(GpuMoves, NothingIsWrittenForACancelledLanding) {
  const Object object = Publish(1, 64);
  TestPages pages(8);
  LandTarget target = TestTarget(pages, {});
  Rebase(target.rows, far_.CopyIn(pages.memory().data(), pages.memory().size_bytes()));
  std::byte* const far = static_cast<std::byte*>(target.rows.front().keys.base);
  const CancelFlag cancel;
  std::optional<MissReason> done;
  mover_->Land({{&object.header, &object.slot, 7}}, std::move(target), cancel,
               {.progress = [](uint32_t) {}, .corrupt = [](size_t) {}, .done = [&](MissReason why) { done = why; }});
  cancel.Cancel();
  executor_.CompleteAll();
  EXPECT_EQ(done, MissReason::kCancelled);
  EmulatedGpu().kernels().memory()->CopyOut(pages.memory().data(), far, pages.memory().size_bytes());
  EXPECT_TRUE(std::ranges::all_of(pages.memory(), [](float number) { return number == 0; }));
}

TEST_F(GpuMoves, ReachTheArenasThatTheyReadAndWrite) {
  const Slot slot = *tier_->Allocate(1, 12);
  ASSERT_EQ(slot.runs.size(), 2u) << "two arenas";
  for (const ExtentRun& run : slot.runs) {
    EXPECT_TRUE(Reaches(tier_->Address(run.arena, run.first), run.count * limits::kExtentBytes));
  }
  const std::byte* const first = tier_->Address(slot.runs[0].arena, slot.runs[0].first);
  mover_.reset();
  tier_ = nullptr;
  EXPECT_FALSE(Reaches(first, 1)) << "what is unmapped must not stay registered";
}

// However many checksums calls leave, each gets its own, in the order of the calls.
TEST_F(GpuMoves, AQueueTakesMoreCallsThanItHasRoomFor) {
  constexpr size_t kCount = 1000, kCalls = GpuCalls::kChecksums / kCount + 10;
  std::vector<std::vector<uint64_t>> units(kCalls, std::vector<uint64_t>(kCount)), scales = units;
  std::vector<size_t> order;
  {
    GpuCalls calls(*lane_);
    for (size_t i = 0; i < kCalls; ++i) {
      calls.Submit(
          {kCount, units[i].data(), i % 2 == 0 ? scales[i].data() : nullptr},
          [&](kernels::Queue&, const GpuCalls::Checksums& reached) {
            EXPECT_TRUE(Reaches(reached.units, kCount * sizeof(uint64_t)));
            std::fill_n(reached.units, kCount, i);
            EXPECT_EQ(reached.scales != nullptr, i % 2 == 0);
            if (reached.scales != nullptr) std::fill_n(reached.scales, kCount, kCalls + i);
            return kernels::Event();
          },
          [&order, i] { order.push_back(i); });
    }
  }
  ASSERT_EQ(order.size(), kCalls);
  for (size_t i = 0; i < kCalls; ++i) {
    EXPECT_EQ(order[i], i);
    EXPECT_THAT(units[i], ::testing::Each(i));
    EXPECT_THAT(scales[i], ::testing::Each(i % 2 == 0 ? kCalls + i : 0));
  }
}

}  // namespace
}  // namespace ashlar::storage
