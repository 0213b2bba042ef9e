// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/explanation_text.h"

#include <gtest/gtest.h>

#include "proto/key.h"
#include "proto/outcome.h"
#include "tools/ashlarctl/format.h"

namespace ashlar::ctl {
namespace {

v1::ExplainedText Text(MissReason reason) {
  v1::ExplainedText text;
  text.set_kind(static_cast<uint32_t>(ObjectKind::kSegment));
  text.set_tokens(512);
  text.set_miss_reason(static_cast<uint32_t>(reason));
  return text;
}

TEST(ExplanationText, DescribesEvictedObject) {
  v1::ExplainedText text = Text(MissReason::kEvicted);
  v1::Gone& gone = *text.mutable_gone();
  gone.set_reason(static_cast<uint32_t>(MissReason::kEvicted));
  gone.set_policy(static_cast<uint32_t>(PolicyKind::kLru));
  gone.set_tier(static_cast<uint32_t>(TierKind::kDram));
  gone.set_bytes(1258291);
  gone.set_uses(3);
  gone.set_seconds_ago(12);
  gone.set_lived_seconds(240);
  gone.set_idle_seconds(31);
  EXPECT_EQ(ExplanationText(text),
            "segment of 512 tokens: evicted 12 s ago from dram by lru, 1.2 MiB, used 3 times in 4.0 min, not in the "
            "last 31 s");
  EXPECT_EQ(ExplanationJson(text)["reason"], "evicted");
  EXPECT_EQ(ExplanationJson(text)["gone"]["policy"], "lru");
}

TEST(ExplanationText, DescribesTierOfHit) {
  v1::ExplainedText text = Text(MissReason::kNone);
  v1::Presence& present = *text.mutable_present();
  present.set_tier(static_cast<uint32_t>(TierKind::kSsd));
  present.set_bytes(2048);
  present.set_age_seconds(90);
  EXPECT_EQ(ExplanationText(text), "segment of 512 tokens: in ssd, 2.0 KiB, published 90 s ago, never used");
  present.set_uses(1);
  present.set_idle_seconds(0.5);
  present.set_references(2);
  EXPECT_EQ(ExplanationText(text),
            "segment of 512 tokens: in ssd, 2.0 KiB, published 90 s ago, used once, last 500 ms ago, held by 2");
  EXPECT_TRUE(ExplanationJson(text)["hit"].get<bool>());
}

TEST(ExplanationText, ListsHoldersAndGpus) {
  v1::ExplainedText text = Text(MissReason::kNeverSeen);
  v1::TextHolder* holder = text.add_holders();
  holder->set_node("node1");
  holder->set_tier(static_cast<uint32_t>(TierKind::kHbm));
  holder->set_gpu(0);
  EXPECT_EQ(ExplanationText(text), "segment of 512 tokens: never seen; also at node1 (hbm of GPU 0)");
  EXPECT_EQ(ExplanationJson(text)["holders"][0]["gpu"], 0);
  holder = text.add_holders();
  holder->set_node("node2");
  holder->set_tier(static_cast<uint32_t>(TierKind::kHbm));
  holder->set_rank(1);
  EXPECT_EQ(ExplanationText(text),
            "segment of 512 tokens: never seen; also at node1 (hbm of GPU 0), node2 (hbm, shard 1)");
  EXPECT_FALSE(ExplanationJson(text)["holders"][1].contains("gpu"));
  EXPECT_FALSE(ExplanationJson(text)["holders"][1].contains("unreachable"));
  text.set_miss_reason(static_cast<uint32_t>(MissReason::kHolderUnreachable));
  text.mutable_holders(1)->set_unreachable(true);
  EXPECT_EQ(
      ExplanationText(text),
      "segment of 512 tokens: holder unreachable; also at node1 (hbm of GPU 0), node2 (hbm, shard 1, unreachable)");
  EXPECT_TRUE(ExplanationJson(text)["holders"][1]["unreachable"].get<bool>());
}

TEST(ExplanationText, NamesTheFieldThatDiffers) {
  v1::ExplainedText text = Text(MissReason::kNamespaceDiffers);
  text.mutable_other_namespace()->set_ns("\x12\xab\x01\x02\x03\x04\x05");
  EXPECT_EQ(ExplanationText(text), "segment of 512 tokens: namespace differs: published under namespace 12ab01020304…");
  text.mutable_other_namespace()->set_field("identity.lora");
  text.mutable_other_namespace()->set_requested_value("\"\"");
  text.mutable_other_namespace()->set_other_value("\"a\"");
  EXPECT_EQ(ExplanationText(text),
            "segment of 512 tokens: namespace differs: published under namespace 12ab01020304…, which differs in "
            "identity.lora: \"\" here, \"a\" there");
}

TEST(ExplanationText, ABusyLookupStillReportsEvictions) {
  v1::ExplainedText text = Text(MissReason::kBusy);
  EXPECT_EQ(ExplanationText(text), "segment of 512 tokens: busy");
  v1::Gone& gone = *text.mutable_gone();
  gone.set_reason(static_cast<uint32_t>(MissReason::kAbandoned));
  gone.set_bytes(100);
  gone.set_seconds_ago(3);
  EXPECT_EQ(ExplanationText(text), "segment of 512 tokens: busy; abandoned 3.0 s ago, 100 B");
}

TEST(Format, NumbersAreShort) {
  EXPECT_EQ(Bytes(0), "0 B");
  EXPECT_EQ(Bytes(1023), "1023 B");
  EXPECT_EQ(Bytes(uint64_t{5} << 40), "5.0 TiB");
  EXPECT_EQ(Duration(0.0421), "42 ms");
  EXPECT_EQ(Duration(7200), "2.0 h");
  EXPECT_EQ(Duration(3 * 24 * 3600), "3.0 days");
  EXPECT_EQ(Percent(1, 3), "33.3 %");
  EXPECT_EQ(Percent(0, 0), "–");
}

}  // namespace
}  // namespace ashlar::ctl
