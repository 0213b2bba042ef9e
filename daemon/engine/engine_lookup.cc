// SPDX-License-Identifier: Apache-2.0
// Lookups: Match, AttachLease, Release.
#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.pb.h"
#include "daemon/engine/engine_service.h"
#include "daemon/engine/match_reply.h"
#include "daemon/engine/prompt_lookup.h"
#include "daemon/engine/request_fields.h"
#include "proto/invalid.h"
#include "proto/limits.h"

namespace ashlar::daemon {
void EngineService::Match(const v1::MatchRequest& request, v1::MatchReply* reply, Done done) {
  const auto session = sessions_.Resolve(request.session());
  if (!session.ok()) return done(session.status());
  const auto model = (*session)->FindModel(request.model());
  if (model == nullptr) return done(Invalid("model: unknown handle ", request.model()));
  if (static_cast<uint64_t>(request.prompts_size()) > limits::kMaxPromptsPerCall) {
    return done(Invalid("prompts: too many; expected at most ", limits::kMaxPromptsPerCall));
  }
  uint64_t lookups = 0;
  for (const v1::Prompt& prompt : request.prompts()) lookups += CountLookups(prompt, *model);
  if (lookups > limits::kMaxLookupsPerMatch) {
    return done(
        Invalid("prompts: ", lookups, " shards of segments together; expected at most ", limits::kMaxLookupsPerMatch));
  }
  std::vector<ParsedPrompt> prompts;
  for (int i = 0; i < request.prompts_size(); ++i) {
    auto asked = ReadPrompt(absl::StrCat("prompts[", i, "]"), request.prompts(i), *model);
    if (!asked.ok()) return done(asked.status());
    prompts.push_back(*std::move(asked));
  }
  struct Call {
    std::vector<ParsedPrompt> prompts;
    size_t next = 0;
    MatchReplyWriter writer;
    std::optional<PromptLookup> lookup;  // prompt of the lookup
    RemoteLookup::Adopted adopted;
  };
  const auto call = std::make_shared<Call>(Call{.prompts = std::move(prompts), .writer = MatchReplyWriter()});
  const auto look_up = [this, session = *session, model, call, reply, done](storage::Slice& slice) {
    prefills_.EndRoutesWith(session);
    for (; call->next < call->prompts.size(); ++call->next) {
      if (!call->lookup) {
        call->lookup.emplace(*this, *session, call->prompts[call->next], call->writer, reply->add_prompts());
      }
      if (!call->lookup->Run(slice)) return false;
      NoteBacklog(*session, *model, call->prompts[call->next].tokens, *call->lookup);
      call->lookup.reset();
    }
    done(absl::OkStatus());
    return true;
  };
  std::vector<const ParsedPrompt*> asked;
  for (const ParsedPrompt& prompt : call->prompts) asked.push_back(&prompt);
  FindElsewhere((*session)->about().tenant, asked,
                [this, session = *session, call, look_up, done](RemoteLookup::Adopted adopted) {
                  if (adopted != nullptr) {
                    for (ParsedPrompt& prompt : call->prompts) adopted->Mark(prompt.segments);
                  }
                  call->adopted = std::move(adopted);
                  sessions_.OnLoop(session, CallClass::kRequest, done, look_up);
                });
}

bool EngineService::PromptLookup::Run(storage::Slice& slice) {
  const storage::SessionId session = session_.about().id;
  const auto& [segments, text, rate, tokens] = asked_;
  if (!found_) {
    if (search_ == nullptr) {
      if (text.has_value()) service_.observer_.Prompted(session_.about().tenant, text->tokens().size());
      search_ = service_.cache_.StartLookup(
          session, segments, text.has_value() ? &*text : nullptr,
          [this](const storage::Found& hit) { return writer_.Take(hit); }, lease_);
    }
    if (!search_->Run(slice)) return false;
    match_ = search_->Take();
    search_ = nullptr;
    found_ = true;
  } else if (match_.lease != storage::LeaseId{} && !service_.cache_.Holds(session, match_.lease)) {
    DropSegments();
  }
  if (!MatchReplyWriter::Write(match_, written_, slice, out_)) return false;
  if (rate > 0) {
    service_.observer_.Saved(session_.about().tenant, static_cast<double>(TokensFound()) / rate);
  }
  // The engine computes a missed first segment anyway, so the next prompt can resume at its end.
  if (!text.has_value() && !segments.empty() && out_->prefix_depth() == 0) {
    out_->add_checkpoint_positions(segments[0].tokens);
  }
  return true;
}

// The engine computes what the lookup has not found.
void EngineService::NoteBacklog(const Session& session, const Model& model, uint64_t tokens,
                                const PromptLookup& lookup) {
  const uint64_t computed = tokens - std::min(tokens, lookup.TokensFound());
  router_.backlog().Add(session.about().id, session.about().tenant, model.ns, computed, model.tokens_per_second);
}

// Includes the seams of segments, which engines compute.
uint64_t EngineService::PromptLookup::TokensFound() const {
  uint64_t tokens = match_.prefix.depth;
  for (size_t i = 0; i < asked_.segments.size(); ++i) {
    if (match_.found[i].reason == MissReason::kNone) tokens += asked_.segments[i].tokens;
  }
  return tokens;
}

// The lease expired between two slices, so the found objects are released.
void EngineService::PromptLookup::DropSegments() {
  const storage::Found lost{.reason = MissReason::kLeaseLost};
  match_ = {.found = std::vector<storage::Found>(asked_.segments.size(), lost)};
  out_->Clear();
  written_ = 0;
}

void EngineService::AttachLease(const v1::AttachLeaseRequest& request, v1::AttachLeaseReply* reply, Done done) {
  const auto session = sessions_.Resolve(request.session());
  if (!session.ok()) return done(session.status());
  const auto lease = ReadLease("lease", request.lease());
  if (!lease.ok()) return done(lease.status());
  const auto model = (*session)->FindModel(request.model());
  if (model == nullptr && request.model() != 0) return done(Invalid("model: unknown handle ", request.model()));
  sessions_.OnLoop(*session, CallClass::kRequest, done, [this, session = *session, lease = *lease, model, reply, done] {
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
    storage::Slice whole;
    size_t written = 0;
    MatchReplyWriter::Write(*match, written, whole, reply->mutable_match());
    done(absl::OkStatus());
  });
}

void EngineService::Release(const v1::ReleaseRequest& request, v1::ReleaseReply*, Done done) {
  const auto session = sessions_.Resolve(request.session());
  if (!session.ok()) return done(session.status());
  if (static_cast<uint64_t>(request.leases_size()) > limits::kMaxReleasesPerCall) {
    return done(Invalid("leases: too many; expected at most ", limits::kMaxReleasesPerCall));
  }
  std::vector<storage::LeaseId> leases;
  for (int i = 0; i < request.leases_size(); ++i) {
    const auto lease = ReadLease(absl::StrCat("leases[", i, "]"), request.leases(i));
    if (!lease.ok()) return done(lease.status());
    leases.push_back(*lease);
  }
  sessions_.OnLoop(
      *session, CallClass::kRelease, done,
      [this, session = *session, leases = std::move(leases), next = size_t{0}, done](storage::Slice& slice) mutable {
        for (; next < leases.size(); ++next) {
          if (!slice.Take()) return false;
          cache_.EndLease(session->about().id, leases[next]);
          admissions_.pools().Release(session->about().id, leases[next]);
        }
        if (!cache_.SettleLeases(session->about().id, slice)) return false;
        done(absl::OkStatus());
        return true;
      });
}

}  // namespace ashlar::daemon
