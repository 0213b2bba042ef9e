// SPDX-License-Identifier: Apache-2.0
// The engine API over a real daemon: prompts with one page table per group of layers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/integration/grouped_engine.h"

namespace ashlar::integration {
namespace {

using engine::Cache;
using engine::Code;
using engine::Request;
using testing::Contains;
using testing::StartsWith;
using testing::UnorderedElementsAreArray;
using Tables = GroupedEngine::Tables;

constexpr Grouping kAll[] = {Grouping::kOne, Grouping::kApart, Grouping::kCommon};

class EngineGroups : public testing::Test {
 protected:
  // Tokens that occur in no other text.
  Tokens NewText(size_t tokens) {
    Tokens text(tokens);
    std::iota(text.begin(), text.end(), next_);
    next_ += static_cast<int32_t>(tokens);
    return text;
  }
  static Asked Ask(const std::vector<Tokens>& segments) { return Asked(segments, {}, 9); }

  DaemonProcess daemon_;
  int32_t next_ = 1;
};

// Segments that one engine publishes from pages of its grouping land in pages of every other grouping with the same
// bytes.
TEST_F(EngineGroups, SegmentsLandWithTheSameBytesInAnyGrouping) {
  for (const Grouping from : kAll) {
    GroupedEngine publisher(daemon_, from);
    const std::vector<Tokens> segments = {NewText(50), NewText(91), NewText(70)};
    Asked asked = Ask(segments);
    asked.prompt.fill = true;
    const Tables own = publisher.Take(asked.tokens.size());
    publisher.Put(own, asked.prompt);
    Request published;
    ASSERT_GOOD(publisher.cache.Begin(&asked.prompt, 1, &published));
    publisher.PublishMissing(published);
    ASSERT_GOOD(publisher.LookAgain(published, own));
    ASSERT_GOOD(published.Finish());
    for (const Grouping to : kAll) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(from) << " to " << static_cast<int>(to));
      GroupedEngine other(daemon_, to);
      Asked again = Ask(segments);
      const Tables pages = other.Take(again.tokens.size());
      other.Poison(pages, again.tokens.size());
      other.Put(pages, again.prompt);
      Request request;
      ASSERT_GOOD(other.cache.Begin(&again.prompt, 1, &request));
      ASSERT_EQ(request.plan().cached_tokens, 50u + 83 + 62) << StepsOf(request);
      ASSERT_GOOD(request.WaitLayer(GroupedEngine::kNarrow));
      ASSERT_GOOD(request.Finish());
      other.ExpectLanded(pages, segments[0], 0);
      other.ExpectLanded(pages, std::span(segments[1]).subspan(4, 83), 54);
      other.ExpectLanded(pages, std::span(segments[2]).subspan(4, 62), 145);
      EXPECT_TRUE(other.IsPoison(pages, 50)) << "a seam is the engine's to compute";
      EXPECT_TRUE(other.IsPoison(pages, again.tokens.size() - 1));
    }
  }
}

