// Looking up: Match, AttachLease, Release.
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.pb.h"
#include "daemon/engine_service.h"
#include "daemon/match_reply.h"
#include "daemon/request_fields.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

template <typename... Parts>
absl::Status Bad(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

}  // namespace

void EngineService::Match(const v1::MatchRequest& request, v1::MatchReply* reply, Done done) {
  const auto session = Resolve(request.session());
  if (!session.ok()) return done(session.status());
  const auto model = (*session)->FindModel(request.model());
  if (model == nullptr) return done(Bad("model: unknown handle ", request.model()));
  if (static_cast<uint64_t>(request.prompts_size()) > limits::kMaxPromptsPerCall) {
    return done(Bad("prompts: more than ", limits::kMaxPromptsPerCall));
  }
  uint64_t lookups = 0;
  for (const v1::Prompt& prompt : request.prompts()) lookups += CountLookups(prompt, *model);
  if (lookups > limits::kMaxLookupsPerMatch) {
    return done(Bad("prompts: more than ", limits::kMaxLookupsPerMatch, " shards of segments together"));
  }
  auto prompts = std::make_shared<std::vector<Asked>>();
  for (int i = 0; i < request.prompts_size(); ++i) {
    auto asked = ReadPrompt(absl::StrCat("prompts[", i, "]"), request.prompts(i), *model);
    if (!asked.ok()) return done(asked.status());
    prompts->push_back(*std::move(asked));
  }
  OnLoop(*session, Room::kRequest, done, [this, session = *session, prompts, reply, done] {
    MatchReplyWriter writer;
    for (const Asked& asked : *prompts) LookUp(*session, asked, writer, reply->add_prompts());
    done(absl::OkStatus());
  });
}

storage::Match EngineService::LookUp(const Session& session, const Asked& asked, MatchReplyWriter& writer,
                                     v1::PromptMatch* out, const storage::LeaseId& lease) {
  const storage::SessionId id = session.about().id;
  const auto has_room = [&writer](const storage::Found& hit) { return writer.Take(hit); };
  const auto& [segments, text] = asked;
  if (text.has_value()) observer_.Prompted(session.about().tenant, text->tokens().size());
  storage::Match match = text.has_value() ? cache_.Lookup(id, segments, *text, has_room, lease)
                                          : cache_.Lookup(id, segments, has_room, lease);
  MatchReplyWriter::Write(match, out);
  // A missed first segment is computed anyway: its end is where the next prompt can go on from.
  if (!text.has_value() && !segments.empty() && out->prefix_depth() == 0) {
    out->add_checkpoint_positions(segments[0].tokens);
  }
  return match;
}

void EngineService::AttachLease(const v1::AttachLeaseRequest& request, v1::AttachLeaseReply* reply, Done done) {
  const auto session = Resolve(request.session());
  if (!session.ok()) return done(session.status());
  const auto lease = ReadLease("lease", request.lease());
  if (!lease.ok()) return done(lease.status());
  const auto model = (*session)->FindModel(request.model());
  if (model == nullptr && request.model() != 0) return done(Bad("model: unknown handle ", request.model()));
  OnLoop(*session, Room::kRequest, done, [this, session = *session, lease = *lease, model, reply, done] {
    const auto shard = model == nullptr ? std::nullopt : std::optional(model->shard);
    absl::StatusOr<storage::Match> match = cache_.Attach(session->about().id, lease, shard);
    if (!match.ok()) return done(match.status());
    MatchReplyWriter writer;
    for (storage::Found& found : match->found) {
      if (found.reason != MissReason::kNone) continue;
      if (model != nullptr && !model->Has(*found.header)) {
        found = {.reason = MissReason::kInvalidRequest};
      } else if (!writer.Take(found)) {
        found = {.reason = MissReason::kBusy};
      }
    }
    MatchReplyWriter::Write(*match, reply->mutable_match());
    done(absl::OkStatus());
  });
}

void EngineService::Release(const v1::ReleaseRequest& request, v1::ReleaseReply*, Done done) {
  const auto session = Resolve(request.session());
  if (!session.ok()) return done(session.status());
  if (static_cast<uint64_t>(request.leases_size()) > limits::kMaxReleasesPerCall) {
    return done(Bad("leases: more than ", limits::kMaxReleasesPerCall));
  }
  std::vector<storage::LeaseId> leases;
  for (int i = 0; i < request.leases_size(); ++i) {
    const auto lease = ReadLease(absl::StrCat("leases[", i, "]"), request.leases(i));
    if (!lease.ok()) return done(lease.status());
    leases.push_back(*lease);
  }
  OnLoop(*session, Room::kRelease, done, [this, session = *session, leases = std::move(leases), done] {
    for (const storage::LeaseId& lease : leases) {
      cache_.Release(session->about().id, lease);
      pools_.Release(session->about().id, lease);
    }
    done(absl::OkStatus());
  });
}

}  // namespace ashlar::daemon
