// SPDX-License-Identifier: Apache-2.0
// Commit: keeps the states of a computed text, so that others can resume from them.
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.pb.h"
#include "daemon/engine/engine_service.h"
#include "daemon/engine/request_fields.h"
#include "daemon/engine/tensor_sources.h"
#include "daemon/events/block_texts.h"
#include "proto/invalid.h"
#include "proto/limits.h"
#include "proto/object.h"
#include "proto/prefix.h"
#include "storage/prefix/prefixes.h"

namespace ashlar::daemon {
namespace {

// Keeps a text's memory mapped while it is read.
struct KeptCommit {
  TensorSources::Regions regions;
  std::shared_ptr<const Pages> pages;
};

// Reads the offered states and checks them as far as possible without their plans.
absl::StatusOr<std::vector<TensorSources>> ReadStates(const v1::CommitRequest& request, const Session& session) {
  if (static_cast<uint64_t>(request.checkpoints_size()) > limits::kMaxCheckpointsPerCommit) {
    return Invalid("checkpoints: too many; expected at most ", limits::kMaxCheckpointsPerCommit);
  }
  const uint64_t tokens = request.tokens().size() / sizeof(int32_t);
  std::vector<TensorSources> states;
  uint64_t before = 0;
  for (int i = 0; i < request.checkpoints_size(); ++i) {
    const std::string field = absl::StrCat("checkpoints[", i, "]");
    const v1::CapturedState& captured = request.checkpoints(i);
    if (captured.depth() <= before) return Invalid(field, ".depth: must be greater than the previous depth");
    if (captured.depth() > tokens) return Invalid(field, ".depth: must not exceed the number of tokens");
    before = captured.depth();
    TensorSources& sources = states.emplace_back();
    for (int j = 0; j < captured.parts_size(); ++j) {
      const std::string part = absl::StrCat(field, ".parts[", j, "]");
      if (absl::Status status = sources.Add(part, j, captured.parts(j), session); !status.ok()) return status;
      if (IsTransition(static_cast<PartForm>(captured.parts(j).form()))) {
        return Invalid(part, ".form: a checkpoint has no transitions");
      }
      if (IsSpanRows(static_cast<PartForm>(captured.parts(j).form())))
        return Invalid(part, ".form: only spans have rows of inputs");
    }
  }
  if (states.empty()) return Invalid("checkpoints: empty; expected at least one");
  if (before != tokens)
    return Invalid("checkpoints[", states.size() - 1, "].depth: the last checkpoint must be at the end of tokens");
  return states;
}

// Reads the sources of the offered span, if there is one.
absl::StatusOr<TensorSources> ReadSpan(const v1::CommitRequest& request, const Session& session, const Model& model) {
  TensorSources sources;
  if (!request.has_span()) return sources;
  const uint64_t begin = request.span().begin(), tokens = request.tokens().size() / sizeof(int32_t);
  if (model.prefixes->span_tokens == 0)
    return Invalid("span: the model was opened without spans; set prefixes.span_tokens");
  if (begin == 0 || begin >= tokens)
    return Invalid("span.begin: out of range; expected at least 1 and less than the number of tokens");
  if (tokens - begin > model.prefixes->span_tokens) {
    return Invalid("span.begin: the span has ", tokens - begin, " tokens; the model was opened with at most ",
                   model.prefixes->span_tokens);
  }
  for (int i = 0; i < request.span().parts_size(); ++i) {
    const std::string part = absl::StrCat("span.parts[", i, "]");
    if (absl::Status status = sources.Add(part, i, request.span().parts(i), session); !status.ok()) return status;
    if (!IsSpanRows(static_cast<PartForm>(request.span().parts(i).form())))
      return Invalid(part, ".form: a span has only rows of inputs");
  }
  return sources;
}

// Reads all fields except the locations of tensors.
absl::StatusOr<storage::PrefixCommit> ReadText(const v1::CommitRequest& request, const Model& model) {
  auto tokens = ReadTokens("tokens", request.tokens());
  if (!tokens.ok()) return tokens.status();
  const uint64_t count = tokens->size();
  if (count == 0) return Invalid("tokens: empty");
  if (request.prompt_tokens() == 0 || request.prompt_tokens() > limits::kMaxPromptTokens) {
    return Invalid("prompt_tokens: out of range; expected 1 to ", limits::kMaxPromptTokens);
  }
  const bool composed = request.provenance() == static_cast<uint32_t>(Provenance::kComposed);
  if (!composed && request.provenance() != static_cast<uint32_t>(Provenance::kExact))
    return Invalid("provenance: ", request.provenance(), " is unknown; expected 1 (exact) or 2 (composed)");
  const auto conversation = ReadConversation("conversation", request.conversation());
  if (!conversation.ok()) return conversation.status();
  if (composed && *conversation == ConversationId{}) {
    return Invalid("conversation: required, because composed states are private to a conversation");
  }
  auto media = UnpackMedia("media", request.media(), count);
  if (!media.ok()) return media.status();
  const auto salt = UnpackSalt("salt", request.salt());
  if (!salt.ok()) return salt.status();
  storage::LeaseId lease{};
  if (!request.lease().empty()) {
    const auto read = ReadLease("lease", request.lease());
    if (!read.ok()) return read.status();
    lease = *read;
  }
  if (request.deadline_ns() < 0) return Invalid("deadline_ns: negative; expected 0 or more");
  if (static_cast<uint64_t>(request.page_table_size()) > limits::kMaxPromptTokens) {
    return Invalid("page_table: too many; expected at most ", limits::kMaxPromptTokens);
  }
  return storage::PrefixCommit{.text = {model.prefixes, *std::move(tokens), *conversation, *std::move(media), *salt},
                               .prompt_tokens = request.prompt_tokens(),
                               .provenance = composed ? Provenance::kComposed : Provenance::kExact,
                               .lease = lease,
                               .checkpoints = {},
                               .span = std::nullopt,
                               .rows = {},
                               .page_table = nullptr,
                               .deadline = request.deadline_ns(),
                               .keep = nullptr};
}

// Takes the part of the groups' tables that the text needs; every object of the text refers to it. Returns false if a
// table is too short.
bool TakePages(const v1::CommitRequest& request, const Pages& pages, storage::PrefixCommit& commit) {
  const std::span<const int32_t> given(request.page_table().data(), request.page_table_size());
  const std::span<const uint32_t> group_pages(request.group_pages().data(), request.group_pages_size());
  const auto tables = pages.Divide(given.size(), group_pages);
  if (!tables.ok()) return false;
  const uint64_t tokens = commit.text.tokens().size();
  const auto table = std::make_shared<std::vector<int32_t>>();
  std::vector<size_t> needed = {0};
  for (size_t g = 0; g < pages.groups().size(); ++g) {
    const uint64_t page = pages.groups()[g].page_tokens;
    const std::span<const int32_t> own = given.subspan((*tables)[g], (*tables)[g + 1] - (*tables)[g]);
    const std::span<const int32_t> used = own.first(std::min<uint64_t>(own.size(), (tokens + page - 1) / page));
    table->insert(table->end(), used.begin(), used.end());
    needed.push_back(table->size());
  }
  if (!pages.CheckPositions(*table, needed, 0, tokens).ok()) return false;
  commit.rows = pages.RowsIn(*table, needed);
  commit.page_table = table;
  return true;
}

// Writes all locations into `commit`. Returns false unless the sources are exactly the parts of all states, inside
// their regions, and the text's tokens are inside its pages.
bool Locate(const v1::CommitRequest& request, std::span<const TensorSources> states, const TensorSources& of_span,
            const std::shared_ptr<const Pages>& pages, const Model& model, storage::PrefixCommit& commit) {
  auto kept = std::make_shared<KeptCommit>();
  for (size_t i = 0; i < states.size(); ++i) {
    storage::PrefixCommit::Checkpoint& checkpoint = commit.checkpoints.emplace_back();
    checkpoint.depth = request.checkpoints(static_cast<int>(i)).depth();
    // The plan's tensors do not depend on the key.
    const auto plan =
        PlanPrefixCheckpoint(model.layout, model.ns, Key{}, model.prefixes->block_tokens, checkpoint.depth);
    if (!plan.ok() || !states[i].Fit(*plan, checkpoint.tensors, kept->regions)) return false;
  }
  if (request.has_span()) {
    storage::PrefixCommit::Span& span =
        commit.span.emplace(storage::PrefixCommit::Span{.begin = request.span().begin()});
    const auto plan = PlanPrefixSpan(model.layout, model.ns, Key{}, model.prefixes->span_dtype, span.begin,
                                     commit.text.tokens().size());
    if (!plan.ok() || !of_span.Fit(*plan, span.tensors, kept->regions)) return false;
  }
  if (model.prefixes->paged) {
    if (pages == nullptr || pages->model().ns != model.ns || pages->model().shard != model.shard) return false;
    if (!TakePages(request, *pages, commit)) return false;
    kept->pages = pages;
  }
  commit.keep = std::move(kept);
  return true;
}

}  // namespace

void EngineService::Commit(const v1::CommitRequest& request, v1::CommitReply* reply, Done done) {
  const auto session = sessions_.Resolve(request.session());
  if (!session.ok()) return done(session.status());
  const auto model = (*session)->FindModel(request.model());
  if (model == nullptr) return done(Invalid("model: unknown handle ", request.model()));
  if (model->prefixes == nullptr)
    return done(Invalid("model: was opened without prefixes; set prefixes when opening the model"));
  auto read = ReadText(request, *model);
  if (!read.ok()) return done(read.status());
  const auto states = ReadStates(request, **session);
  if (!states.ok()) return done(states.status());
  const auto span = ReadSpan(request, **session, *model);
  if (!span.ok()) return done(span.status());
  const auto answer_all = [reply, count = request.checkpoints_size()](CommitOutcome outcome) {
    reply->mutable_outcomes()->Resize(count, static_cast<uint32_t>(outcome));
  };
  const auto commit = std::make_shared<storage::PrefixCommit>(*std::move(read));
  const auto pages = (*session)->FindPages(request.pages_id());
  if (pages != nullptr) {
    if (absl::Status whole = pages->region()->CheckWhole("pages_id"); !whole.ok()) return done(whole);
  }
  if (!Locate(request, *states, *span, pages, *model, *commit)) {
    answer_all(CommitOutcome::kBadSource);
    return done(absl::OkStatus());
  }
  const Done refused = BusyAsData(done, [answer_all] { answer_all(CommitOutcome::kBusy); });
  sessions_.OnLoop(*session, CallClass::kRequest, refused,
                   [this, session = *session, ns = model->ns, commit, reply, done] {
                     // Tokens of salted texts are not announced, because routers would send prompts with other salts
                     // here, which miss.
                     if (texts_ != nullptr && !commit->text.salted())
                       texts_->Note(session->about().tenant, ns, commit->text.shared());
                     cache_.Commit(session->about().id, std::move(*commit),
                                   [reply, done](const std::vector<CommitOutcome>& outcomes) {
                                     for (const CommitOutcome outcome : outcomes)
                                       reply->add_outcomes(static_cast<uint32_t>(outcome));
                                     done(absl::OkStatus());
                                   });
                   });
}

}  // namespace ashlar::daemon
