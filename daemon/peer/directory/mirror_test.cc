// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/directory/mirror.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/peer/directory/testing/directory_fixture.h"

namespace ashlar::daemon {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::IsEmpty;

EntryId IdOf(uint64_t ns, uint64_t key, uint8_t rank = 0) {
  return {Shorten(NamespaceOf(ns)), Shorten(DigestOf(key)), rank, 7};
}
std::vector<std::shared_ptr<const Member>> MembersOf(const std::set<uint64_t>& incarnations) {
  std::vector<std::shared_ptr<const Member>> members;
  for (const uint64_t i : incarnations) {
    members.push_back(std::make_shared<const Member>(Member{absl::StrCat("n", i), i, "", "", ""}));
  }
  return members;
}

TEST(Mirror, ReportsAtMostSixteenHoldersOfAKey) {
  Mirror mirror(1000);
  mirror.Open(Shorten(NamespaceOf(1)));
  std::set<uint64_t> all;
  for (uint64_t i = 1; i <= 40; ++i) {
    all.insert(i);
    mirror.Put(IdOf(1, 5), i, {.shard = {0, 8}, .bytes = i});
  }
  mirror.members().SetPresent(MembersOf(all));
  const Key keys[] = {DigestOf(4), DigestOf(5)};
  EXPECT_EQ(mirror.Locate(NamespaceOf(1), keys).size(), Directory::kMaxLocated);
  mirror.members().SetPresent(MembersOf({37}));
  const auto located = mirror.Locate(NamespaceOf(1), keys);
  ASSERT_EQ(located.size(), 1u) << "behind many absent ones";
  EXPECT_EQ(located[0].holding.bytes, 37u);
  EXPECT_EQ(located[0].index, 1u);
}

TEST(Mirror, ReportsTheDeepestDepthsFirst) {
  Mirror mirror(1000);
  mirror.Open(Shorten(NamespaceOf(1)));
  mirror.Put(IdOf(1, 1), 9, {.kind = ObjectKind::kCheckpoint, .depth = 300});
  mirror.Put(IdOf(1, 2), 9, {.kind = ObjectKind::kCheckpoint, .depth = 100});
  mirror.Put(IdOf(1, 3), 9, {.kind = ObjectKind::kSpan, .depth = 300, .span_begin = 200});
  mirror.Put(IdOf(1, 4), 9, {.kind = ObjectKind::kCheckpoint, .depth = 100});
  mirror.Put(IdOf(1, 5), 9, {.kind = ObjectKind::kPrefixBlock, .depth = 50});
  mirror.Put(IdOf(1, 6), 9, {.kind = ObjectKind::kSegment});
  mirror.Put(IdOf(1, 7), 9, {.kind = ObjectKind::kCheckpoint, .depth = 0});
  mirror.Put(IdOf(1, 8), 9, {.kind = ObjectKind::kCheckpoint, .depth = 200});
  const NamespaceId ns = NamespaceOf(1);
  EXPECT_THAT(mirror.Depths(ns, 300, 9), ElementsAre(300, 200, 100));
  EXPECT_THAT(mirror.Depths(ns, UINT64_MAX, 2), ElementsAre(300, 200));
  EXPECT_THAT(mirror.Depths(ns, 299, 1), ElementsAre(200));
  EXPECT_THAT(mirror.Depths(ns, 99, 9), IsEmpty());
  mirror.Remove(IdOf(1, 2), 9);
  mirror.Remove(IdOf(1, 1), 9);
  EXPECT_THAT(mirror.Depths(ns, 300, 9), ElementsAre(200, 100)) << "another entry has 100, too";
  mirror.Put(IdOf(1, 4), 9, {.kind = ObjectKind::kCheckpoint, .depth = 101});
  EXPECT_THAT(mirror.Depths(ns, 199, 9), ElementsAre(101));
  EXPECT_THAT(mirror.Depths(NamespaceOf(2), 300, 9), IsEmpty());
}

TEST(Mirror, ReportsSpansByTheirBeginning) {
  Mirror mirror(1000);
  mirror.Open(Shorten(NamespaceOf(1)));
  uint64_t key = 0;
  for (const auto& [begin, end] : std::vector<std::pair<uint32_t, uint32_t>>{
           {199, 290}, {200, 210}, {200, 300}, {200, 300}, {200, 250}, {201, 202}}) {
    mirror.Put(IdOf(1, ++key), 9, {.kind = ObjectKind::kSpan, .depth = end, .span_begin = begin});
  }
  const NamespaceId ns = NamespaceOf(1);
  EXPECT_THAT(mirror.SpanEnds(ns, 200, UINT64_MAX, 9), ElementsAre(300, 250, 210));
  EXPECT_THAT(mirror.SpanEnds(ns, 200, 299, 1), ElementsAre(250));
  EXPECT_THAT(mirror.SpanEnds(ns, 200, 209, 9), IsEmpty());
  EXPECT_THAT(mirror.SpanEnds(ns, 198, 300, 9), IsEmpty());
  EXPECT_THAT(mirror.SpanEnds(ns, UINT64_MAX, UINT64_MAX, 9), IsEmpty());
  EXPECT_THAT(mirror.Depths(ns, 300, 9), IsEmpty());
  mirror.Remove(IdOf(1, 3), 9);
  EXPECT_THAT(mirror.SpanEnds(ns, 200, 300, 9), ElementsAre(300, 250, 210));
  mirror.Remove(IdOf(1, 4), 9);
  EXPECT_THAT(mirror.SpanEnds(ns, 200, 300, 9), ElementsAre(250, 210));
}

// An interrupted read starts again: neither its entries nor the older ones survive the next read.
TEST(Mirror, RestartsAnInterruptedRound) {
  Mirror mirror(1000);
  const ShortDigest ns = Shorten(NamespaceOf(1));
  mirror.Open(ns);
  mirror.members().SetPresent(MembersOf({9}));
  for (const uint64_t key : {1, 2, 3}) mirror.Put(IdOf(1, key), 9, {});
  mirror.BeginRound(ns);
  for (const uint64_t key : {2, 4}) mirror.Put(IdOf(1, key), 9, {});
  mirror.BeginRound(ns);
  mirror.Put(IdOf(1, 3), 9, {});
  mirror.EndRound(ns);
  std::vector<size_t> found;
  const Key keys[] = {DigestOf(0), DigestOf(1), DigestOf(2), DigestOf(3), DigestOf(4)};
  for (const Located& located : mirror.Locate(NamespaceOf(1), keys)) found.push_back(located.index);
  EXPECT_THAT(found, ElementsAre(3));
  EXPECT_EQ(mirror.entries(), 1u);
}

TEST(Mirror, IgnoresGpusWithHighNumbers) {
  Mirror mirror(10);
  mirror.Open(Shorten(NamespaceOf(1)));
  mirror.members().SetPresent(MembersOf({1}));
  const Key key = DigestOf(1);
  for (const int gpu : {0, 27, 28, 254}) {
    mirror.Put(IdOf(1, 1, 0), 1, {.tier = TierKind::kHbm, .shard = {0, 8}, .gpu = static_cast<uint8_t>(gpu)});
    const std::vector<Located> located = mirror.Locate(NamespaceOf(1), {&key, 1});
    ASSERT_EQ(located.size(), 1u);
    EXPECT_EQ(located[0].holding.tier, TierKind::kHbm);
    EXPECT_EQ(located[0].holding.gpu, gpu < 28 ? std::optional<uint8_t>(gpu) : std::nullopt) << gpu;
  }
}

TEST(MemberNumbers, AreReusedAndBounded) {
  MemberNumbers numbers;
  for (uint64_t i = 0; i < 200000; ++i) {
    const auto number = numbers.Intern(i + 1);
    ASSERT_TRUE(number.has_value()) << i;
    if (i % 2 == 1 || i > 1000) numbers.Count(*number, 0);  // it has no entries, and is erased
  }
  EXPECT_EQ(numbers.Intern(1), 0);
  for (uint64_t i = 0; i < 65536 - 501; ++i) ASSERT_TRUE(numbers.Intern(1000000 + i).has_value()) << i;
  EXPECT_FALSE(numbers.Intern(9999999).has_value());
}

// A mirror and a model of it, which are changed together.
class ModelledMirror {
 public:
  static constexpr uint64_t kMost = 300, kKeys = 80, kMembers = 6, kSpanBegins = 3;