// A text that is committed from one grouping is resumed in every other, immediately and by another process's plan.
TEST_F(EngineGroups, PrefixesAreSharedBetweenGroupings) {
  for (const Grouping from : kAll) {
    GroupedEngine writer(daemon_, from);
    const Tokens text = NewText(600);
    const Tables own = writer.Take(text.size());
    writer.Compute(own, text);
    const engine::LinearTensors state = writer.State(static_cast<float>(text[0]));
    const engine::Checkpoint end = {text.size(), &state, 1};
    uint8_t outcome = 0;
    engine::Text committed{.tokens = text.data(),
                           .token_count = text.size(),
                           .prompt_tokens = text.size(),
                           .checkpoints = &end,
                           .checkpoint_count = 1,
                           .outcomes = &outcome};
    writer.Put(own, committed);
    engine::Job job;
    ASSERT_GOOD(writer.cache.StartCommit(&committed, 1, &job));
    ASSERT_GOOD(job.Wait());
    ASSERT_STREQ(engine::CommitName(outcome), "kept");
    for (const Grouping to : kAll) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(from) << " to " << static_cast<int>(to));
      GroupedEngine reader(daemon_, to), scheduler(daemon_, to, /*memory=*/false);
      Asked longer({}, {}, 0);
      longer.tokens = text;
      longer.tokens.push_back(-5);
      longer.prompt = {.tokens = longer.tokens.data(), .token_count = longer.tokens.size()};
      Request begun;
      ASSERT_GOOD(scheduler.cache.Begin(&longer.prompt, 1, &begun));
      ASSERT_EQ(begun.plan().prefix_tokens, text.size());
      std::vector<uint8_t> bytes(begun.PlanBytes(nullptr, 0));
      begun.PlanBytes(bytes.data(), bytes.size());
      for (const uint64_t present : {0, 300}) {  // whole blocks of 256 tokens among these stay as they are
        const Tables pages = reader.Take(longer.tokens.size());
        reader.Poison(pages, longer.tokens.size());
        engine::PlanToLand plan{.plan = bytes.data(), .plan_bytes = bytes.size(), .present_tokens = present};
        reader.Put(pages, plan);
        Request landing;
        ASSERT_GOOD(reader.cache.StartLand(&plan, 1, &landing));
        ASSERT_GOOD(landing.WaitPlan());
        ASSERT_GOOD(landing.Finish());
        const uint64_t kept = present / 256 * 256;
        reader.ExpectLanded(pages, std::span(text).subspan(kept), kept);
        EXPECT_EQ(reader.IsPoison(pages, 0), kept > 0);
      }
      const Tables pages = reader.Take(longer.tokens.size());
      reader.Put(pages, longer.prompt);
      Request resumed;
      ASSERT_GOOD(reader.cache.Begin(&longer.prompt, 1, &resumed));
      ASSERT_GOOD(resumed.WaitLayer(GroupedEngine::kLinear));
      engine::Tuple tuple;
      ASSERT_GOOD(resumed.StepTuple(0, GroupedEngine::kLinear, &tuple));
      EXPECT_EQ(*static_cast<const float*>(tuple.heads[0].state), static_cast<float>(text[0]));
      ASSERT_GOOD(resumed.Finish());
      reader.ExpectLanded(pages, text, 0);
    }
  }
}

// An advance without outputs has no queries. The daemon computes the same states as this process.
TEST_F(EngineGroups, DaemonAdvancesLayersWithoutOutputs) {
  GroupedEngine publisher(daemon_, Grouping::kOne);
  const std::vector<Tokens> segments = {NewText(50), NewText(91)};
  Asked asked = Ask(segments);
  asked.prompt.fill = true;
  const Tables own = publisher.Take(asked.tokens.size());
  publisher.Put(own, asked.prompt);
  Request published;
  ASSERT_GOOD(publisher.cache.Begin(&asked.prompt, 1, &published));
  publisher.PublishMissing(published);
  ASSERT_GOOD(publisher.LookAgain(published, own));
  ASSERT_GOOD(published.Finish());
  std::vector<std::vector<float>> states;
  for (const engine::ComposeBy compose : {engine::ComposeBy::kProcess, engine::ComposeBy::kDaemon}) {
    SCOPED_TRACE(static_cast<int>(compose));
    GroupedEngine reader(daemon_, Grouping::kOne, true, nullptr, compose);
    Asked again = Ask(segments);
    const Tables pages = reader.Take(again.tokens.size());
    reader.Put(pages, again.prompt);
    Request request;
    ASSERT_GOOD(reader.cache.Begin(&again.prompt, 1, &request));
    const uint64_t computed = again.tokens.size() - request.plan().cached_tokens;
    ASSERT_EQ(computed, 8u + 9) << StepsOf(request);
    const std::vector<float> rows(computed * GroupedEngine::kHeads * GroupedEngine::kDim, 0.5F);
    std::vector<float>& state = states.emplace_back(GroupedEngine::kHeads * GroupedEngine::kDim * GroupedEngine::kDim);
    ASSERT_GOOD(request.Advance({.layer = GroupedEngine::kLinear,
                                 .end = again.tokens.size(),
                                 .inputs = {.tokens = computed, .k = rows.data(), .v = rows.data()},
                                 .state = {.data = state.data()}}));
    EXPECT_EQ(DaemonAdvances(reader.cache), compose == engine::ComposeBy::kDaemon ? 1u : 0u);
    ASSERT_GOOD(request.Finish());
  }
  EXPECT_EQ(states[0], states[1]);
}

