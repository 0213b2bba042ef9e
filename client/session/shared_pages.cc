// SPDX-License-Identifier: Apache-2.0
#include "client/session/shared_pages.h"

#include <algorithm>
#include <utility>

#include "ashlar/v1/cache.pb.h"
#include "client/session/model.h"
#include "client/session/prompt_message.h"
#include "client/session/rpc.h"
#include "proto/limits.h"
#include "proto/prefix.h"

namespace ashlar {

using internal::Deadline;
using internal::ModelBinding;

void Admission::Take(const v1::Admission& admission) {
  const size_t count = std::min(segments_.size(), static_cast<size_t>(admission.segments_size()));
  for (size_t i = 0; i < count; ++i) {
    const v1::SharedPages& shared = admission.segments(static_cast<int>(i));
    segments_[i].content = static_cast<PageContent>(shared.content());
    segments_[i].pages.assign(shared.pages().begin(), shared.pages().end());
  }
  own_pages_.assign(admission.own_pages().begin(), admission.own_pages().end());
}

template <typename Request>
Request Admission::Ask() const {
  Request request;
  request.set_session(connection_->session());
  request.set_lease(lease_->lease());
  return request;
}

namespace {

AdmitOutcome ToOutcome(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kResourceExhausted:
      return AdmitOutcome::kBusy;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kNotFound:
      return AdmitOutcome::kInvalid;
    default:
      return AdmitOutcome::kUnavailable;
  }
}

PageShortage ToShortage(const v1::PageShortage& shortage) {
  return {shortage.needed(), shortage.free(), shortage.reclaimable(), shortage.held()};
}

std::vector<Admission::Segment> Placed(const Layout& layout, std::span<const uint64_t> lengths, uint32_t page_tokens) {
  std::vector<Admission::Segment> segments(lengths.size());
  for (size_t i = 0; i < lengths.size(); ++i) {
    segments[i].placement = PlaceInPages(layout, KindOfSegment(i), lengths[i], page_tokens);
  }
  return segments;
}

}  // namespace

std::optional<Admission> Model::NewAdmission(const ModelBinding& binding, std::span<const uint64_t> segment_lengths,
                                             Deadline deadline) const {
  auto hold = internal::LeaseHold::Make(binding.connection, internal::RandomLease(), deadline);
  if (!hold.ok()) return std::nullopt;
  Admission admission;
  admission.reconnector_ = reconnector_;
  admission.connection_ = binding.connection;
  admission.region_ = binding.pages;
  admission.lease_ = *std::move(hold);
  admission.page_tokens_ = binding.page_tokens;
  admission.segments_ = Placed(opened_->layout(), segment_lengths, binding.page_tokens);
  return admission;
}

Admitted Model::Admit(const Prompt& prompt, uint32_t own_pages, uint32_t prefix_blocks,
                      std::span<const uint32_t> unshared_segments, bool fills_later) {
  const Deadline deadline = reconnector_->CallDeadline();
  const absl::StatusOr<ModelBinding> binding = Bind();
  if (!binding.ok() || binding->pages_missing) return {};
  if (binding->pages == nullptr || !internal::CheckMessage(prompt, binding->connection->protocol()).ok())
    return {.outcome = AdmitOutcome::kInvalid};
  std::shared_ptr<const void> counted = opened_->CountRequest(binding->connection->generation());
  if (counted == nullptr) return {.outcome = AdmitOutcome::kOldRequests};
  // The hold begins before the request is sent: if the answer is lost, the lease is still released.
  std::optional<Admission> admission = NewAdmission(*binding, prompt.segment_lengths, deadline);
  if (!admission.has_value()) return {};
  for (const uint32_t segment : unshared_segments) admission->segments_.at(segment).placement = {};
  if (prefix_blocks > 0) {
    const uint64_t tokens = PrefixBlockTokens(opened_->layout());
    Admission::Segment block;
    block.placement = {.shared_pages = tokens / binding->page_tokens, .end_token = tokens};
    admission->segments_.insert(admission->segments_.end(), prefix_blocks, block);
  }
  admission->counted_ = std::move(counted);
  auto request = admission->Ask<v1::AdmitRequest>();
  request.set_pages_id(binding->pages_id);
  internal::Describe(prompt, /*uses_prefixes=*/false, *request.mutable_prompt());
  request.set_own_pages(own_pages);
  request.set_prefix_blocks(prefix_blocks);
  request.mutable_unshared_segments()->Add(unshared_segments.begin(), unshared_segments.end());
  request.set_fills_later(fills_later);
  request.set_deadline_ns(binding->connection->channel().InDaemonsClock(deadline));
  v1::AdmitReply reply;
  const absl::Status status = binding->connection->rpc().Admit(request, reply, deadline);
  if (!status.ok()) return {.outcome = ToOutcome(status)};
  if (!reply.has_admission()) return {.outcome = AdmitOutcome::kNoPages, .shortage = ToShortage(reply.lacks())};
  // The daemon does not support shared prefixes.
  if (static_cast<size_t>(reply.admission().segments_size()) < admission->segments_.size())
    return {.outcome = AdmitOutcome::kInvalid};
  admission->Take(reply.admission());
  return {.outcome = AdmitOutcome::kAdmitted, .admission = std::move(admission)};
}

std::vector<int32_t> Admission::PageTable(size_t segment) const {
  const Segment& placed = segments_.at(segment);
  std::vector<int32_t> table(placed.placement.first_page, -1);
  table.insert(table.end(), placed.pages.begin(), placed.pages.end());
  return table;
}

AdmitOutcome Admission::Extend(uint32_t own_pages, PageShortage* shortage) {
  // A daemon that has not yet noticed the end of the session would answer, and take the pages back a moment later.
  if (!valid()) return AdmitOutcome::kUnavailable;
  auto request = Ask<v1::ExtendAdmissionRequest>();
  request.set_own_pages(own_pages);
  v1::AdmitReply reply;
  const absl::Status status = connection_->rpc().ExtendAdmission(request, reply, reconnector_->CallDeadline());
  if (!status.ok()) return ToOutcome(status);
  if (!reply.has_admission()) {
    if (shortage != nullptr) *shortage = ToShortage(reply.lacks());
    return AdmitOutcome::kNoPages;
  }
  Take(reply.admission());
  return AdmitOutcome::kAdmitted;
}

bool Admission::ReportFilled(std::span<const uint32_t> segments) const {
  if (!valid()) return false;
  auto request = Ask<v1::MarkFilledRequest>();
  request.mutable_segments()->Add(segments.begin(), segments.end());
  v1::MarkFilledReply reply;
  return connection_->rpc().MarkFilled(request, reply, reconnector_->CallDeadline()).ok();
}

void Admission::SetFilled(std::span<const uint32_t> segments) {
  for (const uint32_t segment : segments) segments_.at(segment).content = PageContent::kFilled;
}

bool Admission::Refresh(std::chrono::milliseconds timeout, std::optional<std::span<const uint32_t>> to_fill) {
  if (!usable()) return false;
  v1::AdmitReply reply;
  auto request = Ask<v1::AttachAdmissionRequest>();
  if (to_fill.has_value()) request.mutable_to_fill()->mutable_segments()->Add(to_fill->begin(), to_fill->end());
  const Deadline deadline = std::min(internal::After(timeout), reconnector_->CallDeadline());
  if (!connection_->rpc().AttachAdmission(request, reply, deadline).ok()) return false;
  Take(reply.admission());
  return true;
}

bool Admission::valid() const {
  return usable() && connection_->channel().Alive();
}
void Admission::Release() {
  lease_.reset();
  counted_.reset();
}

}  // namespace ashlar