  explicit ModelledMirror(uint64_t seed) : random_(seed) {}

  // Draws one change and makes it in both. Returns the namespace that was drawn.
  uint64_t Change() {
    const uint64_t ns = random_() % 2, key = random_() % kKeys, member = 1 + random_() % kMembers;
    const auto rank = static_cast<uint8_t>(random_() % 2);
    const uint64_t what = random_() % 1000;
    if (what < 550) {
      Put({ns, key, member, rank});
    } else if (what < 950) {
      mirror_.Remove(IdOf(ns, key, rank), member);
      held_.erase({ns, key, member, rank});
    } else if (what < 970) {
      DrawMembers();
    } else if (what < 985) {
      open_.insert(ns);
      mirror_.Open(Shorten(NamespaceOf(ns)));
    } else if (what < 990) {
      open_.erase(ns);
      mirror_.Close(Shorten(NamespaceOf(ns)));
      std::erase_if(held_, [&](const auto& item) { return std::get<0>(item.first) == ns; });
    } else if (open_.contains(ns)) {
      HalfComesAgain(ns);
    }
    return ns;
  }

  void ExpectSameNumber() const { EXPECT_EQ(mirror_.entries(), held_.size()); }

  // The whole namespace equals the model.
  void ExpectSame(uint64_t ns) const {
    std::set<uint64_t, std::greater<>> depths;
    std::map<uint64_t, std::set<uint64_t, std::greater<>>> span_ends;
    for (uint64_t key = 0; key < kKeys; ++key) {
      const Key asked[] = {DigestOf(key)};
      size_t expected = 0;
      for (const auto& located : mirror_.Locate(NamespaceOf(ns), asked)) {
        const auto rank = static_cast<uint8_t>(located.holding.shard.rank);
        const auto found = held_.find({ns, key, located.member->incarnation, rank});
        ASSERT_NE(found, held_.end());
        ASSERT_EQ(found->second.first, located.holding);
        ++expected;
      }
      for (const auto& [at, held] : held_) {
        if (std::get<0>(at) != ns || std::get<1>(at) != key) continue;
        expected -= present_.contains(std::get<2>(at));
        const Holding& holding = held.first;
        if (holding.depth > 0 && holding.kind == ObjectKind::kCheckpoint) depths.insert(holding.depth);
        if (holding.depth > 0 && holding.kind == ObjectKind::kSpan) span_ends[holding.span_begin].insert(holding.depth);
      }
      EXPECT_EQ(expected, 0u);
    }
    EXPECT_THAT(mirror_.Depths(NamespaceOf(ns), UINT64_MAX, SIZE_MAX), ElementsAreArray(depths));
    for (uint64_t begin = 0; begin < kSpanBegins; ++begin) {
      EXPECT_THAT(mirror_.SpanEnds(NamespaceOf(ns), begin, UINT64_MAX, SIZE_MAX), ElementsAreArray(span_ends[begin]));
    }
  }

