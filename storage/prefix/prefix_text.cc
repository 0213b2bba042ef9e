// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/prefix_text.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "proto/limits.h"
#include "proto/object.h"

namespace ashlar::storage {
namespace {

uint64_t AllocatedBytes(const ObjectHeader& header) {
  return header.Extents() * limits::kExtentBytes * header.shard.size;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const PrefixModel>> MakePrefixModel(const NamespaceId& ns, const TensorShard& shard,
                                                                   std::shared_ptr<const Layout> shared_layout,
                                                                   uint32_t capture_tokens, const ComputeCost& declared,
                                                                   const SpanUse& spans) {
  const Layout& layout = *shared_layout;
  auto model = std::make_shared<PrefixModel>(PrefixModel{.ns = ns,
                                                         .shard = shard,
                                                         .layout = std::move(shared_layout),
                                                         .block_tokens = PrefixBlockTokens(layout),
                                                         .capture_tokens = std::max(capture_tokens, 1u),
                                                         .span_tokens = spans.tokens,
                                                         .span_dtype = spans.dtype,
                                                         .paged = std::ranges::any_of(layout.layers, HasRows)});
  const uint32_t block = model->block_tokens;
  absl::StatusOr<ObjectHeader> checkpoint = PlanPrefixCheckpoint(layout, ns, Key{}, block, block);
  if (!checkpoint.ok()) return checkpoint.status();
  checkpoint->shard = shard;
  if (spans.tokens > 0) {
    const absl::StatusOr<ObjectHeader> span = PlanPrefixSpan(layout, ns, Key{}, spans.dtype, 1, 1 + spans.tokens);
    if (!span.ok()) return span.status();
  }
  const ComputeCost compute = CostOf(declared, layout, shard);
  model->costs = {.page_tokens = block,
                  .checkpoint_bytes = AllocatedBytes(*checkpoint),
                  .flops_per_token = compute.flops_per_token,
                  .flops_per_square = compute.flops_per_square};
  if (!model->paged) return model;
  absl::StatusOr<ObjectHeader> rows = PlanPrefixBlock(layout, ns, Key{}, block, block);
  if (!rows.ok()) return rows.status();
  rows->shard = shard;
  model->costs.page_bytes = AllocatedBytes(*rows);
  model->block_bytes = rows->bytes;
  return model;
}

PrefixText::PrefixText(std::shared_ptr<const PrefixModel> model, std::vector<int32_t> tokens,
                       const ConversationId& conversation, std::vector<MediaHash> media, const Salt& salt)
    : model_(std::move(model)),
      tokens_(std::move(tokens)),
      media_(std::move(media)),
      salted_(salt != Salt{}),
      conversation_(conversation),
      shared_(Salted(model_->ns, salt), model_->block_tokens, tokens_, {}, media_) {
  if (conversation != ConversationId{}) {
    own_.emplace(Salted(model_->ns, salt), model_->block_tokens, tokens_, conversation, media_);
    for (size_t i = 0; i < conversation_.size(); ++i) conversation_[i] ^= salt.bytes[i];
  }
  if (media_.empty() && !salted_) return;
  planned_ = tokens_;
  for (const MediaHash& input : media_) Show(input);
  if (salted_) Show(salt);
}

void PrefixText::Show(const MediaHash& input) {
  // The whole hash counts: some engines' hashes differ in a few bytes only.
  uint32_t shown = 1;
  for (size_t i = 0; i < input.hash.size(); i += sizeof shown) {
    uint32_t word = 0;
    std::memcpy(&word, input.hash.data() + i, sizeof word);
    shown = (shown ^ word) * 0x9E3779B1u;
  }
  planned_[input.offset] ^= static_cast<int32_t>(shown);
}

void PrefixText::Show(const Salt& salt) {
  for (size_t i = 0; i < std::min(kSaltedTokens, planned_.size()); ++i) {
    int32_t word = 0;
    std::memcpy(&word, salt.bytes.data() + i * sizeof word, sizeof word);
    planned_[i] ^= word;
  }
}

}  // namespace ashlar::storage
