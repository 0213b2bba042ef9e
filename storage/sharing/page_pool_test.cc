// SPDX-License-Identifier: Apache-2.0
#include "storage/sharing/page_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

namespace ashlar::storage {
namespace {

using Content = PageContent;
using Want = PagePool::Want;

Key KeyOf(uint64_t text) {
  Key key;
  for (size_t i = 0; i < 8; ++i) key.bytes[i] = static_cast<uint8_t>((text * 0x9E3779B97F4A7C15u) >> (8 * i));
  return key;
}
Want Text(uint64_t text, uint32_t pages) {
  return {KeyOf(text), pages};
}
std::vector<PageId> Pages(const PagePool& pool, PagePool::AdmissionId admission, size_t segment) {
  const auto pages = pool.Segments(admission)[segment].pages;
  return {pages.begin(), pages.end()};
}
std::vector<PageId> Own(const PagePool& pool, PagePool::AdmissionId admission) {
  const auto pages = pool.OwnPages(admission);
  return {pages.begin(), pages.end()};
}

TEST(PagePool, RequestsShareOneCopy) {
  PagePool pool(20);
  const auto first = pool.Admit(std::vector{Text(1, 4), Text(2, 3)}, 2).admission;
  ASSERT_NE(first, 0u);
  EXPECT_EQ(pool.Segments(first)[0].content, Content::kToFill);
  EXPECT_TRUE(pool.Filled(first, 0));
  EXPECT_TRUE(pool.Filled(first, 1));
  const auto second = pool.Admit(std::vector{Text(2, 3), Text(1, 4), Text(2, 3)}, 2).admission;
  ASSERT_NE(second, 0u);
  EXPECT_EQ(pool.Segments(second)[1].content, Content::kFilled);
  EXPECT_EQ(Pages(pool, second, 1), Pages(pool, first, 0));
  EXPECT_EQ(Pages(pool, second, 0), Pages(pool, second, 2));
  EXPECT_TRUE(pool.Holds(KeyOf(1), 3, Pages(pool, first, 0)[3]));
  EXPECT_FALSE(pool.Holds(KeyOf(1), 2, Pages(pool, first, 0)[3]));
  EXPECT_FALSE(pool.Holds(KeyOf(2), 0, Pages(pool, first, 0)[0]));
  EXPECT_FALSE(pool.Holds(KeyOf(3), 0, Pages(pool, first, 0)[0]));
  EXPECT_EQ(pool.levels(),
            (PagePool::Levels{.pages = 20, .free = 9, .shared = 7, .own = 4, .admissions = 2, .segments = 2}));
  pool.End(first);
  pool.End(second);
  EXPECT_EQ(pool.levels(), (PagePool::Levels{.pages = 20, .free = 13, .idle = 7, .segments = 2}));
}

TEST(PagePool, OwnPagesCanBeTakenInParts) {
  PagePool whole(20), pool(20);
  for (PagePool* const each : {&whole, &pool}) {
    const auto idle = each->Admit(std::vector{Text(1, 4), Text(2, 4)}, 0).admission;
    EXPECT_TRUE(each->Filled(idle, 0) && each->Filled(idle, 1));
    each->End(idle);
  }
  EXPECT_EQ(pool.Admit(std::vector{Text(3, 2)}, 19, 0).admission, 0u) << "all of them, or nothing";
  ASSERT_NE(whole.Admit(std::vector{Text(3, 2)}, 17).admission, 0u);
  const auto admission = pool.Admit(std::vector{Text(3, 2)}, 17, 3).admission;
  ASSERT_NE(admission, 0u);
  EXPECT_EQ(pool.levels().own, 3u);
  EXPECT_EQ(pool.levels().reclaimed_segments, 0u) << "not before it is needed";
  PagePool::Shortage shortage;
  EXPECT_TRUE(pool.Extend(admission, 17, shortage, 0));
  for (uint64_t own = 8; own <= 18; own += 5) {
    EXPECT_TRUE(pool.Extend(admission, 17, shortage, 5));
    EXPECT_EQ(pool.levels().own, std::min<uint64_t>(own, 17));
  }
  EXPECT_EQ(pool.levels(), whole.levels());
  EXPECT_FALSE(pool.Extend(admission, 19, shortage, 0));
  EXPECT_EQ(shortage.needed, 2u);
}

TEST(PagePool, ConcurrentRequestInheritsFill) {
  PagePool pool(10);
  const auto filler = pool.Admit(std::vector{Text(1, 4)}, 0).admission;
  const auto second = pool.Admit(std::vector{Text(1, 4)}, 0).admission;
  const auto third = pool.Admit(std::vector{Text(1, 4)}, 0).admission;
  EXPECT_EQ(pool.Segments(second)[0].content, Content::kBeingFilled);
  EXPECT_EQ(Pages(pool, second, 0), Pages(pool, filler, 0));
  EXPECT_FALSE(pool.Filled(third, 0));
  pool.End(filler);
  EXPECT_EQ(pool.Segments(second)[0].content, Content::kToFill);
  EXPECT_EQ(pool.Segments(third)[0].content, Content::kBeingFilled);
  EXPECT_TRUE(pool.Filled(second, 0));
  EXPECT_EQ(pool.Segments(third)[0].content, Content::kFilled);
  EXPECT_TRUE(pool.Filled(third, 0));  // has no effect
  EXPECT_FALSE(pool.Filled(third, 1));
}

TEST(PagePool, OnlyRequestsThatCanFillSegmentsMustFillThem) {
  PagePool pool(20);
  const std::vector wants = {Text(1, 4), Text(2, 3), Text(1, 4)};
  const auto later = pool.Admit(wants, 0, UINT64_MAX, /*fills=*/false).admission;
  EXPECT_EQ(pool.Segments(later)[0].content, Content::kBeingFilled);
  EXPECT_FALSE(pool.Filled(later, 0));
  EXPECT_EQ(pool.MayWrite(Pages(pool, later, 0)[0]), PagePool::Writable::kNo);
  const auto second = pool.Admit(wants, 0).admission, third = pool.Admit(wants, 0).admission;
  EXPECT_EQ(pool.Segments(second)[0].content, Content::kToFill);
  EXPECT_EQ(pool.Segments(second)[1].content, Content::kToFill);

  const uint32_t first_text[] = {0}, second_text[] = {1};
  pool.SetFills(later, first_text);
  EXPECT_EQ(pool.Segments(later)[0].content, Content::kBeingFilled) << "another request fills it";
  pool.SetFills(second, second_text);
  EXPECT_EQ(pool.Segments(later)[2].content, Content::kToFill);
  EXPECT_EQ(pool.Segments(later)[1].content, Content::kBeingFilled);
  EXPECT_EQ(pool.Segments(second)[0].content, Content::kBeingFilled);
  EXPECT_EQ(pool.Segments(second)[1].content, Content::kToFill);
  EXPECT_TRUE(pool.Filled(later, 2));
  pool.SetFills(later, {});
  EXPECT_EQ(pool.Segments(second)[0].content, Content::kFilled);
  pool.End(second);
  EXPECT_EQ(pool.Segments(later)[1].content, Content::kBeingFilled) << "it is older, but cannot fill it";
  EXPECT_EQ(pool.Segments(third)[1].content, Content::kToFill);
  pool.End(third);
  EXPECT_EQ(pool.MayWrite(Pages(pool, later, 1)[0]), PagePool::Writable::kNo);
  const auto last = pool.Admit(wants, 0).admission;
  EXPECT_EQ(pool.Segments(last)[1].content, Content::kToFill);
  pool.End(later);
  pool.End(last);
  EXPECT_EQ(pool.levels(), (PagePool::Levels{.pages = 20, .free = 16, .idle = 4, .segments = 1}));
}

TEST(PagePool, AnotherRequestFillsASegmentOnceTheFirstHasStoppedWriting) {
  PagePool pool(6);
  const auto first = pool.Admit(std::vector{Text(1, 3)}, 0).admission;
  const auto second = pool.Admit(std::vector{Text(1, 3)}, 0).admission;
  const std::vector<PageId> shared = Pages(pool, first, 0);
  pool.Pin(shared);
  pool.SetFills(first, {});
  EXPECT_EQ(pool.Segments(first)[0].content, Content::kBeingFilled);
  EXPECT_EQ(pool.Segments(second)[0].content, Content::kBeingFilled);
  EXPECT_EQ(pool.MayWrite(shared[0]), PagePool::Writable::kNo);
  pool.Unpin(shared);
  EXPECT_EQ(pool.Segments(second)[0].content, Content::kToFill);
}

TEST(PagePool, UnfilledSegmentsAreNotKept) {
  PagePool pool(10);
  pool.End(pool.Admit(std::vector{Text(1, 4)}, 1).admission);
  EXPECT_EQ(pool.levels(), (PagePool::Levels{.pages = 10, .free = 10}));
  EXPECT_FALSE(pool.InUse());
}

TEST(PagePool, ErasedSegmentsAreNotShared) {
  PagePool pool(20);
  const auto running = pool.Admit(std::vector{Text(1, 4), Text(2, 3)}, 1).admission;
  EXPECT_TRUE(pool.Filled(running, 0));
  const auto over = pool.Admit(std::vector{Text(3, 5)}, 0).admission;
  EXPECT_TRUE(pool.Filled(over, 0));
  pool.End(over);
  const std::vector<PageId> held = Pages(pool, running, 0);
  pool.Erase();
  pool.Erase();
  EXPECT_EQ(pool.levels().idle, 0u) << "the segment without requests is erased";
  EXPECT_EQ(pool.levels().shared, 7u);
  EXPECT_EQ(Pages(pool, running, 0), held) << "requests keep what they have";
  EXPECT_TRUE(pool.Filled(running, 1)) << "and go on";
  const auto later = pool.Admit(std::vector{Text(1, 4)}, 0).admission;
  ASSERT_NE(later, 0u);
  EXPECT_EQ(pool.Segments(later)[0].content, Content::kToFill);
  EXPECT_NE(Pages(pool, later, 0), held);
  EXPECT_TRUE(pool.Filled(later, 0));
  pool.End(running);
  EXPECT_EQ(pool.levels().free, 16u) << "they go with their last request";
  pool.End(later);
  EXPECT_EQ(pool.levels(),
            (PagePool::Levels{.pages = 20, .free = 16, .idle = 4, .segments = 1, .reclaimed_segments = 1}));
}

TEST(PagePool, RefusesAtOnceAndReportsTheShortage) {
  PagePool pool(10);
  const auto running = pool.Admit(std::vector{Text(1, 3)}, 1).admission;
  const auto over = pool.Admit(std::vector{Text(2, 2), Text(3, 2)}, 0).admission;
  EXPECT_TRUE(pool.Filled(over, 0));
  EXPECT_TRUE(pool.Filled(over, 1));
  pool.End(over);
  const PagePool::Levels before = pool.levels();
  // It would share text 2, which is idle: only text 3 is left to reclaim.
  const PagePool::Answer answer = pool.Admit(std::vector{Text(2, 2), Text(4, 4)}, 1);
  EXPECT_EQ(answer.admission, 0u);
  EXPECT_EQ(answer.shortage.needed, 5u);
  EXPECT_EQ(answer.shortage.free, 2u);
  EXPECT_EQ(answer.shortage.reclaimable, 2u);
  EXPECT_EQ(answer.shortage.held, 6u);
  EXPECT_EQ(pool.levels(), before);
  PagePool::Shortage shortage;
  EXPECT_FALSE(pool.Extend(running, 8, shortage));
  EXPECT_EQ(shortage.needed, 7u);
  EXPECT_EQ(shortage.reclaimable, 4u);
  EXPECT_EQ(pool.levels(), before);
  EXPECT_EQ(Own(pool, running).size(), 1u);
}

TEST(PagePool, ReclaimsOnlyWhatIsNeededLeastRecentlyUsedFirst) {
  PagePool pool(9);
  for (uint64_t text : {1, 2, 3}) {
    const auto request = pool.Admit(std::vector{Text(text, 3)}, 0).admission;
    EXPECT_TRUE(pool.Filled(request, 0));
    pool.End(request);
  }
  pool.End(pool.Admit(std::vector{Text(1, 3)}, 0).admission);  // text 2 is the oldest now
  const auto request = pool.Admit({}, 2).admission;
  EXPECT_EQ(pool.levels().reclaimed_segments, 1u);
  EXPECT_EQ(pool.levels().free, 1u);
  pool.End(request);
  const auto again = pool.Admit(std::vector{Text(3, 3), Text(1, 3), Text(2, 3)}, 0).admission;
  EXPECT_EQ(pool.Segments(again)[0].content, Content::kFilled);
  EXPECT_EQ(pool.Segments(again)[1].content, Content::kFilled);
  EXPECT_EQ(pool.Segments(again)[2].content, Content::kToFill);
}

TEST(PagePool, ExtensionsKeepThePagesThatARequestHas) {
  PagePool pool(8);
  const auto request = pool.Admit({}, 2).admission;
  const std::vector<PageId> before = Own(pool, request);
  PagePool::Shortage shortage;
  EXPECT_TRUE(pool.Extend(request, 5, shortage));
  EXPECT_TRUE(pool.Extend(request, 5, shortage));  // a repetition allocates nothing
  EXPECT_TRUE(pool.Extend(request, 1, shortage));
  const std::vector<PageId> own = Own(pool, request);
  ASSERT_EQ(own.size(), 5u);
  EXPECT_TRUE(std::equal(before.begin(), before.end(), own.begin()));
  EXPECT_EQ(pool.levels().free, 3u);
}

TEST(PagePool, PagesBeingWrittenAreNotReused) {
  PagePool pool(6);
  const auto request = pool.Admit(std::vector{Text(1, 3)}, 2).admission;
  const std::vector<PageId> own = Own(pool, request), shared = Pages(pool, request, 0);
  EXPECT_EQ(pool.MayWrite(own[0]), PagePool::Writable::kOwn);
  EXPECT_EQ(pool.MayWrite(shared[0]), PagePool::Writable::kToFill);
  pool.Pin(own);
  pool.Pin(shared);
  pool.End(request);
  EXPECT_TRUE(pool.InUse());
  EXPECT_EQ(pool.MayWrite(own[0]), PagePool::Writable::kNo);
  EXPECT_EQ(pool.MayWrite(shared[0]), PagePool::Writable::kNo);
  EXPECT_EQ(pool.Admit({}, 2).admission, 0u);
  pool.Unpin(own);
  EXPECT_NE(pool.Admit({}, 3).admission, 0u);
  pool.Unpin(shared);
  EXPECT_NE(pool.Admit({}, 3).admission, 0u);
}

// An ended request's landing may still write corrupt bytes. They must not overwrite what the next request has filled.
TEST(PagePool, TheDutyToFillPassesOnceNoWritesRemain) {
  PagePool pool(6);
  const auto first = pool.Admit(std::vector{Text(1, 3)}, 0).admission;
  const auto second = pool.Admit(std::vector{Text(1, 3)}, 0).admission;
  const std::vector<PageId> shared = Pages(pool, first, 0);
  pool.Pin(shared);
  EXPECT_EQ(pool.Segments(first)[0].content, Content::kToFill);
  pool.End(first);
  EXPECT_EQ(pool.Segments(second)[0].content, Content::kBeingFilled);
  EXPECT_EQ(pool.MayWrite(shared[0]), PagePool::Writable::kNo);
  EXPECT_FALSE(pool.Filled(second, 0));
  pool.Unpin(shared);
  EXPECT_EQ(pool.Segments(second)[0].content, Content::kToFill);
  EXPECT_EQ(pool.MayWrite(shared[0]), PagePool::Writable::kToFill);
  EXPECT_TRUE(pool.Filled(second, 0));
}

TEST(PagePool, AFilledSegmentIsIdleOnceItsLastWriterHasEnded) {
  PagePool pool(4);
  const auto request = pool.Admit(std::vector{Text(1, 2)}, 0).admission;
  const std::vector<PageId> shared = Pages(pool, request, 0);
  pool.Pin(shared);
  EXPECT_TRUE(pool.Filled(request, 0));
  EXPECT_EQ(pool.MayWrite(shared[0]), PagePool::Writable::kNo);
  pool.End(request);
  EXPECT_EQ(pool.levels().shared, 2u);
  EXPECT_EQ(pool.Admit({}, 3).admission, 0u);
  pool.Unpin(shared);
  EXPECT_EQ(pool.levels().idle, 2u);
  EXPECT_FALSE(pool.InUse());
  EXPECT_NE(pool.Admit({}, 3).admission, 0u);
}

// A simple model of the pool: the owner of each page, and the pages of each text.
class Model {
 public:
  static constexpr uint32_t kPages = 40;
  static constexpr uint64_t kTexts = 12;
  static uint32_t PagesOf(uint64_t text) { return static_cast<uint32_t>(text % 5); }

