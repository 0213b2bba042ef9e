// SPDX-License-Identifier: Apache-2.0
// PrefixText: a prompt or computed text with its keys, and the properties of its model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/key.h"
#include "proto/layout.h"
#include "proto/prefix.h"
#include "proto/shard.h"
#include "storage/executor.h"
#include "storage/policy/compute_cost.h"
#include "storage/prefix/prefix_entry.h"

namespace ashlar::storage {

// The properties of an opened model that prefixes need. Immutable and shared between sessions and threads.
struct PrefixModel {
  NamespaceId ns;
  TensorShard shard;
  std::shared_ptr<const Layout> layout;  // layout of the shard
  uint32_t block_tokens = 0;
  uint32_t capture_tokens = 1;  // the engine checkpoints inside a prompt at multiples of it
  uint64_t span_tokens = 0;     // longest span that the engine captures and rebuilds from; 0: none
  DType span_dtype = DType::kF32;
  bool paged = false;        // some layer has keys and values, so there are blocks
  uint64_t block_bytes = 0;  // bytes of a block of the shard; 0 without blocks
  PrefixCosts costs;         // costs of all shards, with allocated bytes
};
struct SpanUse {
  uint64_t tokens = 0;
  DType dtype = DType::kF32;
};
// `declared` as in CostOf. Errors are those of PlanPrefixCheckpoint and PlanPrefixSpan.
absl::StatusOr<std::shared_ptr<const PrefixModel>> MakePrefixModel(const NamespaceId& ns, const TensorShard& shard,
                                                                   std::shared_ptr<const Layout> shared_layout,
                                                                   uint32_t capture_tokens, const ComputeCost& declared,
                                                                   const SpanUse& spans = {});

// A prompt or computed text with its keys. Created outside the metadata thread, because it hashes every token.
class PrefixText {
 public:
  PrefixText(std::shared_ptr<const PrefixModel> model, std::vector<int32_t> tokens,
             const ConversationId& conversation = {}, std::vector<MediaHash> media = {}, const Salt& salt = {});
  PrefixText(PrefixText&&) = default;  // spans into the tokens stay valid

  const PrefixModel& model() const { return *model_; }
  // Tokens for the planner, not for keys: the token where media begin contains part of their hash, and the first
  // kSaltedTokens contain the salt, so that texts with other media or another salt diverge there. If two texts look
  // alike anyway, their keys differ.
  std::span<const int32_t> tokens() const { return planned_.empty() ? tokens_ : planned_; }
  // Longest span in tokens. 0 with media, because a span's overlap with a prompt is determined by tokens only.
  uint64_t span_tokens() const { return media_.empty() ? model_->span_tokens : 0; }
  // Where the first span may begin. A span is found by the tokens before it, which must contain the whole salt.
  uint64_t first_span() const { return salted_ ? kSaltedTokens : 1; }
  // With a salt, the conversation id under that salt.
  const ConversationId& conversation() const { return conversation_; }
  bool salted() const { return salted_; }
  const PrefixKeys& shared() const { return shared_; }
  const std::optional<PrefixKeys>& own() const { return own_; }  // only with a conversation

  Nanos needed_at = 0;           // as in Query::needed_at
  double tokens_per_second = 0;  // prefill rate of the engine; 0: unknown

 private:
  static constexpr size_t kSaltedTokens = sizeof(Salt) / sizeof(int32_t);

  void Show(const MediaHash& input);
  void Show(const Salt& salt);

  std::shared_ptr<const PrefixModel> model_;
  std::vector<int32_t> tokens_;
  std::vector<MediaHash> media_;
  std::vector<int32_t> planned_;  // empty without media and salt
  bool salted_;
  ConversationId conversation_;
  PrefixKeys shared_;
  std::optional<PrefixKeys> own_;
};

}  // namespace ashlar::storage
