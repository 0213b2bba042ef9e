// SPDX-License-Identifier: Apache-2.0
// Model::LookupAndLand: the daemon starts to land what it finds before the engine has read the match.
#include <utility>

#include "ashlar/v1/cache.pb.h"
#include "client/session/model.h"
#include "client/session/prompt_message.h"
#include "client/session/rpc.h"
#include "proto/limits.h"

namespace ashlar {
namespace {

constexpr size_t kCallBytes = 256;  // limit of what the call itself adds: session and number

}  // namespace

// No other thread has the landing before it is returned, so its mutex is not held.
ABSL_NO_THREAD_SAFETY_ANALYSIS
std::optional<MatchAndLanding> Model::TryLookupAndLand(const Prompt& prompt, std::span<const int32_t> page_table,
                                                       std::span<const uint32_t> group_pages) {
  const internal::Deadline deadline = reconnector_->CallDeadline();
  const absl::StatusOr<internal::ModelBinding> binding = Bind();
  if (!binding.ok() || binding->pages == nullptr ||
      !internal::CheckMessage(prompt, binding->connection->protocol()).ok())
    return std::nullopt;
  internal::Connection& connection = *binding->connection;
  if (!connection.looks_up_and_lands()) return std::nullopt;
  // Held before it is requested, and until the landing is quiesced. If the answer does not arrive, the lease is
  // released.
  auto lease = internal::LeaseHold::Make(binding->connection, internal::RandomLease(), deadline);
  if (!lease.ok()) return std::nullopt;
  v1::LookupAndLandRequest request;
  request.set_lease((*lease)->lease());
  request.set_pages_id(binding->pages_id);
  request.mutable_page_table()->Add(page_table.begin(), page_table.end());
  request.mutable_group_pages()->Add(group_pages.begin(), group_pages.end());
  request.set_model(binding->model->id());
  internal::Describe(prompt, opened_->uses_prefixes(), *request.mutable_prompt());
  if (request.ByteSizeLong() + kCallBytes > limits::kMaxRequestBytes) return std::nullopt;

  auto landing = std::make_unique<Landing::State>(opened_->layout());
  landing->model = binding->model;
  landing->lease = *std::move(lease);
  landing->pages = binding->pages;
  landing->call = internal::LandCall::Start(binding->connection, request);
  if (landing->call == nullptr) return std::nullopt;
  connection.leases().Used(landing->lease->lease());
  const absl::StatusOr<const v1::PromptMatch*> answer = landing->call->WaitMatch(deadline);
  if (!answer.ok()) {
    connection.rpc().Ended(answer.status());
    if (absl::IsUnimplemented(answer.status())) {
      connection.SetLooksUpAndLands(false);
      return std::nullopt;
    }
    landing->decided = true;
    const MissReason reason = internal::ToMissReason(answer.status());
    return MatchAndLanding{Match::Missed(prompt.segment_lengths, reason), {}, Landing(std::move(landing))};
  }
  Match match = Match::Answered(**answer, binding->connection, opened_->layout(), opened_->ns(), prompt.segment_lengths,
                                deadline);
  if (std::optional<std::vector<size_t>> places = match.PlacesOf(**answer)) {
    std::vector<LandSegment> segments = match.WhatToLand();
    landing->asked = *std::move(places);
    landing->reasons.assign(segments.size(), MissReason::kNone);
    landing->decided = segments.empty();
    for (const LandSegment& segment : segments) landing->tuples.push_back(match.TuplesIn(segment.segment));
    return MatchAndLanding{std::move(match), std::move(segments), Landing(std::move(landing))};
  }

  // The engine would compute into slots to which the daemon still writes. The engine lands useful segments again once
  // the daemon has stopped writing.
  landing->call->Abandon();
  if (!landing->call->WaitQuiesced(deadline)) {
    landing->decided = true;
    match = Match::Missed(prompt.segment_lengths, MissReason::kTimedOut);
    return MatchAndLanding{std::move(match), {}, Landing(std::move(landing))};
  }
  landing = nullptr;
  return LandAll(std::move(match), page_table, group_pages);
}

MatchAndLanding Model::LandAll(Match match, std::span<const int32_t> page_table,
                               std::span<const uint32_t> group_pages) {
  std::vector<LandSegment> segments = match.WhatToLand();
  Landing landing = Land(match, page_table, segments, group_pages);
  return {std::move(match), std::move(segments), std::move(landing)};
}

MatchAndLanding Model::LookupAndLand(const Prompt& prompt, std::span<const int32_t> page_table,
                                     std::span<const uint32_t> group_pages) {
  if (std::optional<MatchAndLanding> both = TryLookupAndLand(prompt, page_table, group_pages)) {
    return *std::move(both);
  }
  return LandAll(Lookup(prompt), page_table, group_pages);
}

}  // namespace ashlar
