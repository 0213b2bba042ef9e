#include <utility>

#include "ashlar/v1/cache.pb.h"
#include "client/match_impl.h"
#include "client/model_impl.h"
#include "client/rpc.h"
#include "proto/limits.h"
#include "proto/tokens.h"

namespace ashlar {
namespace {

using internal::Deadline;
using internal::ModelBinding;

// Room in a message for everything beside tokens.
constexpr size_t kMessageRoom = size_t{1} << 20;
constexpr size_t kLeaseBytes = 16;

size_t WireBytes(const Prompt& prompt) {
  return prompt.tokens.size_bytes() + prompt.segment_lengths.size() * 10 + 64;
}

bool FitsMessage(const Prompt& prompt) {
  return prompt.tokens.size() <= limits::kMaxPromptTokens && prompt.segment_lengths.size() <= limits::kMaxSegments;
}

// How many of `items`, from `first` on, go into one message.
template <typename Item, typename Bytes>
size_t CountForMessage(std::span<const Item> items, size_t first, size_t most, Bytes bytes) {
  size_t count = 0, sum = 0;
  while (first + count < items.size() && count < most) {
    sum += bytes(items[first + count]);
    if (count > 0 && sum > limits::kMaxMessageBytes - kMessageRoom) break;
    ++count;
  }
  return count;
}

// The daemon's answer for every prompt, or why there is none.
absl::StatusOr<v1::MatchReply> AskMatch(const ModelBinding& binding, std::span<const Prompt> prompts,
                                        Deadline deadline) {
  v1::MatchRequest request;
  request.set_session(binding.connection->session());
  request.set_model(binding.model);
  for (const Prompt& prompt : prompts) {
    if (!FitsMessage(prompt)) return absl::InvalidArgumentError("prompt: longer than the protocol allows");
    v1::Prompt* asked = request.add_prompts();
    asked->set_tokens(PackTokens(prompt.tokens));
    asked->mutable_segment_lengths()->Add(prompt.segment_lengths.begin(), prompt.segment_lengths.end());
  }
  v1::MatchReply reply;
  if (absl::Status status = binding.connection->rpc().Match(request, reply, deadline); !status.ok()) return status;
  if (static_cast<size_t>(reply.prompts_size()) != prompts.size()) {
    return absl::InternalError("the daemon answered for another number of prompts");
  }
  return reply;
}

ReserveOutcome ToReserveOutcome(uint32_t wire) {
  const bool known = wire >= static_cast<uint32_t>(ReserveOutcome::kGranted) &&
                     wire <= static_cast<uint32_t>(ReserveOutcome::kUnavailable);
  return known ? static_cast<ReserveOutcome>(wire) : ReserveOutcome::kUnavailable;
}

}  // namespace

const Layout& Model::layout() const {
  return impl_->opened->layout();
}
NamespaceId Model::ns() const {
  return impl_->opened->ns();
}

absl::Status Model::DeclarePages(const Region& region, const PagedCache& pages) {
  if (absl::Status status = impl_->keeper->CheckProcess(); !status.ok()) return status;
  if (region.impl_ == nullptr) return absl::InvalidArgumentError("region: empty");
  return impl_->opened->DeclarePages(region.impl_, pages, impl_->keeper->CallDeadline());
}

Match Model::Lookup(const Prompt& prompt) {
  return std::move(Lookup(std::span(&prompt, 1)).front());
}

std::vector<Match> Model::Lookup(std::span<const Prompt> prompts) {
  const Deadline deadline = impl_->keeper->CallDeadline();
  const absl::StatusOr<ModelBinding> binding = impl_->Bind();
  std::vector<Match> matches;
  matches.reserve(prompts.size());
  while (matches.size() < prompts.size()) {
    const size_t first = matches.size();
    const auto batch = prompts.subspan(first, CountForMessage(prompts, first, limits::kMaxPromptsPerCall, WireBytes));
    const absl::StatusOr<v1::MatchReply> reply =
        binding.ok() ? AskMatch(*binding, batch, deadline) : absl::StatusOr<v1::MatchReply>(binding.status());
    for (size_t i = 0; i < batch.size(); ++i) {
      const auto lengths = batch[i].segment_lengths;
      matches.push_back(Match(reply.ok() ? Match::Impl::Answered(reply->prompts(static_cast<int>(i)),
                                                                 binding->connection, layout(), ns(), lengths, deadline)
                                         : Match::Impl::Missed(lengths, internal::ToMissReason(reply.status()))));
    }
  }
  return matches;
}

Match Model::Attach(const std::string& lease, std::span<const uint64_t> segment_lengths) {
  const Deadline deadline = impl_->keeper->CallDeadline();
  const auto missed = [&](const absl::Status& status) {
    return Match(Match::Impl::Missed(segment_lengths, internal::ToMissReason(status)));
  };
  if (lease.size() != kLeaseBytes) return missed(absl::NotFoundError("lease: not 16 bytes"));
  const absl::StatusOr<ModelBinding> binding = impl_->Bind();
  if (!binding.ok()) return missed(binding.status());
  // Held before it is asked for: a release of the same lease by another match of this client must not overtake.
  const auto hold = internal::LeaseHold::Make(binding->connection, lease, deadline);
  if (!hold.ok()) return missed(hold.status());
  v1::AttachLeaseRequest request;
  request.set_session(binding->connection->session());
  request.set_lease(lease);
  v1::AttachLeaseReply reply;
  const absl::Status status = binding->connection->rpc().AttachLease(request, reply, deadline);
  if (!status.ok()) return missed(status);
  reply.mutable_match()->set_lease(lease);
  return Match(Match::Impl::Answered(reply.match(), binding->connection, layout(), ns(), segment_lengths, deadline));
}

std::vector<Reservation> Model::Reserve(std::span<const ObjectRun> runs) {
  const Deadline deadline = impl_->keeper->CallDeadline();
  const absl::StatusOr<ModelBinding> binding = impl_->Bind();
  std::vector<Reservation> reservations(runs.size());
  if (!binding.ok()) return reservations;
  const auto bytes = [](const ObjectRun& run) { return run.tokens.size_bytes() + 64; };
  for (size_t first = 0; first < runs.size();) {
    const size_t count = CountForMessage(runs, first, limits::kMaxObjectsPerCall, bytes);
    v1::ReserveRequest request;
    request.set_session(binding->connection->session());
    request.set_model(binding->model);
    for (const ObjectRun& run : runs.subspan(first, count)) {
      v1::ObjectName* name = request.add_objects();
      name->set_kind(static_cast<uint32_t>(run.kind));
      name->set_tokens(PackTokens(run.tokens));
    }
    v1::ReserveReply reply;
    const absl::Status status = binding->connection->rpc().Reserve(request, reply, deadline);
    if (status.ok() && static_cast<size_t>(reply.results_size()) == count) {
      for (size_t i = 0; i < count; ++i) {
        const v1::ReserveResult& result = reply.results(static_cast<int>(i));
        reservations[first + i] = {ToReserveOutcome(result.outcome()), result.reservation(),
                                   binding->connection->generation()};
      }
    }
    first += count;
  }
  return reservations;
}

void Model::Abandon(const Reservation& reservation) {
  if (!reservation.granted()) return;
  const absl::StatusOr<ModelBinding> binding = impl_->Bind();
  if (!binding.ok() || binding->connection->generation() != reservation.generation) return;
  v1::AbandonRequest request;
  request.set_session(binding->connection->session());
  request.add_reservations(reservation.id);
  v1::AbandonReply reply;
  // Should it fail, the daemon reclaims the reservation by its own deadline.
  binding->connection->rpc().Abandon(request, reply, impl_->keeper->CallDeadline()).IgnoreError();
}
}  // namespace ashlar
