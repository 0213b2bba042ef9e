// Keeping what a text was computed with, for others to resume from: Commit.
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.pb.h"
#include "daemon/engine_service.h"
#include "daemon/request_fields.h"
#include "daemon/tensor_sources.h"
#include "proto/limits.h"
#include "proto/prefix.h"

namespace ashlar::daemon {
namespace {

template <typename... Parts>
absl::Status Bad(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

// A request, as far as it can be judged by itself.
struct Text {
  std::shared_ptr<const Model> model;
  std::vector<int32_t> tokens;
  uint64_t prompt_tokens = 0;
  Provenance provenance = Provenance::kExact;
  ConversationId conversation{};
  struct Captured {
    uint64_t depth = 0;
    TensorSources tensors;
  };
  std::vector<Captured> checkpoints;
  std::shared_ptr<const Pages> pages;  // null: unknown
  std::vector<int32_t> page_table;
  storage::LeaseId lease{};
  storage::Nanos deadline = 0;
};

absl::Status ReadCheckpoints(const v1::CommitRequest& request, const Session& session, Text& text) {
  const int count = request.checkpoints_size();
  if (count == 0) return Bad("checkpoints: none");
  if (static_cast<uint64_t>(count) > limits::kMaxCheckpointsPerCommit) {
    return Bad("checkpoints: more than ", limits::kMaxCheckpointsPerCommit);
  }
  uint64_t before = 0;
  for (int i = 0; i < count; ++i) {
    const std::string field = absl::StrCat("checkpoints[", i, "]");
    const v1::CapturedState& captured = request.checkpoints(i);
    if (captured.depth() <= before) return Bad(field, ".depth: not behind the one before");
    if (captured.depth() > text.tokens.size()) return Bad(field, ".depth: behind the text's last token");
    Text::Captured& out = text.checkpoints.emplace_back();
    out.depth = before = captured.depth();
    for (int j = 0; j < captured.parts_size(); ++j) {
      const std::string part = absl::StrCat(field, ".parts[", j, "]");
      if (absl::Status status = out.tensors.Add(part, j, captured.parts(j), session); !status.ok()) return status;
      if (IsTransition(static_cast<PartForm>(captured.parts(j).form()))) {
        return Bad(part, ".form: what is resumed from has no transitions");
      }
    }
  }
  if (before != text.tokens.size()) return Bad("checkpoints[", count - 1, "].depth: the last one is the text's end");
  return absl::OkStatus();
}

absl::StatusOr<Text> ReadText(const v1::CommitRequest& request, const Session& session) {
  Text text;
  text.model = session.FindModel(request.model());
  if (text.model == nullptr) return Bad("model: unknown handle ", request.model());
  if (!text.model->uses_prefixes()) return Bad("model: opened without prefixes");
  auto tokens = ReadTokens("tokens", request.tokens());
  if (!tokens.ok()) return tokens.status();
  text.tokens = *std::move(tokens);
  if (text.tokens.empty()) return Bad("tokens: empty");
  text.prompt_tokens = request.prompt_tokens();
  if (text.prompt_tokens == 0 || text.prompt_tokens > text.tokens.size()) {
    return Bad("prompt_tokens: not from 1 to ", text.tokens.size());
  }
  text.provenance = static_cast<Provenance>(request.provenance());
  if (request.provenance() != static_cast<uint32_t>(Provenance::kExact) &&
      request.provenance() != static_cast<uint32_t>(Provenance::kComposed)) {
    return Bad("provenance: unknown");
  }
  const auto conversation = ReadConversation("conversation", request.conversation());
  if (!conversation.ok()) return conversation.status();
  text.conversation = *conversation;
  if (text.provenance == Provenance::kComposed && text.conversation == ConversationId{}) {
    return Bad("conversation: composed states are a conversation's own, and it must be given");
  }
  if (absl::Status status = ReadCheckpoints(request, session, text); !status.ok()) return status;
  text.pages = session.FindPages(request.pages_id());
  if (static_cast<uint64_t>(request.page_table_size()) > limits::kMaxPromptTokens) {
    return Bad("page_table: more than ", limits::kMaxPromptTokens);
  }
  text.page_table.assign(request.page_table().begin(), request.page_table().end());
  if (!request.lease().empty()) {
    const auto lease = ReadLease("lease", request.lease());
    if (!lease.ok()) return lease.status();
    text.lease = *lease;
  }
  if (request.deadline_ns() < 0) return Bad("deadline_ns: negative");
  text.deadline = request.deadline_ns();
  return text;
}

}  // namespace

void EngineService::Commit(const v1::CommitRequest& request, v1::CommitReply*, Done done) {
  const auto session = Resolve(request.session());
  if (!session.ok()) return done(session.status());
  const auto text = ReadText(request, **session);
  if (!text.ok()) return done(text.status());
  done(absl::UnimplementedError("this version keeps no prefixes"));
}

}  // namespace ashlar::daemon