TEST_F(EngineGroups, InvalidGroupsAreRefusedByName) {
  GroupedEngine good(daemon_, Grouping::kCommon);
  const std::string rpc = daemon_.client_options().rpc_socket, session = daemon_.client_options().session_socket;
  const auto open = [&](const std::function<void(engine::Memory&, engine::LayerGroup(&)[2])>& spoil) {
    engine::OpenOptions options = good.Options(rpc, session);
    engine::LayerGroup groups[2] = {options.memory.groups[0], options.memory.groups[1]};
    options.memory.groups = groups;
    options.memory.common_pages = false;
    spoil(options.memory, groups);
    Cache cache;
    return Say(Cache::Open(options, &cache));
  };
  const uint32_t linear = 0, wide = 1;
  EXPECT_EQ(open([](auto&, auto&) {}), "0 ");
  EXPECT_EQ(open([](auto& m, auto&) { m.groups = nullptr; }), "3 memory.groups: null");
  EXPECT_EQ(open([](auto& m, auto&) { m.group_count = 1; }), "3 memory.groups: attention layer 2 is in no group");
  EXPECT_EQ(open([](auto& m, auto&) { m.group_count = 0, m.common_pages = true; }),
            "3 memory.common_pages: requires groups");
  EXPECT_EQ(open([](auto&, auto& g) { g[1].layer_count = 0; }),
            "3 memory.groups[1].layer_count: 0; expected at least 1");
  EXPECT_EQ(open([](auto&, auto& g) { g[1].layers = nullptr; }), "3 memory.groups[1].layers: null");
  EXPECT_EQ(open([&](auto&, auto& g) { g[1].layers = &linear; }),
            "3 memory.groups[1].layers[0]: 0 is not an attention layer");
  EXPECT_EQ(open([&](auto&, auto& g) { g[1].layers = &wide; }),
            "3 memory.groups[1].layers[0]: layer 1 is in groups[0]");
  EXPECT_EQ(open([](auto& m, auto& g) { m.pages = 0, g[0].pages = 8; }),
            "3 memory.groups[1].pages: 0; expected at least 1");
  EXPECT_THAT(open([](auto&, auto& g) { g[0].page_tokens = 1 << 20; }), StartsWith("3 memory.groups[0].page_tokens: "));
  EXPECT_THAT(open([](auto& m, auto& g) { m.common_pages = true, g[1].pages = 8; }),
              StartsWith("3 memory.groups[1].pages: 8; with common_pages"));
  // Places that the daemon checks: only common pages may share memory, page by page.
  uint32_t count;
  std::vector<engine::PagePlace> places(good.cache.places(&count), good.cache.places(nullptr) + 2);
  const auto placed = [&](bool common, uint64_t shift) {
    return open([&](auto& m, auto&) {
      places[1].key_offset += shift, places[1].value_offset += shift;
      m.places = places.data(), m.place_count = 2;
      m.bytes = good.cache.bytes() + shift;
      m.common_pages = common;
    });
  };
  ASSERT_EQ(places[0].key_offset, places[1].key_offset) << "both groups' layers lie in the same pages";
  EXPECT_EQ(placed(true, 0), "0 ");
  EXPECT_THAT(placed(false, 0), StartsWith("3 memory: layers[1].key_offset: rows overlap those of layers[0]."));
  EXPECT_THAT(placed(true, places[0].page_stride - 32), StartsWith("3 memory: layers[1]."));
}

