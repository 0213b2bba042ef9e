// SPDX-License-Identifier: Apache-2.0
#include "storage/testing/prefix_engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "storage/objects/object_bytes.h"

namespace ashlar::storage {
namespace {

uint64_t Mix(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Returns, for each depth, a number that depends on all tokens before it.
std::vector<uint64_t> Hashes(std::span<const int32_t> tokens) {
  std::vector<uint64_t> hashes = {1};
  for (const int32_t token : tokens) hashes.push_back(Mix(hashes.back() ^ static_cast<uint32_t>(token)));
  return hashes;
}

float Number(uint64_t hash, uint32_t layer, PartForm form, uint64_t place) {
  const uint64_t x = Mix(hash ^ (uint64_t{layer} << 48) ^ (static_cast<uint64_t>(form) << 40) ^ place);
  return static_cast<float>(static_cast<int64_t>(x >> 40)) / static_cast<float>(1 << 23) - 1.0f;
}

// Calls fn(numbers, count, hash, layer, form, place of the first) for every row of tokens [0, tokens).
template <typename Fn>
void ForRows(const TestPages& pages, std::span<const uint64_t> hashes, uint64_t tokens, Fn&& fn) {
  const std::vector<PagedRows> rows = pages.Rows();
  for (size_t a = 0; a < rows.size(); ++a) {
    for (uint64_t token = 0; token < tokens; ++token) {
      for (int32_t h = 0; h < rows[a].heads; ++h) {
        const auto head = static_cast<uint32_t>(h);
        const uint64_t hash = hashes[token + 1], place = uint64_t{head} << 16;
        fn(pages.Key(a, token, head), rows[a].key_dim, hash, rows[a].layer, PartForm::kKeys, place);
        fn(pages.Value(a, token, head), rows[a].value_dim, hash, rows[a].layer, PartForm::kValues, place);
      }
    }
  }
}

// Calls fn(part, token, column, place, number) for the numbers of an object's tensors. The token is 0 for tensors
// without rows.
template <typename Fn>
void ForNumbers(const Tier& top, const Found& object, Fn&& fn) {
  const ObjectBytes bytes(top, *object.slot);
  for (const Part& part : object.header->parts) {
    if (IsPaged(part.form)) continue;
    const uint64_t numbers = part.Bytes() / sizeof(float);
    const uint64_t row = part.unit_tokens > 0 ? part.unit_bytes / part.unit_tokens / sizeof(float) : numbers;
    uint64_t place = 0;
    for (uint32_t unit = 0; unit < part.units; ++unit) {
      const auto* const data = reinterpret_cast<const float*>(bytes.Unit(part, unit));
      for (uint32_t i = 0; i < part.UnitBytes(unit) / sizeof(float); ++i, ++place) {
        fn(part, place / row, place % row, place, data[i]);
      }
    }
  }
}

}  // namespace

PrefixEngine::PrefixEngine(TenantId tenant, uint32_t capture_tokens, uint64_t span_tokens,
                           const ComputeCost& declared) {
  const NamespaceId ns = TestPlan(1, 64, ObjectKind::kSegment, tenant).ns;
  model_ = *MakePrefixModel(ns, {}, std::make_shared<const Layout>(TestLayout()), capture_tokens, declared,
                            {.tokens = span_tokens});
}

PrefixCommit PrefixEngine::Offer(const std::vector<int32_t>& tokens, uint64_t prompt, std::vector<uint64_t> depths,
                                 const ConversationId& conversation, uint64_t span_begin, const Salt& salt) const {
  struct Memory {
    explicit Memory(uint32_t count) : pages(count) {}
    TestPages pages;
    std::vector<std::vector<float>> tensors;
  };
  auto memory = std::make_shared<Memory>(TestPages::Holding(tokens.size()));
  const std::vector<uint64_t> hashes = Hashes(tokens);
  ForRows(memory->pages, hashes, tokens.size(),
          [](float* row, int32_t count, uint64_t hash, uint32_t layer, PartForm form, uint64_t place) {
            for (int32_t i = 0; i < count; ++i) row[i] = Number(hash, layer, form, place + static_cast<uint64_t>(i));
          });
  PrefixCommit commit{.text = Text(tokens, conversation, salt), .prompt_tokens = prompt};
  if (depths.empty() || depths.back() != tokens.size()) depths.push_back(tokens.size());
  for (const uint64_t depth : depths) {
    const ObjectHeader plan =
        *PlanPrefixCheckpoint(*model_->layout, model_->ns, Key{}, model_->block_tokens, model_->block_tokens);
    std::vector<PublishSource::Tensor> tensors;
    for (const Part& part : plan.parts) {
      std::vector<float>& numbers = memory->tensors.emplace_back(part.Bytes() / sizeof(float));
      for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = Number(hashes[depth], part.layer, part.form, i);
      tensors.push_back({part.layer, part.form, reinterpret_cast<const std::byte*>(numbers.data())});
    }
    commit.checkpoints.push_back({depth, std::move(tensors)});
  }
  if (span_begin > 0) {
    const ObjectHeader token =
        *PlanPrefixSpan(*model_->layout, model_->ns, Key{}, model_->span_dtype, span_begin, span_begin + 1);
    PrefixCommit::Span& span = commit.span.emplace(PrefixCommit::Span{.begin = span_begin});
    for (const Part& part : token.parts) {
      if (!IsSpanRows(part.form)) continue;
      const uint64_t row = part.Bytes() / sizeof(float);
      std::vector<float>& numbers = memory->tensors.emplace_back(row * (tokens.size() - span_begin));
      for (size_t i = 0; i < numbers.size(); ++i) {
        numbers[i] = Number(hashes[span_begin + i / row + 1], part.layer, part.form, i % row);
      }
      span.tensors.push_back({part.layer, part.form, reinterpret_cast<const std::byte*>(numbers.data())});
    }
  }
  commit.rows = memory->pages.Rows();
  commit.page_table = std::make_shared<std::vector<int32_t>>(memory->pages.page_table());
  commit.keep = memory;
  return commit;
}

LandTarget PrefixEngine::Target(const TestPages& pages, const MatchedPrefix& prefix) {
  std::vector<LandTarget::Segment> segments;
  prefix.objects.ForEach([&segments](uint32_t object) { segments.push_back({object, 0}); });
  return TestTarget(pages, std::move(segments));
}

double PrefixEngine::Error(const TestPages& pages, const Tier& top, const Match& match,
                           std::span<const int32_t> tokens) const {
  const std::vector<uint64_t> hashes = Hashes(tokens);
  double worst = 0;
  const auto compare = [&worst](float found, float expected) {
    const double error = std::abs(found - expected);
    worst = error <= worst ? worst : std::isnan(error) ? 1e9 : error;
  };
  ForRows(pages, hashes, match.prefix.depth,
          [&](const float* row, int32_t count, uint64_t hash, uint32_t layer, PartForm form, uint64_t place) {
            for (int32_t i = 0; i < count; ++i) {
              compare(row[i], Number(hash, layer, form, place + static_cast<uint64_t>(i)));
            }
          });
  const MatchedPrefix& prefix = match.prefix;
  const Found& checkpoint = match.found[prefix.objects.checkpoint];
  const uint64_t depth = prefix.checkpoint_depth();
  ForNumbers(top, checkpoint, [&](const Part& part, uint64_t, uint64_t, uint64_t place, float number) {
    compare(number, Number(hashes[depth], part.layer, part.form, place));
  });
  if (prefix.span_tokens == 0) return worst;
  ForNumbers(top, match.found[prefix.objects.span],
             [&](const Part& part, uint64_t token, uint64_t column, uint64_t, float number) {
               if (depth + token >= prefix.depth) return;
               compare(number, Number(hashes[depth + token + 1], part.layer, part.form, column));
             });
  return worst;
}

}  // namespace ashlar::storage