  struct Request {
    std::vector<uint64_t> texts;
    uint64_t own = 0;
    bool fills = true;
  };
  struct Standing {
    bool filled = false;
    uint64_t last_use = 0;
  };

  bool Uses(PagePool::AdmissionId id, uint64_t text) const {
    const auto& texts = requests_.at(id).texts;
    return std::find(texts.begin(), texts.end(), text) != texts.end();
  }
  bool Used(uint64_t text) const {
    return std::any_of(requests_.begin(), requests_.end(), [&](const auto& entry) { return Uses(entry.first, text); });
  }
  PagePool::AdmissionId TierCopier(uint64_t text) const {
    for (const auto& [id, request] : requests_) {
      if (request.fills && Uses(id, text)) return id;
    }
    return 0;
  }

  PagePool::Levels Levels() const {
    PagePool::Levels levels{.pages = kPages, .admissions = requests_.size(), .reclaimed_segments = reclaimed_};
    for (const auto& [text, standing] : standing_) (Used(text) ? levels.shared : levels.idle) += PagesOf(text);
    for (const auto& [id, request] : requests_) levels.own += request.own;
    levels.segments = standing_.size();
    levels.free = kPages - levels.idle - levels.shared - levels.own;
    return levels;
  }

  PagePool::Shortage Lacking(const std::vector<uint64_t>& texts, uint64_t own) const {
    const PagePool::Levels levels = Levels();
    PagePool::Shortage lacking{.needed = own, .free = levels.free, .reclaimable = levels.idle};
    for (const uint64_t text : std::set(texts.begin(), texts.end())) {
      if (!standing_.contains(text)) {
        lacking.needed += PagesOf(text);
      } else if (!Used(text)) {
        lacking.reclaimable -= PagesOf(text);
      }
    }
    lacking.held = kPages - lacking.free - lacking.reclaimable;
    return lacking;
  }

