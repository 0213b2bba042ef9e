// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/prompts.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "storage/objects/object_bytes.h"

namespace ashlar::simulation {

using storage::Join;
using storage::PagedRows;
using storage::PublishSource;
using storage::TestPages;
using storage::Tokens;

namespace {

constexpr uint64_t kTokensOfATenant = 1000;  // tenants' texts have no token in common
constexpr uint64_t kStrides[] = {20, 50, 40};

// The numbers of one token and head in an engine's pages.
const std::byte* RowAt(const kernels::PagedSlots& slots, const std::vector<int32_t>& page_table, uint64_t token,
                       int32_t head) {
  const auto page_tokens = static_cast<uint64_t>(slots.page_tokens);
  const int64_t page = page_table[token / page_tokens];
  return reinterpret_cast<const std::byte*>(static_cast<const float*>(slots.base) + page * slots.page_stride +
                                            static_cast<int64_t>(token % page_tokens) * slots.token_stride +
                                            head * slots.head_stride);
}

const PublishSource::Tensor& TensorOf(const std::vector<PublishSource::Tensor>& tensors, const Part& part) {
  const auto found = std::ranges::find_if(tensors, [&](const PublishSource::Tensor& tensor) {
    return tensor.layer == part.layer && tensor.form == part.form;
  });
  if (found == tensors.end()) std::abort();
  return *found;
}

// Returns whether the first `count` bytes of a part equal `expected`.
bool PartIs(const storage::ObjectBytes& bytes, const Part& part, const std::byte* expected, uint64_t count) {
  for (uint32_t unit = 0; unit < part.units && count > 0; ++unit) {
    const uint64_t here = std::min<uint64_t>(part.UnitBytes(unit), count);
    if (std::memcmp(bytes.Unit(part, unit), expected, here) != 0) return false;
    expected += here;
    count -= here;
  }
  return true;
}

}  // namespace

const Prompts& Prompts::Of(storage::TenantId tenant) {
  static const Prompts* const all[] = {new Prompts(1), new Prompts(2)};
  return *all[tenant - 1];
}

Prompts::Prompts(storage::TenantId tenant) : tenant_(tenant), rebuilding_(tenant, 1, kSpanTokens), plain_(tenant) {
  const auto run = [&](uint64_t token, size_t count) {
    return Tokens(count, static_cast<int32_t>(tenant_ * kTokensOfATenant + token));
  };
  const Tokens begin = run(1, 90), middle = Join(begin, run(2, 210));
  Add(Join(Join(middle, run(3, 120)), run(4, 110)));  // two whole blocks
  Add(Join(middle, run(5, 140)));                     // diverges after the first block
  Add(Join(begin, run(6, 200)));                      // diverges inside it
  Add(Join(run(7, 130), run(8, 60)));                 // has none
}

void Prompts::Add(Tokens tokens) {
  Text text{.tokens = tokens};
  std::vector<uint64_t> fresh;  // depths whose states no earlier text has
  for (uint64_t depth = kStrides[0], i = 1; depth < tokens.size(); depth += kStrides[i++ % std::size(kStrides)]) {
    text.depths.push_back(depth);
  }
  text.depths.push_back(tokens.size());
  const auto prefix = [&](uint64_t depth) {
    return Tokens(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(depth));
  };
  for (const uint64_t depth : text.depths) {
    if (!states_.contains(prefix(depth))) fresh.push_back(depth);
  }
  storage::PrefixCommit all = rebuilding_.Offer(tokens, tokens.size(), fresh, {}, 1);
  for (storage::PrefixCommit::Checkpoint& checkpoint : all.checkpoints) {
    states_.emplace(prefix(checkpoint.depth), std::move(checkpoint.tensors));
  }
  text.span = std::move(all.span->tensors);
  text.rows = std::move(all.rows);
  text.page_table = std::move(all.page_table);
  text.keep = std::move(all.keep);
  const ObjectHeader token = *PlanPrefixSpan(*rebuilding_.model()->layout, rebuilding_.model()->ns, Key{},
                                             rebuilding_.model()->span_dtype, 1, 2);
  for (const Part& part : token.parts) {
    if (IsSpanRows(part.form)) span_row_bytes_[part.form][part.layer] = part.Bytes();
  }
  texts_.push_back(std::move(text));
}

storage::PrefixText Prompts::Ask(Tokens tokens, const ConversationId& conversation, bool rebuilds) const {
  return (rebuilds ? rebuilding_ : plain_).Text(std::move(tokens), conversation);
}

storage::PrefixCommit Prompts::Commit(const Offer& offer, bool rebuilds) const {
  const Text& text = texts_[offer.text];
  const auto prefix = [&](uint64_t depth) {
    return Tokens(text.tokens.begin(), text.tokens.begin() + static_cast<ptrdiff_t>(depth));
  };
  storage::PrefixCommit commit{.text = Ask(prefix(offer.end), offer.conversation, rebuilds),
                               .prompt_tokens = offer.end,
                               .rows = text.rows,
                               .page_table = text.page_table,
                               .keep = text.keep};
  const auto add = [&](uint64_t depth) {
    const auto states = states_.find(prefix(depth));
    const auto others = std::next(states) == states_.end() ? states_.begin() : std::next(states);
    commit.checkpoints.push_back({depth, (offer.others_states ? others : states)->second});
  };
  for (const uint64_t depth : offer.inside) add(depth);
  add(offer.end);
  if (offer.span_begin == 0) return commit;
  storage::PrefixCommit::Span& span = commit.span.emplace(storage::PrefixCommit::Span{.begin = offer.span_begin});
  for (PublishSource::Tensor tensor : text.span) {
    const uint64_t skipped = offer.span_begin - 1 - (offer.shifts_span ? 1 : 0);
    tensor.data += skipped * span_row_bytes_.at(tensor.form).at(tensor.layer);
    span.tensors.push_back(tensor);
  }
  return commit;
}

const Prompts::Text& Prompts::Beginning(std::span<const int32_t> tokens) const {
  const auto found = std::ranges::find_if(texts_, [&](const Text& text) {
    return text.tokens.size() >= tokens.size() &&
           std::ranges::equal(tokens, std::span(text.tokens).first(tokens.size()));
  });
  if (found == texts_.end()) std::abort();
  return *found;
}

bool Prompts::RowsAre(const TestPages& pages, const Tokens& prompt, uint64_t tokens) const {
  const Text& text = Beginning(std::span(prompt).first(tokens));
  for (size_t a = 0; a < text.rows.size(); ++a) {
    const PagedRows& rows = text.rows[a];
    for (uint64_t token = 0; token < tokens; ++token) {
      for (int32_t head = 0; head < rows.heads; ++head) {
        const auto same = [&](const float* landed, const kernels::PagedSlots& slots, int32_t numbers) {
          return std::memcmp(landed, RowAt(slots, *text.page_table, token, head),
                             static_cast<size_t>(numbers) * sizeof(float)) == 0;
        };
        const auto of = static_cast<uint32_t>(head);
        if (!same(pages.Key(a, token, of), rows.keys, rows.key_dim)) return false;
        if (!same(pages.Value(a, token, of), rows.values, rows.value_dim)) return false;
      }
    }
  }
  return true;
}

bool Prompts::TensorsAre(const storage::Tier& top, const storage::Match& match, const Tokens& prompt) const {
  const storage::MatchedPrefix& prefix = match.prefix;
  const uint64_t depth = prefix.checkpoint_depth();
  const storage::Found& checkpoint = match.found[prefix.objects.checkpoint];
  const States& states = states_.at(Tokens(prompt.begin(), prompt.begin() + static_cast<ptrdiff_t>(depth)));
  for (const Part& part : checkpoint.header->parts) {
    const storage::ObjectBytes bytes(top, *checkpoint.slot);
    if (!IsPaged(part.form) && !PartIs(bytes, part, TensorOf(states, part).data, part.Bytes())) return false;
  }
  if (prefix.span_tokens == 0) return true;
  const storage::Found& span = match.found[prefix.objects.span];
  const Text& text = Beginning(std::span(prompt).first(prefix.depth));
  for (const Part& part : span.header->parts) {
    if (IsPaged(part.form)) continue;
    const storage::ObjectBytes bytes(top, *span.slot);
    const size_t row = span_row_bytes_.at(part.form).at(part.layer);
    const std::byte* const expected = TensorOf(text.span, part).data + (depth - 1) * row;
    if (!PartIs(bytes, part, expected, prefix.span_tokens * row)) return false;
  }
  return true;
}

}  // namespace ashlar::simulation