 private:
  using At = std::tuple<uint64_t, uint64_t, uint64_t, uint8_t>;  // namespace, key, member, rank

  void Put(const At& at) {
    const auto& [ns, key, member, rank] = at;
    Holding holding = {.tier = static_cast<TierKind>(1 + random_() % 3),
                       .kind = static_cast<ObjectKind>(1 + random_() % 4),
                       .shard = {rank, 8},
                       .bytes = random_() % (kMostHoldingBytes + 1),
                       .depth = static_cast<uint32_t>(random_() % 9),
                       .span_begin = static_cast<uint32_t>(random_() % kSpanBegins)};
    if (holding.tier == TierKind::kHbm && random_() % 4 > 0) holding.gpu = static_cast<uint8_t>(random_() % 28);
    mirror_.Put(IdOf(ns, key, rank), member, holding);
    if (open_.contains(ns) && (held_.contains(at) || held_.size() < kMost)) held_[at] = {holding, round_};
  }
  void DrawMembers() {
    present_.clear();
    for (uint64_t i = 1; i <= kMembers; ++i) {
      if (random_() % 2) present_.insert(i);
    }
    mirror_.members().SetPresent(MembersOf(present_));
  }
  // A round in which about half of a namespace is announced again; the other half is erased.
  void HalfComesAgain(uint64_t ns) {
    mirror_.BeginRound(Shorten(NamespaceOf(ns)));
    ++round_;
    for (auto& [at, held] : held_) {
      if (std::get<0>(at) != ns || random_() % 2) continue;
      mirror_.Put(IdOf(ns, std::get<1>(at), std::get<3>(at)), std::get<2>(at), held.first);
      held.second = round_;
    }
    mirror_.EndRound(Shorten(NamespaceOf(ns)));
    std::erase_if(held_, [&](const auto& i) { return std::get<0>(i.first) == ns && i.second.second < round_; });
  }