  // There must be enough.
  void Admit(PagePool::AdmissionId id, std::vector<uint64_t> texts, uint64_t own, bool fills) {
    uint64_t needed = Lacking(texts, own).needed;
    requests_[id] = {std::move(texts), 0, fills};
    Reclaim(needed);
    for (const uint64_t text : requests_[id].texts) {
      if (PagesOf(text) > 0) standing_.try_emplace(text);
    }
    requests_[id].own = own;
  }
  void Extend(PagePool::AdmissionId id, uint64_t own) {
    if (own <= requests_[id].own) return;
    Reclaim(own - requests_[id].own);
    requests_[id].own = own;
  }
  void End(PagePool::AdmissionId id) {
    const std::vector<uint64_t> texts = requests_[id].texts;
    requests_.erase(id);
    std::set<uint64_t> seen;
    for (const uint64_t text : texts) {  // in the order of the request
      const auto found = standing_.find(text);
      if (found == standing_.end() || Used(text) || !seen.insert(text).second) continue;
      found->second.last_use = ++uses_;
      if (!found->second.filled) standing_.erase(found);
    }
  }

  std::map<PagePool::AdmissionId, Request> requests_;
  std::map<uint64_t, Standing> standing_;

 private:
  void Reclaim(uint64_t pages) {
    while (Levels().free < pages) {
      auto oldest = standing_.end();
      for (auto it = standing_.begin(); it != standing_.end(); ++it) {
        if (Used(it->first)) continue;
        if (oldest == standing_.end() || it->second.last_use < oldest->second.last_use) oldest = it;
      }
      standing_.erase(oldest);
      ++reclaimed_;
    }
  }

