// SPDX-License-Identifier: Apache-2.0
// Publishing from and landing into a GPU's memory, on the emulated one: a CPU thread that touches that memory gets a
// fatal signal.
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
#include "storage/objects/object_bytes.h"
#include "storage/objects/tier_copier.h"
#include "storage/testing/recorded_landing.h"
#include "storage/testing/rig.h"
#include "storage/testing/simulated_disk.h"
#include "storage/transfer/gpu_lane.h"

namespace ashlar::storage {
namespace {

using kernels::cuda::emulator::DeviceWork;
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
  // Frees all taken memory. (Every copy and kernel of the emulated GPU opens and closes all memory.)
  void Reset() { used_ = 0; }
  std::byte* Take(uint64_t bytes) {
    std::byte* const taken = arena_->data() + used_;
    used_ += (bytes + 255) / 256 * 256;
    EXPECT_LE(used_, arena_->bytes());
    return taken;
  }
  std::byte* CopyToDevice(const void* data, uint64_t bytes) {
    std::byte* const taken = Take(bytes);
    EmulatedGpu().kernels().memory()->CopyToDevice(taken, data, bytes);
    return taken;
  }

 private:
  kernels::ArenaError error_;
  const std::unique_ptr<kernels::ArenaMemory> arena_ = EmulatedGpu().MakeArena(8 << 20, &error_);
  uint64_t used_ = 0;
};

// The rows of pages that begin where the first layer's keys do, moved to `far`.
void Rebase(std::vector<PagedRows>& rows, std::byte* far) {
  const auto* const near = static_cast<const std::byte*>(rows.front().keys.base);
  for (PagedRows& layer : rows) {
    layer.gpu = &EmulatedGpu();
    for (kernels::PagedSlots* slots : {&layer.keys, &layer.values}) {
      slots->base = far + (static_cast<const std::byte*>(slots->base) - near);
    }
  }
}

// The parameter is where objects are stored: in dram, which the GPU reaches, or in its own memory.
class GpuMoves : public ::testing::TestWithParam<bool> {
 protected:
  struct Object {
    ObjectHeader header;
    Slot slot;
    uint64_t text;
  };
  enum class Where { kRows, kTensors, kAll };  // the parts of a source that are on the GPU

  GpuMoves() {
    tier_ = *MemoryTier::Make({.capacity_bytes = 64 * limits::kExtentBytes,
                               .arena_bytes = 8 * limits::kExtentBytes,
                               .arena = {.gpu = &EmulatedGpu()},
                               .on_gpu = GetParam()});
    EXPECT_TRUE(tier_->AddTenant(1, 64 * limits::kExtentBytes).ok());
    lane_ = *GpuLane::Make(EmulatedGpu(), 1);
    mover_.emplace(kernels::Host(), workers_, executor_, *tier_, /*turn_bytes=*/1, std::vector{lane_.get()});
  }

  PublishSource FarSource(const ObjectHeader& plan, uint64_t text, Where where) {
    PublishSource source = TestSource(plan, text);
    if (where != Where::kRows) {
      for (PublishSource::Tensor& tensor : source.tensors) {
        tensor.data = far_.CopyToDevice(tensor.data, plan.Find(tensor.layer, tensor.form)->Bytes());
        tensor.gpu = &EmulatedGpu();
      }
    }
    if (where != Where::kTensors) {
      const kernels::PagedSlots& slots = source.rows.front().keys;
      Rebase(source.rows, far_.CopyToDevice(slots.base, source.page_table->size() * slots.page_stride * sizeof(float)));
    }
    return source;
  }

  Object Publish(uint64_t text, uint64_t tokens, Where where = Where::kAll) {
    far_.Reset();
    Object object{TestPlan(text, tokens), {}, text};
    object.slot = *tier_->Allocate(1, object.header.Extents());
    EXPECT_TRUE(mover_->Publish(object.header, object.slot, FarSource(object.header, text, where), CancelFlag(),
                                [&](std::optional<ObjectHeader> header) { object.header = header.value(); }));
    executor_.CompleteAll();
    return object;
  }

  // Returns the indexes of the corrupt sources. `pages` then hold the bytes of the GPU's pages.
  std::vector<size_t> Land(const std::vector<std::pair<const Object*, uint64_t>>& objects, TestPages& pages) {
    std::vector<LandSource> sources;
    for (const auto& [object, position] : objects) sources.push_back({&object->header, &object->slot, position});
    std::byte* const far = far_.CopyToDevice(pages.memory().data(), pages.memory().size_bytes());
    LandTarget target = TestTarget(pages, {});
    Rebase(target.rows, far);
    RecordedLanding landing;
    mover_->Land(1, std::move(sources), std::move(target), CancelFlag(), landing);
    executor_.CompleteAll();
    EXPECT_EQ(landing.done, MissReason::kNone);
    EXPECT_THAT(landing.progress, ElementsAre(1, 2));
    EmulatedGpu().kernels().memory()->CopyToHost(pages.memory().data(), far, pages.memory().size_bytes());
    return landing.corrupt;
  }

