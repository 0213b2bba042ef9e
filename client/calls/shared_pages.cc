// SPDX-License-Identifier: Apache-2.0
#include "ashlar/shared_pages.h"

#include <algorithm>
#include <utility>

#include "ashlar/v1/cache.pb.h"
#include "client/calls/model_impl.h"
#include "client/calls/prompt_message.h"
#include "client/session/rpc.h"
#include "proto/limits.h"

namespace ashlar {

using internal::Deadline;
using internal::ModelBinding;

struct Admission::Impl {
  // Takes what the daemon says of it.
  void Take(const v1::Admission& admission) {
    const size_t count = std::min(segments.size(), static_cast<size_t>(admission.segments_size()));
    for (size_t i = 0; i < count; ++i) {
      const v1::SharedPages& shared = admission.segments(static_cast<int>(i));
      segments[i].content = static_cast<PageContent>(shared.content());
      segments[i].pages.assign(shared.pages().begin(), shared.pages().end());
    }
    own_pages.assign(admission.own_pages().begin(), admission.own_pages().end());
  }

  template <typename Request>
  Request Ask() const {
    Request request;
    request.set_session(connection->session());
    request.set_lease(lease->lease());
    return request;
  }

  bool usable() const { return lease != nullptr && !creator.InChild() && !connection->ended(); }

