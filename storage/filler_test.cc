// Of whole ways between tiers the tests of placement see enough; here is what they cannot: whose turn it is.
#include "storage/filler.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <vector>

#include "storage/testing/executors.h"
#include "storage/testing/rig.h"
#include "storage/testing/simulated_disk.h"

namespace ashlar::storage {
namespace {

constexpr uint64_t kExtents = 4;  // one piece

class FillerTest : public ::testing::Test {
 protected:
  FillerTest() {
    EXPECT_TRUE(ssd_->AddTenant(1, "tenant", 64 * limits::kExtentBytes).ok());
    EXPECT_TRUE(ssd_->Recover().ok());
  }

  std::shared_ptr<Filler::Fill> Start(Filler::End from, Filler::End to, Nanos needed_at) {
    return filler_.Start(from, to, kExtents, kExtents, needed_at,
                         {.progress = [](uint64_t) {},
                          .done =
                              [this, needed_at](const absl::Status& status) {
                                EXPECT_TRUE(status.ok()) << status;
                                ended_.push_back(needed_at);
                              }});
  }

  std::unique_ptr<MemoryTier> memory_ = TestTier({{1, 64}});
  SimulatedDisk disk_{SsdTier::SlabBytes(64 * limits::kExtentBytes), 1};
  ManualExecutor executor_, io_;
  std::unique_ptr<SsdTier> ssd_ = *SsdTier::Open({}, disk_.file(), disk_.records(), io_);
  Filler filler_{executor_, ssd_.get()};
  std::vector<Nanos> ended_;
};

TEST_F(FillerTest, ADiskThatRefusesDoesNotHoldUpMemory) {
  const Slot on_disk = *ssd_->Allocate(1, kExtents);
  const Slot first = *memory_->Allocate(1, kExtents), second = *memory_->Allocate(1, kExtents);
  io_.set_capacity(0);
  Start({memory_.get(), &first}, {nullptr, &on_disk}, 1);
  Start({memory_.get(), &first}, {memory_.get(), &second}, 2);
  filler_.Pump();
  executor_.CompleteAll();
  EXPECT_EQ(ended_, (std::vector<Nanos>{2}));

  io_.set_capacity(1024);
  filler_.Pump();
  io_.CompleteAll();
  EXPECT_EQ(ended_, (std::vector<Nanos>{2, 1}));
}

TEST_F(FillerTest, MemoryThatRefusesDoesNotHoldUpTheDisk) {
  const Slot on_disk = *ssd_->Allocate(1, kExtents);
  const Slot first = *memory_->Allocate(1, kExtents), second = *memory_->Allocate(1, kExtents);
  executor_.set_capacity(0);
  Start({memory_.get(), &first}, {memory_.get(), &second}, 1);
  Start({memory_.get(), &first}, {nullptr, &on_disk}, 2);
  filler_.Pump();
  io_.CompleteAll();
  EXPECT_EQ(ended_, (std::vector<Nanos>{2}));

  executor_.set_capacity(1024);
  filler_.Pump();
  executor_.CompleteAll();
  EXPECT_EQ(ended_, (std::vector<Nanos>{2, 1}));
}

TEST_F(FillerTest, WhatIsNeededFirstGoesFirst) {
  const Slot from = *memory_->Allocate(1, kExtents);
  std::vector<Slot> to(3);
  for (Slot& slot : to) slot = *memory_->Allocate(1, kExtents);
  executor_.set_capacity(1);
  Start({memory_.get(), &from}, {memory_.get(), &to[0]}, 30);
  Start({memory_.get(), &from}, {memory_.get(), &to[1]}, 20);
  const auto hastened = Start({memory_.get(), &from}, {memory_.get(), &to[2]}, 40);
  filler_.Hasten(*hastened, 10);
  for (int i = 0; i < 3; ++i) {
    filler_.Pump();
    executor_.CompleteAll();
  }
  EXPECT_EQ(ended_, (std::vector<Nanos>{40, 20, 30}));
}

}  // namespace
}  // namespace ashlar::storage
