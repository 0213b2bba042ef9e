// SPDX-License-Identifier: Apache-2.0
#include "client/session/model.h"

#include <utility>

#include "ashlar/v1/cache.pb.h"
#include "client/session/batching.h"
#include "client/session/prompt_message.h"
#include "client/session/rpc.h"
#include "proto/limits.h"
#include "proto/tokens.h"

namespace ashlar {
namespace {

using internal::Deadline;
using internal::ModelBinding;

constexpr size_t kLeaseBytes = 16;

internal::Load LoadOf(const Prompt& prompt, const internal::OpenedModel& model) {
  const uint64_t blocks = model.uses_prefixes() ? prompt.tokens.size() / PrefixBlockTokens(model.layout()) + 1 : 0;
  return {prompt.tokens.size_bytes() + prompt.segment_lengths.size() * 10 + prompt.media.size_bytes() + 162,
          (prompt.segment_lengths.size() + blocks) * model.shards()};
}
internal::Load LoadOf(const ObjectRun& run) {
  return {run.tokens.size_bytes() + run.media.size_bytes() + 98};
}

// The daemon's answer for every prompt, or the error if there is none.
absl::StatusOr<v1::MatchReply> AskMatch(const ModelBinding& binding, bool uses_prefixes,
                                        std::span<const Prompt> prompts, Deadline deadline) {
  v1::MatchRequest request;
  request.set_session(binding.connection->session());
  request.set_model(binding.model->id());
  for (const Prompt& prompt : prompts) {
    if (absl::Status fits = internal::CheckMessage(prompt, binding.connection->protocol()); !fits.ok()) return fits;
    v1::Prompt& asked = *request.add_prompts();
    internal::Describe(prompt, uses_prefixes, asked);
    asked.set_needed_in_ns(prompt.needed_in.count());
  }
  v1::MatchReply reply;
  if (absl::Status status = binding.connection->rpc().Match(request, reply, deadline); !status.ok()) return status;
  if (static_cast<size_t>(reply.prompts_size()) != prompts.size()) {
    return absl::InternalError("the daemon's reply has the wrong number of prompts");
  }
  return reply;
}

ReserveOutcome ToReserveOutcome(uint32_t wire) {
  const bool known = wire >= static_cast<uint32_t>(ReserveOutcome::kGranted) &&
                     wire <= static_cast<uint32_t>(ReserveOutcome::kDeclined);
  return known ? static_cast<ReserveOutcome>(wire) : ReserveOutcome::kUnavailable;
}

absl::StatusOr<std::vector<Reservation>> AskReserve(const ModelBinding& binding, std::span<const ObjectRun> runs,
                                                    Deadline deadline) {
  v1::ReserveRequest request;
  request.set_session(binding.connection->session());
  request.set_model(binding.model->id());
  for (const ObjectRun& run : runs) {
    absl::Status fits = internal::CheckProtocol("run", run.media, run.salt, binding.connection->protocol());
    if (!fits.ok()) return fits;
    v1::ObjectName* name = request.add_objects();
    name->set_kind(static_cast<uint32_t>(run.kind));
    name->set_tokens(PackTokens(run.tokens));
    name->set_media(PackMedia(run.media));
    name->set_salt(PackSalt(run.salt));
  }
  v1::ReserveReply reply;
  if (absl::Status status = binding.connection->rpc().Reserve(request, reply, deadline); !status.ok()) return status;
  if (static_cast<size_t>(reply.results_size()) != runs.size()) {
    return absl::InternalError("the daemon's reply has the wrong number of objects");
  }
  std::vector<Reservation> reservations;
  for (const v1::ReserveResult& result : reply.results()) {
    reservations.push_back(
        {ToReserveOutcome(result.outcome()), result.reservation(), binding.connection->generation()});
  }
  return reservations;
}

}  // namespace

absl::Status Model::DeclarePages(const Region& region, const PagedCache& pages) {
  if (absl::Status status = reconnector_->CheckProcess(); !status.ok()) return status;
  if (region.memory_ == nullptr) return absl::InvalidArgumentError("region: empty");
  return opened_->DeclarePages(region.memory_, pages, reconnector_->CallDeadline());
}

Match Model::Lookup(const Prompt& prompt) {
  return std::move(Lookup(std::span(&prompt, 1)).front());
}

std::vector<Match> Model::Lookup(std::span<const Prompt> prompts) {
  const Deadline deadline = reconnector_->CallDeadline();
  const absl::StatusOr<ModelBinding> binding = Bind();
  const auto ask = [&](std::span<const Prompt> part) -> absl::StatusOr<std::vector<Match>> {
    if (!binding.ok()) return binding.status();
    const absl::StatusOr<v1::MatchReply> reply = AskMatch(*binding, opened_->uses_prefixes(), part, deadline);
    if (!reply.ok()) return reply.status();
    std::vector<Match> matches;
    for (size_t i = 0; i < part.size(); ++i) {
      matches.push_back(Match::Answered(reply->prompts(static_cast<int>(i)), binding->connection, layout(), ns(),
                                        part[i].segment_lengths, deadline));
    }
    return matches;
  };
  const auto missed = [](const Prompt& prompt, const absl::Status& status) {
    return Match::Missed(prompt.segment_lengths, internal::ToMissReason(status));
  };
  return internal::AskInCalls<Match>(
      prompts, limits::kMaxPromptsPerCall, [&](const Prompt& prompt) { return LoadOf(prompt, *opened_); }, ask, missed);
}

Match Model::Attach(const std::string& lease, std::span<const uint64_t> segment_lengths) {
  const Deadline deadline = reconnector_->CallDeadline();
  const auto missed = [&](const absl::Status& status) {
    return Match::Missed(segment_lengths, internal::ToMissReason(status));
  };
  if (lease.size() != kLeaseBytes) return missed(absl::NotFoundError("lease: wrong size; expected 16 bytes"));
  const absl::StatusOr<ModelBinding> binding = Bind();
  if (!binding.ok()) return missed(binding.status());
  // Held before it is requested, so that a release of the same lease by another match of this client cannot overtake.
  const auto hold = internal::LeaseHold::Make(binding->connection, lease, deadline);
  if (!hold.ok()) return missed(hold.status());
  v1::AttachLeaseRequest request;
  request.set_session(binding->connection->session());
  request.set_lease(lease);
  request.set_model(binding->model->id());
  v1::AttachLeaseReply reply;
  const absl::Status status = binding->connection->rpc().AttachLease(request, reply, deadline);
  if (!status.ok()) return missed(status);
  binding->connection->leases().Used(lease);
  return Match::Answered(reply.match(), binding->connection, layout(), ns(), segment_lengths, deadline);
}

std::vector<Reservation> Model::Reserve(std::span<const ObjectRun> runs) {
  const Deadline deadline = reconnector_->CallDeadline();
  const absl::StatusOr<ModelBinding> binding = Bind();
  if (!binding.ok()) return std::vector<Reservation>(runs.size());
  return internal::AskInCalls<Reservation>(
      runs, limits::kMaxObjectsPerCall, [](const ObjectRun& run) { return LoadOf(run); },
      [&](std::span<const ObjectRun> part) { return AskReserve(*binding, part, deadline); },
      [](const ObjectRun&, const absl::Status&) { return Reservation(); });
}

// If it fails, the daemon reclaims the reservations at its own deadline.
void Model::Abandon(std::span<const Reservation> reservations) {
  const Deadline deadline = reconnector_->CallDeadline();  // limits all calls together
  const absl::StatusOr<ModelBinding> binding = Bind();
  if (!binding.ok()) return;
  v1::AbandonRequest request;
  request.set_session(binding->connection->session());
  const auto send = [&] {
    if (request.reservations().empty()) return;
    v1::AbandonReply reply;
    binding->connection->rpc().Abandon(request, reply, deadline).IgnoreError();
    request.clear_reservations();
  };
  for (const Reservation& reservation : reservations) {
    if (!reservation.granted() || reservation.generation != binding->connection->generation()) continue;
    request.add_reservations(reservation.id);
    if (static_cast<uint64_t>(request.reservations_size()) == limits::kMaxObjectsPerCall) send();
  }
  send();
}

}  // namespace ashlar
