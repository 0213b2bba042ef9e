// SPDX-License-Identifier: Apache-2.0
#include "daemon/engine/request_fields.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.pb.h"
#include "daemon/engine/match_reply.h"
#include "daemon/runtime/event_loop.h"
#include "daemon/session/pages.h"
#include "proto/invalid.h"
#include "proto/limits.h"
#include "proto/tokens.h"

namespace ashlar::daemon {
namespace {

// `key_ns`: namespace of the model, with the prompt's salt if any.
storage::Query QueryOf(ObjectKind kind, std::span<const int32_t> run, std::span<const MediaHash> media,
                       const Salt& salt, const Digest& key_ns, storage::Nanos needed_at, const Model& model) {
  storage::Query query;
  query.kind = kind;
  query.shard = model.shard;
  query.ns = model.ns;
  query.tokens = run.size();
  query.recompute = RecomputeTime(model, run.size());
  query.flops = RecomputeFlops(model, run.size());
  query.needed_at = needed_at;
  query.storable = kind == ObjectKind::kCheckpoint || run.size() > uint64_t{model.layout.head} + model.layout.tail;
  if (query.storable) {
    query.key = MakeKey(key_ns, kind, run, media);
    query.text = MakeTextDigest(kind, run, media, salt);
  }
  return query;
}

// Counts the blocks of all shards, and a checkpoint. Returns 0 if the prompt is not looked up as a text; a prompt that
// is too long for that is still served.
uint64_t CountOfText(const v1::Prompt& prompt, const Model& model) {
  if (model.prefixes == nullptr) return 0;
  const uint64_t blocks = prompt.tokens().size() / sizeof(int32_t) / model.prefixes->block_tokens;
  const uint64_t objects = (blocks + 1) * model.shard.size;
  return objects > limits::kMaxLookupsPerMatch / 2 ? 0 : objects;
}

}  // namespace

absl::StatusOr<storage::LeaseId> ReadLease(absl::string_view field, const std::string& bytes) {
  storage::LeaseId lease;
  if (bytes.size() != lease.size()) {
    return absl::InvalidArgumentError(absl::StrCat(field, ": wrong length; expected ", lease.size(), " bytes"));
  }
  std::memcpy(lease.data(), bytes.data(), lease.size());
  return lease;
}

absl::StatusOr<ConversationId> ReadConversation(absl::string_view field, const std::string& bytes) {
  ConversationId conversation{};
  if (!bytes.empty() && bytes.size() != conversation.size()) {
    return Invalid(field, ": wrong length; expected ", conversation.size(), " bytes, or empty");
  }
  std::ranges::copy(bytes, conversation.begin());
  return conversation;
}

absl::StatusOr<std::vector<int32_t>> ReadTokens(absl::string_view field, const std::string& bytes) {
  if (bytes.size() > limits::kMaxPromptTokens * sizeof(int32_t)) {
    return absl::InvalidArgumentError(absl::StrCat(field, ": too many; expected at most ", limits::kMaxPromptTokens));
  }
  absl::StatusOr<std::vector<int32_t>> tokens = UnpackTokens(bytes);
  if (!tokens.ok())
    return absl::InvalidArgumentError(absl::StrCat(field, ": length is not a multiple of 4 bytes (int32)"));
  return tokens;
}

storage::Nanos RecomputeTime(const Model& model, uint64_t tokens) {
  if (model.tokens_per_second == 0) return 0;
  constexpr double kYears = 1e18;  // in nanoseconds; rates may be extremely small or large
  const double nanos = 1e9 * static_cast<double>(tokens) / model.tokens_per_second;
  return static_cast<storage::Nanos>(std::clamp(nanos, 1.0, kYears));
}

double RecomputeFlops(const Model& model, uint64_t tokens) {
  return model.cost.Flops(tokens) / model.shard.size;
}

uint64_t CountLookups(const v1::Prompt& prompt, const Model& model, const Model& of_segments) {
  return uint64_t{of_segments.shard.size} * prompt.segment_lengths_size() + CountOfText(prompt, model);
}

uint64_t CountLookups(const v1::Prompt& prompt, const Model& model) {
  return CountLookups(prompt, model, model);
}

namespace {

struct Prompt {
  std::vector<int32_t> tokens;
  std::vector<MediaHash> media;
  Salt salt;
  ConversationId conversation{};
  storage::Nanos needed_at = 0;
  std::vector<storage::Query> segments;
};

absl::StatusOr<Prompt> Read(const std::string& field, const v1::Prompt& prompt, const Model& model,
                            const Model& of_segments) {
  auto tokens = ReadTokens(absl::StrCat(field, ".tokens"), prompt.tokens());
  if (!tokens.ok()) return tokens.status();
  if (static_cast<uint64_t>(prompt.segment_lengths_size()) > limits::kMaxSegments) {
    return Invalid(field, ".segment_lengths: too many; expected at most ", limits::kMaxSegments);
  }
  const int64_t needed_in = prompt.needed_in_ns();
  if (needed_in < 0 || needed_in > limits::kMaxNeededInNanos) {
    return Invalid(field, ".needed_in_ns: out of range; expected 0 to ", limits::kMaxNeededInNanos);
  }
  const auto conversation = ReadConversation(absl::StrCat(field, ".conversation"), prompt.conversation());
  if (!conversation.ok()) return conversation.status();
  if (*conversation != ConversationId{} && model.prefixes == nullptr) {
    return Invalid(field, ".conversation: must be empty, because the model was opened without prefixes");
  }
  auto media = UnpackMedia(absl::StrCat(field, ".media"), prompt.media(), tokens->size());
  if (!media.ok()) return media.status();
  const auto salt = UnpackSalt(absl::StrCat(field, ".salt"), prompt.salt());
  if (!salt.ok()) return salt.status();
  const Digest key_ns = Salted(of_segments.ns, *salt);
  Prompt read{.tokens = *std::move(tokens),
              .media = *std::move(media),
              .salt = *salt,
              .conversation = *conversation,
              .needed_at = needed_in == 0 ? 0 : MonotonicClock().Now() + needed_in};
  size_t begin = 0;
  for (int i = 0; i < prompt.segment_lengths_size(); ++i) {
    const uint64_t length = prompt.segment_lengths(i);
    if (length == 0) return Invalid(field, ".segment_lengths[", i, "]: 0; expected at least 1");
    if (length > read.tokens.size() - begin) {
      return Invalid(field, ".segment_lengths[", i, "]: exceeds the tokens left in the prompt");
    }
    const auto run = std::span<const int32_t>(read.tokens).subspan(begin, length);
    read.segments.push_back(QueryOf(KindOfSegment(i), run, MediaWithin(read.media, begin, begin + length), *salt,
                                    key_ns, read.needed_at, of_segments));
    begin += length;
  }
  return read;
}

}  // namespace

absl::StatusOr<std::vector<storage::Query>> ReadSegments(const std::string& field, const v1::Prompt& prompt,
                                                         const Model& model) {
  auto read = Read(field, prompt, model, model);
  if (!read.ok()) return read.status();
  return std::move(read->segments);
}

absl::StatusOr<ParsedPrompt> ReadPrompt(const std::string& field, const v1::Prompt& prompt, const Model& model) {
  return ReadPrompt(field, prompt, model, model);
}

absl::StatusOr<ParsedPrompt> ReadPrompt(const std::string& field, const v1::Prompt& prompt, const Model& model,
                                        const Model& of_segments) {
  auto read = Read(field, prompt, model, of_segments);
  if (!read.ok()) return read.status();
  ParsedPrompt asked{.segments = std::move(read->segments),
                     .tokens_per_second = model.tokens_per_second,
                     .tokens = read->tokens.size()};
  if (!read->tokens.empty() && CountOfText(prompt, model) > 0) {
    asked.text.emplace(model.prefixes, std::move(read->tokens), read->conversation, std::move(read->media), read->salt);
    asked.text->needed_at = read->needed_at;
    asked.text->tokens_per_second = model.tokens_per_second;
  }
  return asked;
}

absl::StatusOr<std::optional<NamedObject>> ReadObjectName(const std::string& field, const v1::ObjectName& name,
                                                          const Model& model) {
  if (name.kind() != static_cast<uint32_t>(ObjectKind::kSegment) &&
      name.kind() != static_cast<uint32_t>(ObjectKind::kCheckpoint)) {
    return Invalid(field, ".kind: expected segment or checkpoint");
  }
  const auto kind = static_cast<ObjectKind>(name.kind());
  const auto tokens = ReadTokens(absl::StrCat(field, ".tokens"), name.tokens());
  if (!tokens.ok()) return tokens.status();
  if (tokens->empty()) return Invalid(field, ".tokens: empty");
  const auto media = UnpackMedia(absl::StrCat(field, ".media"), name.media(), tokens->size());
  if (!media.ok()) return media.status();
  const auto salt = UnpackSalt(absl::StrCat(field, ".salt"), name.salt());
  if (!salt.ok()) return salt.status();
  const Key key = MakeKey(Salted(model.ns, *salt), kind, *tokens, *media);
  absl::StatusOr<ObjectHeader> plan = PlanObject(model.layout, model.ns, key, kind, tokens->size());
  if (absl::IsFailedPrecondition(plan.status())) return std::nullopt;
  if (!plan.ok()) return Invalid(field, ".tokens: ", plan.status().message());
  plan->shard = model.shard;
  return NamedObject{*std::move(plan), MakeTextDigest(kind, *tokens, *media, *salt),
                     RecomputeTime(model, tokens->size()), RecomputeFlops(model, tokens->size())};
}

}  // namespace ashlar::daemon
