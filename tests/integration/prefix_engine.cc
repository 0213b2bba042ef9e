// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/prefix_engine.h"

#include <gtest/gtest.h>

#include <cstring>

#include "tests/integration/content.h"
#include "tests/integration/daemon_process.h"

namespace ashlar::integration {
namespace {

Content ContentOf(std::span<const int32_t> prefix, uint32_t layer, PartForm form, uint32_t rank) {
  return Content(ObjectKind::kPrefixBlock, prefix, layer, form, rank);
}

}  // namespace

PrefixEngine::PrefixEngine(const ClientOptions& options, const TensorShard& shard, const PrefixUse& prefixes,
                           uint32_t spare)
    : TestEngine(options, {.shard = shard, .prefixes = prefixes, .captures = kCaptures + spare}) {}

Match PrefixEngine::Lookup(const Tokens& prompt, const ConversationId& conversation,
                           std::span<const uint64_t> lengths) {
  return model().Lookup(Prompt{.tokens = prompt, .segment_lengths = lengths, .conversation = conversation});
}

template <typename Each>
void PrefixEngine::ForRows(std::span<const int32_t> text, uint64_t count, Each each) const {
  const uint64_t key_floats = uint64_t{shape().kv_heads} * shape().key_dim;
  const uint64_t value_floats = uint64_t{shape().kv_heads} * shape().value_dim;
  for (uint32_t i = 0; i < shape().layers; ++i) {
    for (uint64_t token = 0; token < count; ++token) {
      const auto prefix = text.first(token + 1);
      const uint32_t layer = 2 * i + 1, rank = shape().shard.rank;
      each(i, token, 0, key_floats, ContentOf(prefix, layer, PartForm::kKeys, rank));
      each(i, token, key_floats, value_floats, ContentOf(prefix, layer, PartForm::kValues, rank));
    }
  }
}

CommitParts PrefixEngine::Compute(const Text& text) {
  CommitParts parts{.tokens = text.tokens,
                    .prompt_tokens = text.tokens.size(),
                    .provenance = text.provenance,
                    .checkpoints = {},
                    .region = region(),
                    .page_table = source_table(),
                    .conversation = text.conversation};
  for (uint32_t capture = 0; capture < text.depths.size(); ++capture) {
    const auto prefix = std::span(text.tokens).first(text.depths[capture]);
    CapturedState& state = parts.checkpoints.emplace_back();
    state.depth = prefix.size();
    for (const PublishParts::Linear& at : places(capture)) {
      const auto write = [&](const std::byte* offset, PartForm form, uint64_t floats) -> const std::byte* {
        std::byte* data = region().data() + reinterpret_cast<uintptr_t>(offset);
        ContentOf(prefix, at.layer, form, shape().shard.rank).Write(reinterpret_cast<float*>(data), 0, floats);
        return data;
      };
      state.linear.push_back({.layer = at.layer,
                              .state = write(at.state, PartForm::kState, kValueHeads * kDk * kDv),
                              .conv_tail = write(at.conv_tail, PartForm::kConvTail, (kConvKernel - 1) * kChannels)});
    }
  }
  ForRows(text.tokens, text.tokens.size(),
          [&](uint32_t attention, uint64_t token, uint64_t at, uint64_t floats, const Content& content) {
            content.Write(Row(source_table(), attention, token) + at, 0, floats);
          });
  return parts;
}

std::vector<CommitOutcome> PrefixEngine::Commit(const Text& text, const Match* match) {
  return model().Commit(match, Compute(text));
}

Landing PrefixEngine::LandPrefix(const Match& match) {
  const LandSegment prefix[] = {{.segment = LandSegment::kPrefix}};
  return model().Land(match, target_table(), prefix);
}

void PrefixEngine::ExpectResumes(const Match& match, const Tokens& prompt, uint64_t depth) {
  ASSERT_EQ(match.prefix().depth, depth);
  EXPECT_EQ(match.prefix_depth(), depth);
  constexpr std::byte kPoison{0x5a};
  FillTargets(kPoison);
  const std::vector<MissReason> verdict = LandPrefix(match).Wait(kPatience);
  ASSERT_EQ(verdict, std::vector<MissReason>{MissReason::kNone});
  ExpectResumed(match, prompt, kPoison);
}

void PrefixEngine::ExpectResumed(const Match& match, const Tokens& prompt, std::byte around) {
  const uint64_t depth = match.prefix().depth;
  std::vector<float> expected;
  size_t wrong = 0;
  ForRows(prompt, depth, [&](uint32_t attention, uint64_t token, uint64_t at, uint64_t floats, const Content& content) {
    expected.resize(floats);
    content.Write(expected.data(), 0, floats);
    const float* row = Row(target_table(), attention, token) + at;
    wrong += std::memcmp(row, expected.data(), floats * sizeof(float)) == 0 ? 0 : 1;
  });
  EXPECT_EQ(wrong, 0u) << "rows differ";
  const std::vector<std::byte> untouched(RowFloats() * sizeof(float), around);
  for (uint32_t i = 0; i < shape().layers; ++i) {
    EXPECT_EQ(std::memcmp(Row(target_table(), i, depth), untouched.data(), untouched.size()), 0) << "behind the prefix";
  }
  ExpectStates(match, prompt);
}

void PrefixEngine::ExpectStates(const Match& match, const Tokens& prompt) const {
  const std::vector<MappedTuple>* const states = match.prefix_states();
  ASSERT_NE(states, nullptr);
  const auto prefix = std::span(prompt).first(match.prefix().depth - match.prefix().span_tokens);
  for (uint32_t layer = 0; layer < 2 * shape().layers; layer += 2) {
    const auto expect = [&](PartForm form, uint64_t first, const void* mapped, uint64_t floats) {
      std::vector<float> content(floats);
      ContentOf(prefix, layer, form, shape().shard.rank).Write(content.data(), first, floats);
      EXPECT_EQ(std::memcmp(mapped, content.data(), floats * sizeof(float)), 0) << "layer " << layer;
    };
    const MappedTuple& tuple = (*states)[layer];
    EXPECT_EQ(tuple.view.position, 0);
    for (uint32_t head = 0; head < kValueHeads; ++head) {
      EXPECT_EQ(tuple.view.heads[head].form, TransitionForm::kZero);
      expect(PartForm::kState, head * kDk * kDv, tuple.view.heads[head].state, kDk * kDv);
    }
    expect(PartForm::kConvTail, 0, tuple.conv_tail, (kConvKernel - 1) * kChannels);
  }
}

std::string PrefixEngine::StateAfter(const Tokens& text, uint32_t layer) const {
  std::vector<float> state(kDk * kDv);
  ContentOf(text, layer, PartForm::kState, shape().shard.rank).Write(state.data(), 0, state.size());
  return std::string(reinterpret_cast<const char*>(state.data()), state.size() * sizeof(float));
}

std::string PrefixEngine::ValuesAt(const Tokens& text, uint64_t token, uint32_t layer) const {
  std::vector<float> row(uint64_t{shape().kv_heads} * shape().value_dim);
  ContentOf(std::span(text).first(token + 1), layer, PartForm::kValues, shape().shard.rank)
      .Write(row.data(), 0, row.size());
  return std::string(reinterpret_cast<const char*>(row.data()), row.size() * sizeof(float));
}

}  // namespace ashlar::integration
