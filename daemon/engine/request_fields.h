// SPDX-License-Identifier: Apache-2.0
// Parses and checks request fields that several calls have.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/object.h"
#include "proto/prefix.h"
#include "storage/cache.h"

namespace ashlar::v1 {
class ObjectName;
class Prompt;
}  // namespace ashlar::v1

namespace ashlar::daemon {

struct Model;

// Largest position; far below the values at which sums with lengths could overflow.
inline constexpr uint64_t kMaxPosition = uint64_t{1} << 40;

// INVALID_ARGUMENT names `field` unless `bytes` are the 16 bytes of a lease.
absl::StatusOr<storage::LeaseId> ReadLease(absl::string_view field, const std::string& bytes);

// INVALID_ARGUMENT names `field` unless `bytes` are the 16 bytes of a conversation id, or empty.
absl::StatusOr<ConversationId> ReadConversation(absl::string_view field, const std::string& bytes);

// INVALID_ARGUMENT names `field` unless `bytes` are int32 values, at most limits::kMaxPromptTokens.
absl::StatusOr<std::vector<int32_t>> ReadTokens(absl::string_view field, const std::string& bytes);

// Returns the time to compute `tokens` at the model's declared rate; 0 without a rate.
storage::Nanos RecomputeTime(const Model& model, uint64_t tokens);
// Returns the declared or estimated FLOPs of this shard for computing `tokens` from position 0.
double RecomputeFlops(const Model& model, uint64_t tokens);

// The queries of one prompt. needed_at is an absolute time.
struct ParsedPrompt {
  std::vector<storage::Query> segments;
  std::optional<storage::PrefixText> text;  // only for models opened with prefixes, unless the text is too long
  double tokens_per_second = 0;             // prefill rate of the engine; 0 if unknown
  uint64_t tokens = 0;                      // number of tokens of the prompt
};
// INVALID_ARGUMENT names the field below `field`. The text is read for `model`. `of_segments`: the model in which the
// segments are looked up.
absl::StatusOr<ParsedPrompt> ReadPrompt(const std::string& field, const v1::Prompt& prompt, const Model& model,
                                        const Model& of_segments);
absl::StatusOr<ParsedPrompt> ReadPrompt(const std::string& field, const v1::Prompt& prompt, const Model& model);
// Reads the segments without the text, which would hash every token again.
absl::StatusOr<std::vector<storage::Query>> ReadSegments(const std::string& field, const v1::Prompt& prompt,
                                                         const Model& model);
// Returns the largest number of objects that the lookup of the prompt takes, before anything is read.
uint64_t CountLookups(const v1::Prompt& prompt, const Model& model, const Model& of_segments);
uint64_t CountLookups(const v1::Prompt& prompt, const Model& model);

// The plan of an object to store, its text, and the cost of computing it.
struct NamedObject {
  ObjectHeader plan;
  TextDigest text;
  storage::Nanos recompute;
  double flops;
};
// Returns nothing if the text is too short to have an interior. INVALID_ARGUMENT names the field below `field`.
absl::StatusOr<std::optional<NamedObject>> ReadObjectName(const std::string& field, const v1::ObjectName& name,
                                                          const Model& model);

}  // namespace ashlar::daemon