  std::mt19937_64 random_;
  Mirror mirror_{kMost};
  std::map<At, std::pair<Holding, int>> held_;  // and the round in which each was put
  std::set<uint64_t> open_, present_;
  int round_ = 0;
};

// Puts, removals, rounds, and members that join and leave. The state is compared with a model after each.
TEST(Mirror, AgreesWithAModel) {
  const uint64_t seed = std::random_device()();
  ModelledMirror both(seed);
  for (int step = 0; step < 20000 && !testing::Test::HasFailure(); ++step) {
    SCOPED_TRACE(absl::StrCat("seed ", seed, ", step ", step));
    const uint64_t ns = both.Change();
    both.ExpectSameNumber();
    if (step % 20 == 0) both.ExpectSame(ns);
  }
}

TEST(Mirror, IsReadWhileItIsWritten) {
  Mirror mirror(100000);
  mirror.Open(Shorten(NamespaceOf(1)));
  mirror.members().SetPresent(MembersOf({1, 2}));
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> found{0};
  std::vector<Key> keys;
  for (uint64_t key = 0; key < 2000; ++key) keys.push_back(DigestOf(key));
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      while (!stop) {
        for (const Located& located : mirror.Locate(NamespaceOf(1), keys)) {
          ASSERT_EQ(located.holding.bytes, located.member->incarnation * 1000);
          ++found;
        }
        mirror.Depths(NamespaceOf(1), 10, 10);
        mirror.SpanEnds(NamespaceOf(1), 5, 10, 10);
        mirror.Bytes();
      }
    });
  }
  for (int turn = 0; turn < 5 || found == 0; ++turn) {
    for (uint64_t key = 0; key < 2000; ++key) {
      for (const uint64_t member : {1, 2}) mirror.Put(IdOf(1, key), member, {.shard = {0, 8}, .bytes = member * 1000});
    }
    mirror.members().SetPresent(MembersOf({turn % 2 + 1u}));
    for (uint64_t key = 0; key < 2000; ++key) mirror.Remove(IdOf(1, key), 1);
    if (turn % 3 == 2) {
      mirror.Close(Shorten(NamespaceOf(1)));
      mirror.Open(Shorten(NamespaceOf(1)));
    }
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
}

}  // namespace
}  // namespace ashlar::daemon
