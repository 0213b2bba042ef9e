// SPDX-License-Identifier: Apache-2.0
// Power failures at random points of random work: acknowledged objects are found afterwards, byte for byte, and no
// object is partial. storage/testing/simulated_disk.h describes the fault model.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <utility>

#include "storage/testing/disk_objects.h"
#include "storage/testing/simulated_disk.h"
#include "storage/tier/ssd_tier.h"

namespace ashlar::storage {
namespace {

using limits::kExtentBytes;
constexpr uint64_t kBudget = 10 * kExtentBytes;  // of each tenant
constexpr TenantId kTenants = 2;
constexpr uint64_t kKeys = 8;        // of each tenant
constexpr uint64_t kMaxExtents = 6;  // extents of an object: two pieces

// Runs work and its completions in random order.
class RandomExecutor final : public Executor {
 public:
  RandomExecutor(std::mt19937_64& random, size_t capacity) : random_(random), capacity_(capacity) {}

  bool Run(TenantId, std::function<void()> work, std::function<void()> done) override {
    if (waiting_.size() + worked_.size() >= capacity_) return false;
    waiting_.push_back({std::move(work), std::move(done)});
    return true;
  }
  void Post(TenantId, std::function<void()>) override { FAIL() << "the tier posts nothing"; }

  bool idle() const { return waiting_.empty() && worked_.empty(); }
  void Step() {
    const uint64_t chosen = random_() % (waiting_.size() + worked_.size());
    if (chosen < waiting_.size()) {
      Item item = Remove(waiting_, chosen);
      item.work();
      worked_.push_back(std::move(item));
    } else {
      Remove(worked_, chosen - waiting_.size()).done();
    }
  }

 private:
  struct Item {
    std::function<void()> work, done;
  };
  static Item Remove(std::vector<Item>& items, size_t index) {
    Item item = std::move(items[index]);
    items.erase(items.begin() + static_cast<ptrdiff_t>(index));
    return item;
  }

  std::mt19937_64& random_;
  const size_t capacity_;
  std::vector<Item> waiting_, worked_;
};

// The test's record of an object that it stored or tried to store.
struct Stored {
  TenantId tenant;
  ObjectHeader header;
  Slot slot;
  std::vector<const std::byte*> bytes;
  enum State { kWriting, kCommitting, kAcknowledged, kErasing, kLost } state = kWriting;
  int readers = 0;
  PoolKind pool = PoolKind::kPublic;
};

const ExtentMemory& Contents() {
  static const ExtentMemory* const contents = [] {
    auto* memory = new ExtentMemory(64);
    memory->Fill(1);
    return memory;
  }();
  return *contents;
}

class Machine {
 public:
  explicit Machine(uint64_t seed)
      : random_(seed), disk_(SsdTier::SlabBytes(kTenants * kBudget), seed ^ 0x5eed), scratch_(kMaxExtents * 4) {}

  SimulatedDisk& disk() { return disk_; }

  // False: power failed meanwhile.
  bool Start() {
    tier_.reset();
    io_.emplace(random_, 1 + random_() % 8);
    free_scratch_.clear();
    for (size_t i = 0; i < 4; ++i) free_scratch_.push_back(i);
    auto tier =
        SsdTier::Open({.new_id = {1}, .pieces_in_flight = 1 + random_() % 3}, disk_.file(), disk_.records(), *io_);
    if (disk_.crashed()) return false;
    EXPECT_EQ(tier.status(), absl::OkStatus());
    tier_ = *std::move(tier);
    for (TenantId tenant = 0; tenant < kTenants; ++tenant) {
      EXPECT_EQ(tier_->AddTenant(tenant, "tenant " + std::to_string(tenant), kBudget), absl::OkStatus());
    }
    auto recovered = tier_->Recover();
    if (disk_.crashed()) return false;
    EXPECT_EQ(recovered.status(), absl::OkStatus());
    Compare(*recovered);
    return true;
  }

  // Works until `steps` are done or power fails.
  void Work(int steps) {
    for (int step = 0; step < steps && !disk_.crashed(); ++step) {
      if (random_() % 32 == 0) Tick();
      switch (random_() % 8) {
        case 0:
        case 1:
          StoreOne();
          break;
        case 2:
          EraseOne();
          break;
        case 3:
          ReadOne();
          break;
        default:
          if (!io_->idle()) io_->Step();
      }
      for (TenantId tenant = 0; tenant < kTenants; ++tenant) {
        ASSERT_LE(tier_->Usage(tenant).used_bytes, tier_->Usage(tenant).capacity_bytes);
      }
    }
  }

  // Finishes work in flight, retries failures, and accounts for every extent.
  void Settle() {
    disk_.set_faults({});
    for (int round = 0; round < 3; ++round) {
      Tick();  // a degraded disk is tried again, and then the waiting deletions
      while (!io_->idle()) io_->Step();
      for (TenantId tenant = 0; tenant < kTenants; ++tenant) (void)tier_->Allocate(tenant, kBudget / kExtentBytes + 1);
    }
    for (TenantId tenant = 0; tenant < kTenants; ++tenant) {
      uint64_t used = 0;
      for (const auto& stored : objects_) {
        if (stored->tenant != tenant) continue;
        ASSERT_EQ(stored->state, Stored::kAcknowledged);
        used += stored->slot.Extents() * kExtentBytes;
      }
      ASSERT_EQ(tier_->Usage(tenant).used_bytes, used);
    }
  }