  FarMemory far_;
  std::unique_ptr<MemoryTier> tier_;
  std::unique_ptr<GpuLane> lane_;
  ManualExecutor executor_;
  InlineWorkers workers_;
  std::optional<Mover> mover_;
};

TEST_P(GpuMoves, LandWhatWasPublished) {
  for (const Where where : {Where::kAll, Where::kRows, Where::kTensors}) {
    if (GetParam() && where != Where::kAll) continue;
    SCOPED_TRACE(static_cast<int>(where));
    const Object object = Publish(1, 77, where);
    const DeviceWork as_the_gpu;  // gives this CPU access to the memory
    EXPECT_EQ(TupleError(*tier_, object.slot, object.header, object.text), 0.0);
    TestPages pages(30);
    EXPECT_THAT(Land({{&object, 333}, {&object, 33}}, pages), IsEmpty());
    EXPECT_LT(LandingError(pages, object.header, object.text, 333), 1e-5);
    EXPECT_LT(LandingError(pages, object.header, object.text, 33), 1e-5);
    std::string buffer;
    const auto read = DecodeHeader(ReadStart(*tier_, object.slot, limits::kExtentBytes, buffer));
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(*read, object.header);
    tier_->Free(object.slot);
  }
}

TEST_P(GpuMoves, ChecksumsDoNotDependOnTheMemory) {
  const Object object = Publish(5, 100);
  std::optional<ObjectHeader> expected;
  const auto host = TestTier({{1, 64}});
  Mover mover(kernels::Host(), workers_, executor_, *host);
  const Slot slot = *host->Allocate(1, object.header.Extents());
  ASSERT_TRUE(mover.Publish(TestPlan(5, 100), slot, TestSource(object.header, 5), CancelFlag(),
                            [&](std::optional<ObjectHeader> header) { expected = std::move(header); }));
  executor_.CompleteAll();
  EXPECT_EQ(expected, object.header);
}

TEST_P(GpuMoves, FindEveryCorruptPartAndLandTheOthers) {
  const Object good = Publish(1, 80);
  for (const Part& part : TestPlan(2, 120).parts) {
    SCOPED_TRACE(std::string(Name(part.form)) + " of layer " + std::to_string(part.layer));
    const Object bad = Publish(2, 120);
    {
      const DeviceWork as_the_gpu;
      Corrupt(*tier_, bad.slot, bad.header, part.layer, part.form);
    }
    TestPages pages(20);
    EXPECT_THAT(Land({{&bad, 0}, {&good, 200}}, pages), ElementsAre(0));
    EXPECT_LT(LandingError(pages, good.header, good.text, 200), 1e-5);
    tier_->Free(bad.slot);
  }
}

TEST_P(GpuMoves, CancelledLandingWritesNothing) {
  const Object object = Publish(1, 64);
  TestPages pages(8);
  LandTarget target = TestTarget(pages, {});
  Rebase(target.rows, far_.CopyToDevice(pages.memory().data(), pages.memory().size_bytes()));
  std::byte* const far = static_cast<std::byte*>(target.rows.front().keys.base);
  const CancelFlag cancel;
  RecordedLanding landing;
  mover_->Land(1, {{&object.header, &object.slot, 7}}, std::move(target), cancel, landing);
  cancel.Cancel();
  executor_.CompleteAll();
  EXPECT_EQ(landing.done, MissReason::kCancelled);
  EmulatedGpu().kernels().memory()->CopyToHost(pages.memory().data(), far, pages.memory().size_bytes());
  EXPECT_TRUE(std::ranges::all_of(pages.memory(), [](float number) { return number == 0; }));
}

TEST_P(GpuMoves, AccessTheArenasThatTheyReadAndWrite) {
  if (GetParam()) GTEST_SKIP() << "its own memory";
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

// However many checksums calls need, each gets its own, in the order of the calls.
TEST_P(GpuMoves, AQueueAcceptsMoreCallsThanItHolds) {
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

INSTANTIATE_TEST_SUITE_P(StoredIn, GpuMoves, ::testing::Bool(),
                         [](const auto& instance) { return instance.param ? "Hbm" : "Dram"; });

// An hbm tier on the GPU above dram and a disk.
class GpuTier : public ::testing::Test {
 protected:
  static constexpr uint64_t kExtents = 6;  // extents of an object: more than one piece

  GpuTier() {
    EXPECT_TRUE(hbm_->AddTenant(1, 64 * limits::kExtentBytes).ok());
    EXPECT_TRUE(ssd_->AddTenant(1, "tenant", 64 * limits::kExtentBytes).ok());
    EXPECT_TRUE(ssd_->Recover().ok());
  }

  // All of it is copied, and the end is reported.
  void Fill(TierCopier::End from, TierCopier::End to) {
    std::optional<absl::Status> ended;
    copier_.Start(from, to, kExtents, kExtents, 0,
                  {.progress = [](uint64_t) {}, .done = [&](const absl::Status& status) { ended = status; }});
    copier_.Pump();
    while (executor_.pending() + io_.pending() > 0) {
      executor_.CompleteAll();
      io_.CompleteAll();
    }
    EXPECT_EQ(ended, absl::OkStatus());
  }
  static std::byte Content(size_t extent, size_t at) {
    return static_cast<std::byte>(extent * 37 + at * 11 + at / 253);
  }

  std::unique_ptr<MemoryTier> hbm_ = *MemoryTier::Make({.kind = TierKind::kHbm,
                                                        .capacity_bytes = 64 * limits::kExtentBytes,
                                                        .arena_bytes = 8 * limits::kExtentBytes,
                                                        .arena = {.gpu = &EmulatedGpu()},
                                                        .on_gpu = true});
  std::unique_ptr<MemoryTier> dram_ = TestTier({{1, 64}});
  SimulatedDisk disk_{SsdTier::SlabBytes(64 * limits::kExtentBytes), 1};
  ManualExecutor executor_, io_;
  std::unique_ptr<SsdTier> ssd_ = *SsdTier::Open({}, disk_.file(), disk_.records(), io_);
  TierCopier copier_{executor_, ssd_.get()};
  Slot slot_;  // where a lookup found its object
};

TEST_F(GpuTier, EveryPairOfTiersMovesEveryByte) {
  const Slot near = *dram_->Allocate(1, kExtents), back = *dram_->Allocate(1, kExtents);
  const Slot far = *hbm_->Allocate(1, kExtents), again = *hbm_->Allocate(1, kExtents);
  const Slot on_disk = *ssd_->Allocate(1, kExtents);
  const ObjectBytes from(*dram_, near), to(*dram_, back);
  for (size_t e = 0; e < kExtents; ++e) {
    for (size_t i = 0; i < limits::kExtentBytes; ++i) from.extents()[e][i] = Content(e, i);
  }
  Fill({dram_.get(), &near}, {hbm_.get(), &far});
  Fill({hbm_.get(), &far}, {nullptr, &on_disk});
  Fill({nullptr, &on_disk}, {hbm_.get(), &again});
  Fill({hbm_.get(), &again}, {dram_.get(), &back});
  for (size_t e = 0; e < kExtents; ++e) {
    for (size_t i = 0; i < limits::kExtentBytes; ++i) ASSERT_EQ(to.extents()[e][i], Content(e, i)) << e << " " << i;
  }
}

TEST_F(GpuTier, AllocationFailureIsNoSpace) {
  const kernels::cuda::emulator::Fault full{.countdown = 0, .code = CUDA_ERROR_OUT_OF_MEMORY};
  EXPECT_TRUE(hbm_->Allocate(1, 1).ok());
  kernels::cuda::emulator::SetFault(&full);
  const absl::Status refused = hbm_->Allocate(1, 8).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("CUDA_ERROR_OUT_OF_MEMORY"));
  EXPECT_TRUE(hbm_->Allocate(1, 8).ok()) << "there may be some later";
}

// An object whose header changed in place is a miss, and may be published again.
TEST_F(GpuTier, HeadersAreVerifiedAtLookups) {
  InlineWorkers workers;
  ManualClock clock;
  CountingObserver observer;
  const auto lane = *GpuLane::Make(EmulatedGpu(), 1);
  Mover mover(kernels::Host(), workers, executor_, *hbm_, kTurnBytes, {lane.get()});
  Cache cache({}, {.memory = {hbm_.get(), dram_.get()}}, mover, executor_, clock, &observer);
  cache.OpenSession(1, 1);
  const ObjectHeader plan = TestPlan(1, 64);
  const auto reason = [&] {
    const Query query{.kind = plan.kind, .key = plan.key, .shard = plan.shard, .ns = plan.ns, .tokens = plan.tokens};
    const Match match = cache.Lookup(1, {&query, 1});
    if (match.found[0].slot != nullptr) slot_ = *match.found[0].slot;
    cache.Release(1, match.lease);
    return match.found[0].reason;
  };
  FarMemory far;
  const auto publish = [&] {
    const auto reserved = cache.Reserve(1, plan);
    PublishSource source = TestSource(plan, 1);
    for (PublishSource::Tensor& tensor : source.tensors) {
      tensor.data = far.CopyToDevice(tensor.data, plan.Find(tensor.layer, tensor.form)->Bytes());
      tensor.gpu = &EmulatedGpu();
    }
    const kernels::PagedSlots& slots = source.rows.front().keys;
    Rebase(source.rows, far.CopyToDevice(slots.base, source.page_table->size() * slots.page_stride * sizeof(float)));
    std::optional<PublishOutcome> outcome;
    cache.Publish(1, reserved.id, std::move(source), [&](PublishOutcome o) { outcome = o; });
    executor_.CompleteAll();
    return outcome;
  };
  EXPECT_EQ(publish(), PublishOutcome::kPublished);
  EXPECT_EQ(reason(), MissReason::kNone);
  {
    const DeviceWork as_the_gpu;
    CorruptHeader(*hbm_, slot_, 40);
  }
  EXPECT_EQ(reason(), MissReason::kChecksumFailed);
  EXPECT_EQ(publish(), PublishOutcome::kPublished);
  EXPECT_EQ(reason(), MissReason::kNone);
  cache.CloseSession(1, [] {});
  executor_.CompleteAll();
}

}  // namespace
}  // namespace ashlar::storage
