// SPDX-License-Identifier: Apache-2.0
#include "tools/neighbours/segment_engine.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ashlar::neighbours {
namespace {

constexpr uint32_t kHeads = 2, kHeadDim = 256;
constexpr uint64_t kHeadBytes = kHeadDim * sizeof(float), kRowBytes = kHeads * kHeadBytes;
static_assert(2 * kRowBytes == kTokenBytes);
constexpr uint32_t kLinearHeads = 4, kStateDim = 64;
constexpr uint64_t kTensorBytes = uint64_t{kLinearHeads} * kStateDim * kStateDim * sizeof(float);

}  // namespace

Identity SmallIdentity() {
  return {.model_id = "neighbours", .weights_digest = "none", .dtype = "fp32", .tokenizer_digest = "none"};
}

Layout SmallLayout() {
  const LinearLayer linear{.key_heads = kLinearHeads, .value_heads = kLinearHeads, .d_k = kStateDim, .d_v = kStateDim};
  const AttentionLayer attention{.kv_heads = kHeads, .key_dim = kHeadDim, .value_dim = kHeadDim};
  return {.page_tokens = kPageTokens, .layers = {linear, attention}};
}

PagedCache SmallPages(uint32_t pages) {
  const PagedLayer layer{.layer = 1,
                         .key_offset = 0,
                         .value_offset = kPageTokens * kRowBytes,
                         .page_stride = kPageBytes,
                         .token_stride = kRowBytes,
                         .key_head_stride = kHeadBytes,
                         .value_head_stride = kHeadBytes};
  return {.page_tokens = kPageTokens, .pages = pages, .layers = {layer}};
}

SegmentPrompt::SegmentPrompt(uint64_t bytes)
    : tokens_(kPageTokens, 0), lengths_({kPageTokens, bytes / kPageBytes * kPageTokens}) {
  tokens_.insert(tokens_.end(), lengths_[1], 1);
}

std::vector<int32_t> SegmentPrompt::PageTable(int32_t first) const {
  std::vector<int32_t> table(1 + pages(), -1);
  std::iota(table.begin() + 1, table.end(), first);
  return table;
}

absl::StatusOr<std::unique_ptr<SegmentEngine>> SegmentEngine::Open(Client& client, uint64_t bytes) {
  std::unique_ptr<SegmentEngine> engine(new SegmentEngine(bytes));
  auto model = client.OpenModel(SmallIdentity(), SmallLayout());
  if (!model.ok()) return model.status();
  engine->model_ = *std::move(model);
  const uint32_t pages = 2 * engine->prompt_.pages();
  auto region = client.HostRegion(pages * kPageBytes + 2 * kTensorBytes);
  if (!region.ok()) return region.status();
  engine->region_ = *std::move(region);
  std::fill_n(reinterpret_cast<float*>(engine->region_.data()), engine->region_.size() / sizeof(float), 0.5f);
  if (absl::Status status = engine->model_.DeclarePages(engine->region_, SmallPages(pages)); !status.ok()) {
    return status;
  }
  engine->targets_ = engine->prompt_.PageTable(static_cast<int32_t>(engine->prompt_.pages()));
  if (absl::Status status = engine->Publish(); !status.ok()) return status;
  return engine;
}

absl::Status SegmentEngine::Publish() {
  const ObjectRun run{.tokens = prompt_.segment()};
  const Reservation reservation = model_.Reserve({&run, 1})[0];
  if (reservation.outcome == ReserveOutcome::kAlreadyPresent) return absl::OkStatus();
  if (!reservation.granted()) return absl::InternalError(absl::StrCat("reserve: ", Name(reservation.outcome)));
  const std::byte* const tensors = region_.data() + region_.size() - 2 * kTensorBytes;
  PublishParts parts;
  parts.linear = {{.layer = 0, .transition = tensors, .state = tensors + kTensorBytes}};
  parts.region = region_;
  std::vector<int32_t> sources = prompt_.PageTable(0);
  parts.page_table = sources;
  parts.first_position = prompt_.position();
  const PublishOutcome outcome = model_.Publish(reservation, parts);
  if (outcome != PublishOutcome::kPublished) return absl::InternalError(absl::StrCat("publish: ", Name(outcome)));
  return absl::OkStatus();
}

MissReason SegmentEngine::Land(const Match& match, std::chrono::milliseconds patience) {
  if (!match.segments()[1].hit()) return match.segments()[1].reason;
  const LandSegment segment{.segment = 1, .first_position = prompt_.position()};
  return model_.Land(match, targets_, {&segment, 1}).Wait(patience)[0];
}

}  // namespace ashlar::neighbours