TEST_F(EngineGroups, InvalidTablesAreRefusedByName) {
  GroupedEngine grouped(daemon_, Grouping::kApart), one(daemon_, Grouping::kOne);
  Asked asked = Ask({NewText(60)});
  const Tables pages = grouped.Take(asked.tokens.size()), single = one.Take(asked.tokens.size());
  const auto begin = [&](GroupedEngine& engine, const Tables& in, const std::function<void(engine::Prompt&)>& spoil) {
    engine::Prompt prompt = asked.prompt;
    engine.Put(in, prompt);
    spoil(prompt);
    Request request;
    return Say(engine.cache.Begin(&prompt, 1, &request));
  };
  std::vector<engine::PageTable> tables = pages.tables;
  const auto in_tables = [&](const std::function<void(std::vector<engine::PageTable>&)>& spoil) {
    tables = pages.tables;
    spoil(tables);
    return begin(grouped, pages, [&](engine::Prompt& p) { p.page_tables = tables.data(); });
  };
  EXPECT_EQ(begin(one, single, [&](auto& p) { grouped.Put(pages, p); }),
            "3 prompts[0].page_tables: the cache has no groups of layers; use page_table");
  EXPECT_EQ(begin(grouped, pages, [&](auto& p) { one.Put(single, p); }),
            "3 prompts[0].page_table: the cache has groups of layers; use page_tables");
  EXPECT_EQ(begin(grouped, pages, [](auto& p) { p.page_table_count = 1; }),
            "3 prompts[0].page_table_count: 1 tables; the cache has 2 groups of layers");
  EXPECT_EQ(begin(grouped, pages, [](auto& p) { p.page_tables = nullptr; }), "3 prompts[0].page_tables: null");
  EXPECT_EQ(in_tables([](auto& t) { t[1].pages = nullptr; }), "3 prompts[0].page_tables[1].pages: null");
  EXPECT_EQ(in_tables([](auto& t) { t[1].count = 8; }),
            "3 prompts[0].page_tables[1].count: 8 pages of 8 tokens cannot hold 69 tokens");
  EXPECT_EQ(in_tables([](auto& t) { t[0].count = uint64_t{1} << 40; }), "3 prompts[0].page_tables[0].count: too many");
  std::vector<int32_t> narrow = pages.pages[1];
  for (const int32_t page : {-1, 500, INT32_MAX, INT32_MIN}) {
    narrow[8] = page;
    EXPECT_EQ(in_tables([&](auto& t) { t[1].pages = narrow.data(); }), "3 prompts[0].page_tables[1].pages[8]: page " +
                                                                           std::to_string(page) +
                                                                           " is out of range; the cache has 500 pages");
  }
  asked.prompt.fill = true;
  engine::Prompt prompt = asked.prompt;
  grouped.Put(pages, prompt);
  Request request;
  ASSERT_GOOD(grouped.cache.Begin(&prompt, 1, &request));
  const engine::LinearTensors tensors = grouped.State(1);
  engine::ComputedRun computed{.linear = &tensors, .linear_count = 1, .first_position = 13};
  EXPECT_EQ(Say(request.Publish(0, computed, nullptr)), "3 computed.page_tables: null");
  grouped.Put(pages, computed);
  EXPECT_EQ(Say(request.Publish(0, computed, nullptr)),
            "3 computed.page_tables[1].count: 9 pages of 8 tokens cannot hold 60 tokens after position 13");
  EXPECT_EQ(Say(request.LookAgain(pages.tables.data(), 1)),
            "3 look_again.page_table_count: 1 tables; the cache has 2 groups of layers");
  EXPECT_THAT(Say(request.LookAgain(single.pages[0].data(), single.pages[0].size())),
              StartsWith("3 look_again.page_table: "));
  grouped.PublishMissing(request);
  ASSERT_GOOD(request.LookAgain(pages.tables.data(), 2));
  ASSERT_GOOD(request.Finish());
  EXPECT_THAT(Say(request.Move(pages.tables.data(), 2)), StartsWith("9 "));
}

// A page belongs to one group at a time: the daemon refuses a landing that would write it for two groups, and it is a
// miss.
TEST_F(EngineGroups, ACommonPageOfTwoGroupsIsNotWritten) {
  GroupedEngine grouped(daemon_, Grouping::kCommon);
  Asked asked = Ask({NewText(60)});
  asked.prompt.fill = true;
  Tables pages = grouped.Take(asked.tokens.size());
  grouped.Put(pages, asked.prompt);
  Request request;
  ASSERT_GOOD(grouped.cache.Begin(&asked.prompt, 1, &request));
  grouped.PublishMissing(request);
  ASSERT_GOOD(grouped.LookAgain(request, pages));
  ASSERT_GOOD(request.Finish());
  grouped.Poison(pages, asked.tokens.size());
  pages.pages[1][2] = pages.pages[0][0];
  asked.prompt.fill = false;
  ASSERT_GOOD(grouped.cache.Begin(&asked.prompt, 1, &request));
  EXPECT_FALSE(request.plan().segments[0].used);
  EXPECT_STREQ(engine::MissName(request.plan().segments[0].reason), "invalid_request");
  request.Finish();
  EXPECT_TRUE(grouped.IsPoison(pages, 0));
}