  std::shared_ptr<internal::Reconnector> reconnector;
  std::shared_ptr<internal::Connection> connection;
  std::shared_ptr<internal::RegionMemory> region;  // stays hosted as long as the request runs
  std::shared_ptr<const void> counted;             // among the model's requests
  std::shared_ptr<internal::LeaseHold> lease;      // null: released
  uint32_t page_tokens = 0;
  std::vector<Segment> segments;
  std::vector<int32_t> own_pages;
  internal::CreatorProcess creator;
};

namespace {

constexpr size_t kLeaseBytes = 16;

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

PageShortage ToShortage(const v1::PageShortage& lacks) {
  return {lacks.needed(), lacks.free(), lacks.reclaimable(), lacks.held()};
}

std::vector<Admission::Segment> Placed(const Layout& layout, std::span<const uint64_t> lengths, uint32_t page_tokens) {
  std::vector<Admission::Segment> segments(lengths.size());
  for (size_t i = 0; i < lengths.size(); ++i) {
    segments[i].placement = PlaceInPages(layout, KindOfSegment(i), lengths[i], page_tokens);
  }
  return segments;
}

}  // namespace

std::unique_ptr<Admission::Impl> Model::Impl::NewAdmission(const ModelBinding& binding,
                                                           std::span<const uint64_t> segment_lengths,
                                                           const std::string& lease, Deadline deadline) const {
  auto hold = internal::LeaseHold::Make(binding.connection, lease, deadline);
  if (!hold.ok()) return nullptr;
  auto admission = std::make_unique<Admission::Impl>();
  admission->reconnector = reconnector;
  admission->connection = binding.connection;
  admission->region = binding.pages;
  admission->lease = *std::move(hold);
  admission->page_tokens = binding.page_tokens;
  admission->segments = Placed(opened->layout(), segment_lengths, binding.page_tokens);
  return admission;
}

Admitted Model::Admit(const Prompt& prompt, uint32_t own_pages) {
  const Deadline deadline = impl_->reconnector->CallDeadline();
  const absl::StatusOr<ModelBinding> binding = impl_->Bind();
  if (!binding.ok() || binding->pages_missing) return {};
  if (binding->pages == nullptr || !internal::FitsMessage(prompt, binding->connection->protocol()))
    return {.outcome = AdmitOutcome::kInvalid};
  std::shared_ptr<const void> counted = impl_->opened->CountRequest(binding->connection->generation());
  if (counted == nullptr) return {.outcome = AdmitOutcome::kOldRequests};
  // The hold begins before the request is sent: if the answer is lost, the lease is still released.
  auto impl = impl_->NewAdmission(*binding, prompt.segment_lengths, internal::RandomLease(), deadline);
  if (impl == nullptr) return {};
  impl->counted = std::move(counted);
  auto request = impl->Ask<v1::AdmitRequest>();
  request.set_pages_id(binding->pages_id);
  internal::Describe(prompt, /*uses_prefixes=*/false, *request.mutable_prompt());
  request.set_own_pages(own_pages);
  request.set_deadline_ns(binding->connection->channel().InDaemonsClock(deadline));
  v1::AdmitReply reply;
  const absl::Status status = binding->connection->rpc().Admit(request, reply, deadline);
  if (!status.ok()) return {.outcome = ToOutcome(status)};
  if (!reply.has_admission()) return {.outcome = AdmitOutcome::kNoPages, .lacks = ToShortage(reply.lacks())};
  impl->Take(reply.admission());
  return {.outcome = AdmitOutcome::kAdmitted, .admission = Admission(std::move(impl))};
}

Admitted Model::AttachAdmission(const std::string& lease, uint32_t page_tokens,
                                std::span<const uint64_t> segment_lengths) {
  const Deadline deadline = impl_->reconnector->CallDeadline();
  absl::StatusOr<ModelBinding> binding = impl_->Bind();
  if (!binding.ok()) return {};
  if (lease.size() != kLeaseBytes || page_tokens == 0) return {.outcome = AdmitOutcome::kInvalid};
  binding->page_tokens = page_tokens;
  auto impl = impl_->NewAdmission(*binding, segment_lengths, lease, deadline);
  if (impl == nullptr) return {};
  v1::AdmitReply reply;
  const absl::Status status =
      binding->connection->rpc().AttachAdmission(impl->Ask<v1::AttachAdmissionRequest>(), reply, deadline);
  if (!status.ok()) return {.outcome = ToOutcome(status)};
  if (static_cast<size_t>(reply.admission().segments_size()) != segment_lengths.size()) {
    return {.outcome = AdmitOutcome::kInvalid};  // a lease of a prompt with other segments
  }
  impl->Take(reply.admission());
  return {.outcome = AdmitOutcome::kAdmitted, .admission = Admission(std::move(impl))};
}

Admission::Admission(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Admission::Admission(Admission&&) noexcept = default;
Admission& Admission::operator=(Admission&&) noexcept = default;
Admission::~Admission() = default;

const std::vector<Admission::Segment>& Admission::segments() const {
  return impl_->segments;
}
const std::vector<int32_t>& Admission::own_pages() const {
  return impl_->own_pages;
}
uint32_t Admission::page_tokens() const {
  return impl_->page_tokens;
}

std::vector<int32_t> Admission::PageTable(size_t segment) const {
  const Segment& placed = impl_->segments.at(segment);
  std::vector<int32_t> table(placed.placement.first_page, -1);
  table.insert(table.end(), placed.pages.begin(), placed.pages.end());
  return table;
}

AdmitOutcome Admission::Extend(uint32_t own_pages, PageShortage* lacks) {
  // A daemon that has not noticed yet that the session is gone would answer, and erase what it gave a moment later.
  if (!valid()) return AdmitOutcome::kUnavailable;
  auto request = impl_->Ask<v1::ExtendAdmissionRequest>();
  request.set_own_pages(own_pages);
  v1::AdmitReply reply;
  const absl::Status status =
      impl_->connection->rpc().ExtendAdmission(request, reply, impl_->reconnector->CallDeadline());
  if (!status.ok()) return ToOutcome(status);
  if (!reply.has_admission()) {
    if (lacks != nullptr) *lacks = ToShortage(reply.lacks());
    return AdmitOutcome::kNoPages;
  }
  impl_->Take(reply.admission());
  return AdmitOutcome::kAdmitted;
}

bool Admission::MarkFilled(std::span<const uint32_t> segments) {
  if (!valid()) return false;
  auto request = impl_->Ask<v1::MarkFilledRequest>();
  request.mutable_segments()->Add(segments.begin(), segments.end());
  v1::MarkFilledReply reply;
  if (!impl_->connection->rpc().MarkFilled(request, reply, impl_->reconnector->CallDeadline()).ok()) return false;
  for (const uint32_t segment : segments) impl_->segments.at(segment).content = PageContent::kFilled;
  return true;
}

bool Admission::Refresh() {
  if (!impl_->usable()) return false;
  v1::AdmitReply reply;
  const auto request = impl_->Ask<v1::AttachAdmissionRequest>();
  if (!impl_->connection->rpc().AttachAdmission(request, reply, impl_->reconnector->CallDeadline()).ok()) return false;
  impl_->Take(reply.admission());
  return true;
}

bool Admission::valid() const {
  return impl_->usable() && impl_->connection->channel().Alive();
}
std::string Admission::lease() const {
  return impl_->lease == nullptr ? std::string() : impl_->lease->lease();
}
void Admission::Release() {
  impl_->lease.reset();
  impl_->counted.reset();
}

}  // namespace ashlar