 private:
  using Place = std::pair<TenantId, Key>;

  bool Present(TenantId tenant, const Key& key) const {
    return std::any_of(objects_.begin(), objects_.end(), [&](const auto& stored) {
      return stored->tenant == tenant && stored->header.key == key && stored->state < Stored::kErasing;
    });
  }

  void StoreOne() {
    const TenantId tenant = random_() % kTenants;
    const uint64_t number = random_() % kKeys, extents = 1 + random_() % kMaxExtents;
    if (Present(tenant, NumberedKey(number))) return;
    auto slot = tier_->Allocate(tenant, extents);
    if (!slot.ok()) return;
    auto stored = std::make_shared<Stored>(Stored{tenant, HeaderOfExtents(number, extents), *std::move(slot)});
    stored->pool = kPools[random_() % 2];
    for (uint64_t i = 0; i < extents; ++i) stored->bytes.push_back(Contents()[random_() % Contents().extents()]);
    const bool taken = tier_->Write(stored->slot, 0, stored->bytes, [this, stored](const absl::Status& status) {
      if (!status.ok()) return Abandon(stored);
      stored->state = Stored::kCommitting;
      tier_->Commit(stored->tenant, stored->pool, stored->header, stored->slot,
                    [this, stored](const absl::Status& committed) {
                      if (!committed.ok()) return Abandon(stored);
                      stored->state = Stored::kAcknowledged;
                    });
    });
    if (!taken) return tier_->Free(stored->slot);
    objects_.push_back(std::move(stored));
  }

  // The tier decides whether a failed commit left a record: the object may come back until its extents are free.
  void Abandon(const std::shared_ptr<Stored>& stored) {
    const uint64_t used = tier_->Usage(stored->tenant).used_bytes;
    tier_->Free(stored->slot);
    if (tier_->Usage(stored->tenant).used_bytes < used) {
      Erase(*stored);
    } else {
      stored->state = Stored::kLost;
      lost_.push_back(stored);
      std::erase(objects_, stored);
    }
  }

  void Tick() {
    constexpr Nanos kLongestWait = 60'000'000'000;
    tier_->health().Tick(now_ += kLongestWait);
  }

  void EraseOne() {
    if (objects_.empty()) return;
    const auto stored = objects_[random_() % objects_.size()];
    if (stored->state != Stored::kAcknowledged || stored->readers > 0) return;
    stored->state = Stored::kErasing;
    tier_->Erase(stored->tenant, stored->header.key, stored->slot, [this, stored] { Erase(*stored); });
  }

  void Erase(const Stored& gone) {
    std::erase_if(objects_, [&](const auto& stored) { return stored.get() == &gone; });
  }

  void ReadOne() {
    if (objects_.empty() || free_scratch_.empty()) return;
    const auto stored = objects_[random_() % objects_.size()];
    if (stored->state != Stored::kAcknowledged) return;
    const size_t scratch = free_scratch_.back();
    std::vector<std::byte*> targets;
    for (uint64_t i = 0; i < stored->slot.Extents(); ++i) targets.push_back(scratch_[scratch * kMaxExtents + i]);
    const bool taken = tier_->Read(stored->slot, 0, targets, [=, this](const absl::Status& status) {
      --stored->readers;
      free_scratch_.push_back(scratch);
      if (status.ok()) ExpectBytes(targets, stored->bytes);
    });
    if (!taken) return;
    ++stored->readers;
    free_scratch_.pop_back();
  }

  void ExpectBytes(const std::vector<std::byte*>& read, const std::vector<const std::byte*>& expected) {
    for (size_t i = 0; i < expected.size(); ++i) ASSERT_TRUE(SameExtent(read[i], expected[i])) << "extent " << i;
  }

  // Compares the objects that the new tier found with the old tier's record, and makes the new tier's the record.
  void Compare(const std::vector<SsdTier::Recovered>& recovered) {
    std::map<Place, const SsdTier::Recovered*> found;
    for (const auto& object : recovered) {
      ASSERT_TRUE(found.emplace(Place{object.tenant, object.header.key}, &object).second) << "a key twice";
    }
    std::vector<std::shared_ptr<Stored>> candidates = std::exchange(objects_, {});
    for (const auto& stored : candidates) {
      if (stored->state == Stored::kAcknowledged) {
        const auto object = found.find({stored->tenant, stored->header.key});
        ASSERT_NE(object, found.end()) << "an acknowledged object is gone";
        ASSERT_EQ(object->second->slot.runs, stored->slot.runs) << "an acknowledged object gave way to another";
      }
    }
    candidates.insert(candidates.end(), lost_.begin(), lost_.end());
    lost_.clear();
    for (const auto& [place, object] : found) {
      const auto stored = std::find_if(candidates.begin(), candidates.end(), [&](const auto& candidate) {
        return candidate->tenant == object->tenant && candidate->pool == object->pool &&
               candidate->header == object->header && candidate->slot.runs == object->slot.runs &&
               candidate->state >= Stored::kCommitting;
      });
      ASSERT_NE(stored, candidates.end()) << "an object came back that was erased, or never committed";
      ExpectWhole(*object, **stored);
      (*stored)->state = Stored::kAcknowledged;
      (*stored)->readers = 0;
      objects_.push_back(*stored);
    }
    Settle();
  }