// Pages of a request that ends early are returned once, to their own group.
TEST_F(EngineGroups, KeptPagesAreReturnedByGroup) {
  for (const Grouping grouping : {Grouping::kApart, Grouping::kCommon}) {
    GroupedEngine grouped(daemon_, grouping);
    Asked asked = Ask({NewText(60)});
    const Tables pages = grouped.Take(asked.tokens.size());
    grouped.Put(pages, asked.prompt);
    {
      asked.prompt.fill = true;
      Request request;
      ASSERT_GOOD(grouped.cache.Begin(&asked.prompt, 1, &request));
      grouped.PublishMissing(request);
      asked.prompt.fill = false;
    }
    {
      Request request;
      ASSERT_GOOD(grouped.cache.Begin(&asked.prompt, 1, &request));
      ASSERT_EQ(request.plan().cached_tokens, 60u);
    }
    Request next;
    EXPECT_THAT(Say(grouped.cache.Begin(&asked.prompt, 1, &next)),
                StartsWith("3 prompts[0].page_tables[0].pages[0]: page "));
    Asked other = Ask({NewText(60)});
    Tables mixed = grouped.Take(other.tokens.size());
    mixed.pages[0][1] = pages.pages[1][0];  // a page of the other group, which may have the same number
    grouped.Put(mixed, other.prompt);
    if (grouping == Grouping::kCommon) {
      EXPECT_THAT(Say(grouped.cache.Begin(&other.prompt, 1, &next)),
                  StartsWith("3 prompts[0].page_tables[0].pages[1]: page "));
    }
    std::vector<std::vector<int32_t>> back;
    for (uint32_t group = 0; group < 3; ++group) {
      std::vector<int32_t> taken(64);
      taken.resize(grouped.cache.TakeQuiescedPages(taken.data(), taken.size(), 5000, group));
      back.push_back(taken);
    }
    if (grouping == Grouping::kApart) {
      EXPECT_THAT(back[0], UnorderedElementsAreArray(pages.pages[0]));
      EXPECT_THAT(back[1], UnorderedElementsAreArray(pages.pages[1]));
    } else {
      std::vector<int32_t> all = pages.pages[0];
      all.insert(all.end(), pages.pages[1].begin(), pages.pages[1].end());
      EXPECT_THAT(back[0], UnorderedElementsAreArray(all));
      EXPECT_TRUE(back[1].empty());
    }
    EXPECT_TRUE(back[2].empty()) << "there is no third group";
    ASSERT_GOOD(grouped.cache.Begin(&asked.prompt, 1, &next));
    ASSERT_GOOD(next.Finish());
  }
}

// After a daemon's restart, pages are declared by groups again.
TEST_F(EngineGroups, SurviveADaemonsRestart) {
  GroupedEngine grouped(daemon_, Grouping::kApart);
  daemon_.Kill();
  daemon_.Start();
  Asked asked = Ask({NewText(60)});
  asked.prompt.fill = true;
  const Tables pages = grouped.Take(asked.tokens.size());
  grouped.Put(pages, asked.prompt);
  Request request;
  uint32_t missing = 0;
  ASSERT_TRUE(Eventually([&] {
    request = Request();
    std::vector<int32_t> back(64);  // after attempts that found no daemon
    for (const uint32_t group : {0u, 1u}) grouped.cache.TakeQuiescedPages(back.data(), back.size(), 0, group);
    if (!grouped.cache.Begin(&asked.prompt, 1, &request).ok()) return false;
    request.missing(&missing);
    return missing == 1;
  }));
  grouped.PublishMissing(request);
  ASSERT_GOOD(grouped.LookAgain(request, pages));
  ASSERT_EQ(request.plan().cached_tokens, 60u);
  ASSERT_GOOD(request.Finish());
  grouped.ExpectLanded(pages, std::span(asked.tokens).first(60), 0);
}

}  // namespace
}  // namespace ashlar::integration