  uint64_t uses_ = 0, reclaimed_ = 0;
};

// Compares the pool's pages with the model: no page has two owners, texts are where the model has them, and the levels
// agree.
void ExpectAgrees(const PagePool& pool, const Model& model) {
  ASSERT_EQ(pool.levels(), model.Levels());
  std::map<PageId, std::string> owners;
  std::map<uint64_t, std::vector<PageId>> places;
  for (const auto& [id, request] : model.requests_) {
    const std::vector<PageId> own = Own(pool, id);
    ASSERT_EQ(own.size(), request.own);
    for (const PageId page : own) {
      ASSERT_TRUE(owners.emplace(page, "request").second) << page;
      ASSERT_EQ(pool.MayWrite(page), PagePool::Writable::kOwn);
    }
    const auto segments = pool.Segments(id);
    ASSERT_EQ(segments.size(), request.texts.size());
    for (size_t i = 0; i < segments.size(); ++i) {
      const uint64_t text = request.texts[i];
      ASSERT_EQ(segments[i].pages.size(), Model::PagesOf(text));
      if (segments[i].pages.empty()) continue;
      const std::vector<PageId> pages(segments[i].pages.begin(), segments[i].pages.end());
      const bool filled = model.standing_.at(text).filled;
      const bool mine = model.TierCopier(text) == id;
      ASSERT_EQ(segments[i].content, filled ? Content::kFilled : mine ? Content::kToFill : Content::kBeingFilled);
      ASSERT_EQ(places.emplace(text, pages).first->second, pages) << "text " << text;
    }
  }
  for (const auto& [text, pages] : places) {
    for (const PageId page : pages) ASSERT_TRUE(owners.emplace(page, "segment").second) << page;
  }
  for (const auto& [page, owner] : owners) ASSERT_TRUE(page >= 0 && page < static_cast<PageId>(Model::kPages));
}

TEST(PagePool, RandomRequestsAgainstANaiveModel) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const auto below = [&](uint64_t limit) { return random() % limit; };
  int admitted = 0, refused = 0;
  for (int round = 0; round < 20; ++round) {
    PagePool pool(Model::kPages);
    Model model;
    const auto any = [&] {
      return std::next(model.requests_.begin(), static_cast<long>(below(model.requests_.size())));
    };
    for (int step = 0; step < 500; ++step) {
      const uint64_t what = below(10);
      if (what < 4 || model.requests_.empty()) {
        std::vector<uint64_t> texts;
        std::vector<Want> wants;
        for (uint64_t i = below(6); i > 0; --i) texts.push_back(below(Model::kTexts));
        for (const uint64_t text : texts) wants.push_back(Text(text, Model::PagesOf(text)));
        const uint64_t own = below(8);
        const PagePool::Shortage lacking = model.Lacking(texts, own);
        const bool fills = below(4) > 0;
        const PagePool::Answer answer = pool.Admit(wants, own, UINT64_MAX, fills);
        const bool fits = lacking.needed <= lacking.free + lacking.reclaimable;
        ASSERT_EQ(answer.admission != 0, fits);
        ++(fits ? admitted : refused);
        if (fits) {
          model.Admit(answer.admission, texts, own, fills);
        } else {
          ASSERT_EQ(answer.shortage.needed, lacking.needed);
          ASSERT_EQ(answer.shortage.free, lacking.free);
          ASSERT_EQ(answer.shortage.reclaimable, lacking.reclaimable);
          ASSERT_EQ(answer.shortage.held, lacking.held);
        }
      } else if (what < 6) {
        const auto& [id, request] = *any();
        const size_t index = below(request.texts.size() + 1);
        bool may = false;
        if (index < request.texts.size() && Model::PagesOf(request.texts[index]) > 0) {
          Model::Standing& standing = model.standing_.at(request.texts[index]);
          may = standing.filled || model.TierCopier(request.texts[index]) == id;
          standing.filled |= may;
        }
        ASSERT_EQ(pool.Filled(id, index), may);
      } else if (what < 8) {
        const PagePool::AdmissionId id = any()->first;
        const uint64_t own = below(12), have = model.requests_[id].own;
        const PagePool::Shortage lacking = model.Lacking({}, own <= have ? 0 : own - have);
        PagePool::Shortage shortage;
        const bool fits = lacking.needed <= lacking.free + lacking.reclaimable;
        ASSERT_EQ(pool.Extend(id, own, shortage), fits);
        if (fits) model.Extend(id, own);
      } else {
        const PagePool::AdmissionId id = any()->first;
        pool.End(id);
        model.End(id);
      }
      ASSERT_NO_FATAL_FAILURE(ExpectAgrees(pool, model));
    }
    while (!model.requests_.empty()) {
      const PagePool::AdmissionId id = model.requests_.begin()->first;
      pool.End(id);
      model.End(id);
    }
    ASSERT_NO_FATAL_FAILURE(ExpectAgrees(pool, model));
    ASSERT_FALSE(pool.InUse());
    ASSERT_NE(pool.Admit({}, Model::kPages).admission, 0u) << "pages were lost";
  }
  EXPECT_GT(admitted, 100);
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace ashlar::storage
