// SPDX-License-Identifier: Apache-2.0
// Reading and checking the fields that several calls have.
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

// Positions in a sequence stay far below where sums with lengths could overflow.
inline constexpr uint64_t kMaxPosition = uint64_t{1} << 40;

// INVALID_ARGUMENT, naming `field`, unless it is the 16 bytes of a lease.
absl::StatusOr<storage::LeaseId> ReadLease(absl::string_view field, const std::string& bytes);

// INVALID_ARGUMENT, naming `field`, unless it is the 16 bytes of a conversation, or empty: none.
absl::StatusOr<ConversationId> ReadConversation(absl::string_view field, const std::string& bytes);

// INVALID_ARGUMENT, naming `field`, unless it is a whole number of int32, at most limits::kMaxPromptTokens.
absl::StatusOr<std::vector<int32_t>> ReadTokens(absl::string_view field, const std::string& bytes);

// Returns the time of computing so many tokens by the model's declared rate; 0: it declared none.
storage::Nanos RecomputeTime(const Model& model, uint64_t tokens);
// Returns the FLOPs of computing so many tokens from position 0, this shard's part, declared or estimated.
double RecomputeFlops(const Model& model, uint64_t tokens);

// The look-ups of one prompt, with the time of need counted from now.
struct Asked {
  std::vector<storage::Query> segments;
  std::optional<storage::PrefixText> text;  // of models whose engines use prefixes, unless it is too long
  double tokens_per_second = 0;             // that the engine computes; 0: not known
};
// INVALID_ARGUMENT, naming the field in `field`.
absl::StatusOr<Asked> ReadPrompt(const std::string& field, const v1::Prompt& prompt, const Model& model);
// Reads the segments only, without the text, which hashes every token once more.
absl::StatusOr<std::vector<storage::Query>> ReadSegments(const std::string& field, const v1::Prompt& prompt,
                                                         const Model& model);
// Returns the most objects that the prompt's look-up takes; before anything is read.
uint64_t CountLookups(const v1::Prompt& prompt, const Model& model);

// The plan of one object that would be stored, its text, and the cost of computing it.
struct NamedObject {
  ObjectHeader plan;
  TextDigest text;
  storage::Nanos recompute;
  double flops;
};
// Nothing when it is too short to have an interior. INVALID_ARGUMENT, naming the field in `field`.
absl::StatusOr<std::optional<NamedObject>> ReadObjectName(const std::string& field, const v1::ObjectName& name,
                                                          const Model& model);

}  // namespace ashlar::daemon