  void ExpectWhole(const SsdTier::Recovered& object, const Stored& stored) {
    std::vector<std::byte*> targets;
    for (uint64_t i = 0; i < object.slot.Extents(); ++i) targets.push_back(scratch_[i]);
    std::optional<absl::Status> status;
    ASSERT_TRUE(tier_->Read(object.slot, 0, targets, [&](absl::Status s) { status = s; }));
    while (!io_->idle()) io_->Step();
    ASSERT_EQ(*status, absl::OkStatus());
    ExpectBytes(targets, stored.bytes);
  }

  std::mt19937_64 random_;
  SimulatedDisk disk_;
  ExtentMemory scratch_;
  std::vector<size_t> free_scratch_;
  std::optional<RandomExecutor> io_;
  std::unique_ptr<SsdTier> tier_;
  Nanos now_ = 0;
  std::vector<std::shared_ptr<Stored>> objects_;  // in the order of creation
  std::vector<std::shared_ptr<Stored>> lost_;     // freed, and unresolved until the next start
};

void LiveAndDie(uint64_t seed) {
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  Machine machine(random());
  for (int life = 0; life < 4 && !::testing::Test::HasFatalFailure(); ++life) {
    machine.disk().set_faults({});
    if (random() % 4 == 0) machine.disk().CrashAfter(random() % 6);  // while it starts
    if (!machine.Start()) {
      machine.disk().Restart();
      continue;
    }
    if (life % 2 == 1) {
      machine.disk().set_faults({.read_error = 0.05, .write_error = 0.05, .sync_error = 0.1, .record_error = 0.1});
    }
    machine.disk().CrashAfter(random() % 60);
    machine.Work(200);
    if (!machine.disk().crashed() && random() % 2 == 0) {
      machine.disk().CrashAfter(uint64_t{1} << 40);  // not while a degraded disk is retried
      machine.Settle();
    }
    machine.disk().Restart();
  }
}

TEST(SsdCrash, AcknowledgedObjectsSurvivePowerFailures) {
  const uint64_t first = std::random_device{}();
  for (uint64_t seed = first; seed < first + 400 && !::testing::Test::HasFatalFailure(); ++seed) LiveAndDie(seed);
}

// Repeats the same work, once for every point at which power can fail.
TEST(SsdCrash, CoversEveryPoint) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  uint64_t points = 1;
  for (uint64_t point = 0; point < points && !::testing::Test::HasFatalFailure(); ++point) {
    SCOPED_TRACE(point);
    Machine machine(seed);
    machine.disk().CrashAfter(point);
    if (machine.Start()) machine.Work(150);
    // Until a crash point is beyond the end of the work: then all of its points were tried.
    if (machine.disk().crashed()) points = point + 2;
    machine.disk().Restart();
    ASSERT_TRUE(machine.Start());
  }
  EXPECT_GT(points, 20u);
}

// No promise covers a disk that lies about its flushes. This shows that the tests above would detect lost data.
TEST(SsdCrash, DetectsADiskThatIgnoresSyncs) {
  SimulatedDisk disk(SsdTier::SlabBytes(kBudget), std::random_device{}());
  disk.set_faults({.lost_flush = 1});
  std::mt19937_64 random(1);
  int damaged = 0;
  for (int round = 0; round < 8 && damaged == 0; ++round) {
    RandomExecutor io(random, 8);
    auto tier = SsdTier::Open({.new_id = {1}}, disk.file(), disk.records(), io);
    if (!tier.ok()) {
      ++damaged;  // the slab's own header was lost
      break;
    }
    ASSERT_EQ((*tier)->AddTenant(0, "tenant", kBudget), absl::OkStatus());
    ASSERT_TRUE((*tier)->Recover().ok());
    const Slot slot = (*tier)->Allocate(0, 1).value();
    ASSERT_TRUE((*tier)->Write(slot, 0, {Contents()[round]}, [](absl::Status) {}));
    while (!io.idle()) io.Step();
    bool acknowledged = false;
    (*tier)->Commit(0, PoolKind::kPublic, HeaderOfExtents(round, 1), slot,
                    [&](absl::Status s) { acknowledged = s.ok(); });
    while (!io.idle()) io.Step();
    ASSERT_TRUE(acknowledged);
    disk.Crash();
    disk.Restart();
    ExtentMemory read(1);
    ASSERT_EQ(disk.file().Read(slot.runs[0].first * kExtentBytes, {read[0], kExtentBytes}), absl::OkStatus());
    damaged += !SameExtent(read[0], Contents()[round]);
  }
  EXPECT_GT(damaged, 0);
}

}  // namespace
}  // namespace ashlar::storage
