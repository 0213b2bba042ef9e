// SPDX-License-Identifier: Apache-2.0
#include "client/python/src/page_store.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "proto/invalid.h"
#include "proto/limits.h"

namespace ashlar::python {
namespace {

constexpr uint64_t kKeyTokens = sizeof(PageKey) / sizeof(int32_t);
constexpr uint32_t kOnlySet = 0;  // as a page number
constexpr uint64_t kMostSlots = uint64_t{1} << 20;
constexpr uint64_t kMostPageBytes = uint64_t{1} << 34;

uint64_t Parts(uint64_t whole, uint64_t part) {
  return (whole + part - 1) / part;
}

Layout LayoutOf(const PageShape& shape) {
  const AttentionLayer rows{
      .kv_heads = shape.heads, .key_dim = shape.dim, .value_dim = shape.dim, .dtype = DType::kF8E4M3};
  return {.page_tokens = shape.tokens, .head = 0, .tail = 0, .layers = std::vector<Layer>(shape.layers, rows)};
}

PagedCache PagesOf(const PageShape& shape, uint32_t slots) {
  PagedCache pages{.page_tokens = shape.tokens, .pages = slots};
  for (uint32_t i = 0; i < shape.layers; ++i) {
    const uint64_t row = 2 * i * shape.row_bytes();
    pages.layers.push_back({.layer = i,
                            .key_offset = row,
                            .value_offset = row + shape.row_bytes(),
                            .page_stride = shape.slot_bytes(),
                            .token_stride = shape.token_bytes(),
                            .key_head_stride = shape.dim,
                            .value_head_stride = shape.dim});
  }
  return pages;
}

}  // namespace

PageShape ShapePage(uint64_t page_bytes, uint32_t page_tokens) {
  const uint64_t token = Parts(page_bytes, page_tokens);
  PageShape shape{.tokens = page_tokens};
  shape.layers = static_cast<uint32_t>(Parts(token, 2 * limits::kExtentBytes));
  const uint64_t row = Parts(token, 2 * shape.layers);
  for (shape.dim = limits::kMaxHeadDim; shape.dim > 16; shape.dim /= 2) {
    if (Parts(row, shape.dim) * shape.dim - row <= row / 16) break;
  }
  shape.heads = static_cast<uint32_t>(Parts(row, shape.dim));
  return shape;
}

absl::StatusOr<std::unique_ptr<PageStore>> PageStore::Open(std::shared_ptr<Client> client, const Options& options) {
  if (options.page_tokens < kKeyTokens || options.page_tokens > limits::kMaxPageTokens) {
    return Invalid("page_tokens: ", options.page_tokens, "; expected ", kKeyTokens, " to ", limits::kMaxPageTokens);
  }
  if (options.page_bytes == 0 || options.page_bytes > kMostPageBytes) {
    return Invalid("page_bytes: ", options.page_bytes, "; expected 1 to ", kMostPageBytes);
  }
  if (options.slots == 0 || options.slots > kMostSlots) {
    return Invalid("slots: ", options.slots, "; expected 1 to ", kMostSlots);
  }
  const PageShape shape = ShapePage(options.page_bytes, options.page_tokens);
  absl::StatusOr<Model> model =
      client->OpenModel(options.identity, LayoutOf(shape), {},
                        {.flops_per_token = options.flops_per_token, .tokens_per_second = options.tokens_per_second});
  if (!model.ok()) return model.status();
  absl::StatusOr<Region> region = client->HostRegion(options.slots * shape.slot_bytes());
  if (!region.ok()) return region.status();
  if (absl::Status status = model->DeclarePages(*region, PagesOf(shape, options.slots)); !status.ok()) return status;
  return std::unique_ptr<PageStore>(new PageStore(std::move(client), *std::move(model), *std::move(region), options));
}

PageStore::PageStore(std::shared_ptr<Client> client, Model model, Region region, const Options& options)
    : client_(std::move(client)),
      shape_(ShapePage(options.page_bytes, options.page_tokens)),
      slots_(options.slots),
      land_(options.land),
      region_(std::move(region)),
      model_(std::move(model)) {}

// The key's 256 bits, and zeros: the text under which the cache stores the page.
std::vector<int32_t> PageStore::TokensOf(const PageKey& key) const {
  std::vector<int32_t> tokens(shape_.tokens);
  std::memcpy(tokens.data(), key.bytes.data(), key.bytes.size());
  return tokens;
}

// Each page is the begin of a separate prompt, so its key does not depend on the other pages of the call.
std::vector<Match> PageStore::Lookup(std::span<const PageKey> keys) {
  const uint64_t lengths[1] = {shape_.tokens};
  std::vector<std::vector<int32_t>> texts;
  std::vector<Prompt> prompts;
  for (const PageKey& key : keys) texts.push_back(TokensOf(key));
  for (const std::vector<int32_t>& text : texts) prompts.push_back({.tokens = text, .segment_lengths = lengths});
  return model_.Lookup(prompts);
}

std::vector<bool> PageStore::Exists(std::span<const PageKey> keys) {
  std::vector<bool> found;
  for (const Match& match : Lookup(keys)) found.push_back(match.segments().front().hit());
  return found;
}

std::vector<Reservation> PageStore::Reserve(std::span<const PageKey> keys) {
  std::vector<std::vector<int32_t>> texts;
  std::vector<ObjectRun> runs;
  for (const PageKey& key : keys) texts.push_back(TokensOf(key));
  for (const std::vector<int32_t>& text : texts) runs.push_back({.kind = ObjectKind::kCheckpoint, .tokens = text});
  return model_.Reserve(runs);
}

std::vector<PublishOutcome> PageStore::Publish(std::span<const Reservation> reservations,
                                               std::span<const uint32_t> slots) {
  const std::vector<int32_t> tables(slots.begin(), slots.end());
  std::vector<Publication> pages;
  for (size_t i = 0; i < reservations.size(); ++i) {
    pages.push_back(
        {.reservation = reservations[i], .parts = {.region = region_, .page_table = std::span(tables).subspan(i, 1)}});
  }
  std::vector<PublishOutcome> outcomes = model_.Publish(pages);
  // If the daemon is busy, it keeps the page reserved for this store, and would report it as being published for a
  // minute.
  std::vector<Reservation> kept;
  for (size_t i = 0; i < outcomes.size(); ++i) {
    if (outcomes[i] == PublishOutcome::kBusy) kept.push_back(reservations[i]);
  }
  if (!kept.empty()) model_.Abandon(kept);
  return outcomes;
}

std::vector<PageStore::Landed> PageStore::Get(std::span<const PageKey> keys, std::span<const uint32_t> slots) {
  const auto deadline = std::chrono::steady_clock::now() + land_;
  const std::vector<int32_t> tables(slots.begin(), slots.end());
  const LandSegment whole[1] = {{.segment = 0, .first_position = 0}};
  const std::vector<Match> matches = Lookup(keys);
  std::vector<Landed> landed(keys.size());
  std::vector<std::optional<Landing>> landings(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    landed[i].reason = matches[i].segments().front().reason;
    landed[i].tier = matches[i].segments().front().tier;
    if (landed[i].reason != MissReason::kNone) continue;
    landings[i] = model_.Land(matches[i], std::span(tables).subspan(i, 1), whole);
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    if (!landings[i].has_value()) continue;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    landed[i].reason = landings[i]->Wait(std::max(left, std::chrono::milliseconds(1))).front();
    landed[i].quiesced = landings[i]->quiesced();
    if (!landed[i].quiesced) unresolved_.Keep(std::move(landings[i]), {{kOnlySet, tables[i]}});
  }
  return landed;
}

std::vector<int32_t> PageStore::TakeQuiesced(uint32_t most) {
  std::vector<int32_t> slots(most);
  slots.resize(unresolved_.Take(kOnlySet, slots, std::chrono::milliseconds(0)));
  return slots;
}

}  // namespace ashlar::python
