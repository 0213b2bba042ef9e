// SPDX-License-Identifier: Apache-2.0
#include "daemon/engine/admission_calls.h"

#include <algorithm>
#include <cassert>
#include <span>
#include <utility>
#include <vector>

#include "ashlar/v1/cache.pb.h"
#include "daemon/engine/request_fields.h"
#include "proto/invalid.h"
#include "proto/page_placement.h"

namespace ashlar::daemon {
namespace {

using storage::PagePool;
using storage::PagePools;

void AddPages(std::span<const storage::PageId> pages, google::protobuf::RepeatedField<int32_t>* out) {
  out->Add(pages.begin(), pages.end());
}

constexpr uint64_t kPagesOfAStep = 256;

// Takes the missing pages of `own_pages` (enough are free), and writes the page list. Returns false if the slice ended:
// call it again before any other request of the pool. `out` has the progress.
bool TakeAndWrite(const PagePools::Request& held, uint64_t own_pages, storage::Slice& slice, v1::Admission* out) {
  if (out->own_pages().empty()) {
    const std::vector<PagePool::Segment> segments = held.pool->Segments(held.admission);
    for (size_t i = static_cast<size_t>(out->segments_size()); i < segments.size(); ++i) {
      if (!slice.Take()) return false;
      v1::SharedPages* shared = out->add_segments();
      shared->set_content(static_cast<uint32_t>(segments[i].content));
      AddPages(segments[i].pages, shared->mutable_pages());
    }
  }
  out->mutable_own_pages()->Reserve(
      static_cast<int>(std::max<uint64_t>(own_pages, held.pool->OwnPages(held.admission).size())));
  while (true) {
    const std::span<const storage::PageId> own = held.pool->OwnPages(held.admission);
    const auto written = static_cast<uint64_t>(out->own_pages_size());
    if (written == own.size() && own.size() >= own_pages) return true;
    if (!slice.Take()) return false;
    if (written < own.size()) {
      AddPages(own.subspan(written, std::min(kPagesOfAStep, own.size() - written)), out->mutable_own_pages());
      continue;
    }
    PagePool::Shortage none;
    [[maybe_unused]] const bool taken = held.pool->Extend(held.admission, own_pages, none, kPagesOfAStep);
    assert(taken);
  }
}

void Write(const PagePool::Shortage& shortage, v1::PageShortage* out) {
  out->set_needed(shortage.needed);
  out->set_free(shortage.free);
  out->set_reclaimable(shortage.reclaimable);
  out->set_held(shortage.held);
}

// Returns the shared pages that each segment and each block of the prefix needs: none for segments that are unshared or
// too short for an interior. The key of a block contains all tokens before it, and the prompt's salt and media.
absl::StatusOr<std::vector<PagePool::Want>> WantsOf(const v1::AdmitRequest& request, const Pages& pages) {
  const Model& model = pages.model();
  std::vector<PagePool::Want> wants;
  const auto add_segments = [&](const std::vector<storage::Query>& segments) -> absl::Status {
    for (const storage::Query& segment : segments) {
      const PagePlacement placement = PlaceInPages(model.layout, segment.kind, segment.tokens, pages.page_tokens());
      wants.push_back({segment.key, static_cast<uint32_t>(placement.shared_pages)});
    }
    for (const uint32_t unshared : request.unshared_segments()) {
      if (unshared >= wants.size())
        return Invalid("unshared_segments: ", unshared, " is out of range; the prompt has ", wants.size(), " segments");
      wants[unshared] = {};
    }
    return absl::OkStatus();
  };
  const uint32_t blocks = request.prefix_blocks();
  if (blocks == 0) {
    const auto segments = ReadSegments("prompt", request.prompt(), model);
    if (!segments.ok()) return segments.status();
    if (absl::Status status = add_segments(*segments); !status.ok()) return status;
    return wants;
  }
  const auto prompt = ReadPrompt("prompt", request.prompt(), model);
  if (!prompt.ok()) return prompt.status();
  const size_t whole = prompt->text.has_value() && model.prefixes->paged ? prompt->text->shared().blocks().size() : 0;
  if (blocks > whole) return Invalid("prefix_blocks: ", blocks, " is out of range; the prompt has ", whole, " blocks");
  const uint32_t block_tokens = model.prefixes->block_tokens;
  if (block_tokens % pages.page_tokens() != 0) {
    return Invalid("prefix_blocks: a block has ", block_tokens, " tokens; expected a multiple of the ",
                   pages.page_tokens(), " tokens of a page");
  }
  if (absl::Status status = add_segments(prompt->segments); !status.ok()) return status;
  for (const Key& key : prompt->text->shared().blocks().first(blocks)) {
    wants.push_back({key, block_tokens / pages.page_tokens()});
  }
  return wants;
}

absl::Status SetFills(const PagePools::Request& held, const v1::SegmentsToFill& to_fill) {
  const std::span<const uint32_t> segments(to_fill.segments().data(), to_fill.segments_size());
  const size_t count = held.pool->Segments(held.admission).size();
  for (size_t i = 0; i < segments.size(); ++i) {
    if (segments[i] >= count)
      return Invalid("to_fill.segments[", i, "]: out of range; the request has ", count, " segments");
  }
  held.pool->SetFills(held.admission, segments);
  return absl::OkStatus();
}

}  // namespace

void AdmissionCalls::EndRequestsWith(const std::shared_ptr<Session>& session) {
  Session::MetadataState& state = session->metadata();
  if (std::exchange(state.ends_requests, true)) return;
  state.when_drained.push_back([this, id = session->about().id] { pools_.ReleaseAll(id); });
}

void AdmissionCalls::Admit(const v1::AdmitRequest& request, v1::AdmitReply* reply, Done done) {
  const auto session = sessions_.Resolve(request.session());
  if (!session.ok()) return done(session.status());
  auto pages = (*session)->FindPages(request.pages_id());
  if (pages == nullptr) return done(Invalid("pages_id: unknown handle ", request.pages_id()));
  if (pages->pool() == nullptr) return done(Invalid("pages_id: the pages were declared without allocate"));
  const auto lease = ReadLease("lease", request.lease());
  if (!lease.ok()) return done(lease.status());
  if (request.deadline_ns() < 0) return done(Invalid("deadline_ns: negative; expected 0 or more"));
  if (request.prompt().needed_in_ns() != 0)
    return done(Invalid("prompt.needed_in_ns: must be 0, because pages are admitted immediately"));
  if (!request.prompt().conversation().empty())
    return done(Invalid("prompt.conversation: must be empty; a conversation's own prefix is not shared"));
  auto wants = WantsOf(request, *pages);
  if (!wants.ok()) return done(wants.status());
  const auto admit = [this, session = *session, pages = std::move(pages), lease = *lease, wants = *std::move(wants),
                      &request, reply]() -> absl::Status {
    // After its deadline the client has already released the lease, so an admission granted now would leak.
    if (request.deadline_ns() != 0 && MonotonicClock().Now() >= request.deadline_ns()) {
      return absl::DeadlineExceededError("deadline_ns: the deadline has passed");
    }
    if (cache_.offers().draining()) return absl::UnavailableError("the daemon is draining");
    EndRequestsWith(session);
    const auto answer = pools_.Admit(session->about().id, session->about().tenant, lease, pages->pool(), wants,
                                     request.own_pages(), /*own_now=*/0, !request.fills_later());
    if (!answer.ok()) return answer.status();
    if (answer->admission == 0) Write(answer->shortage, reply->mutable_lacks());
    return absl::OkStatus();
  };
  sessions_.OnLoop(*session, CallClass::kRequest, done,
                   [this, session = *session, lease = *lease, admit, begun = false, &request, reply,
                    done](storage::Slice& slice) mutable {
                     if (!std::exchange(begun, true)) {
                       const absl::Status admitted = admit();
                       if (!admitted.ok() || reply->has_lacks()) return done(admitted), true;
                     }
                     const PagePools::Request& held = *pools_.Find(session->about().id, lease);
                     if (!TakeAndWrite(held, request.own_pages(), slice, reply->mutable_admission())) return false;
                     done(absl::OkStatus());
                     return true;
                   });
}

void AdmissionCalls::ExtendAdmission(const v1::ExtendAdmissionRequest& request, v1::AdmitReply* reply, Done done) {
  const auto session = sessions_.Resolve(request.session());
  if (!session.ok()) return done(session.status());
  const auto lease = ReadLease("lease", request.lease());
  if (!lease.ok()) return done(lease.status());
  sessions_.OnLoop(
      *session, CallClass::kRequest, done,
      [this, session = *session, lease = *lease, begun = false, &request, reply, done](storage::Slice& slice) mutable {
        const PagePools::Request* held = pools_.Find(session->about().id, lease);
        if (held == nullptr) return done(absl::NotFoundError("lease: unknown or released")), true;
        PagePool::Shortage shortage;
        const bool first = !std::exchange(begun, true);
        if (first && !held->pool->Extend(held->admission, request.own_pages(), shortage, /*most=*/0)) {
          Write(shortage, reply->mutable_lacks());
        } else if (!TakeAndWrite(*held, request.own_pages(), slice, reply->mutable_admission())) {
          return false;
        }
        done(absl::OkStatus());
        return true;
      });
}

void AdmissionCalls::MarkFilled(const v1::MarkFilledRequest& request, v1::MarkFilledReply*, Done done) {
  const auto session = sessions_.Resolve(request.session());
  if (!session.ok()) return done(session.status());
  const auto lease = ReadLease("lease", request.lease());
  if (!lease.ok()) return done(lease.status());
  sessions_.OnLoop(*session, CallClass::kRequest, done, [this, session = *session, lease = *lease, &request, done] {
    const PagePools::Request* held = pools_.Find(session->about().id, lease);
    if (held == nullptr) return done(absl::NotFoundError("lease: unknown or released"));
    const std::vector<PagePool::Segment> segments = held->pool->Segments(held->admission);
    for (int i = 0; i < request.segments_size(); ++i) {  // checks all of them first
      const uint32_t index = request.segments(i);
      if (index >= segments.size())
        return done(Invalid("segments[", i, "]: out of range; the request has ", segments.size(), " segments"));
      if (segments[index].pages.empty()) return done(Invalid("segments[", i, "]: has no shared pages"));
      if (segments[index].content == PageContent::kBeingFilled) {
        return done(Invalid("segments[", i, "]: is being filled by another request"));
      }
    }
    for (const uint32_t index : request.segments()) held->pool->Filled(held->admission, index);
    done(absl::OkStatus());
  });
}

void AdmissionCalls::AttachAdmission(const v1::AttachAdmissionRequest& request, v1::AdmitReply* reply, Done done) {
  const auto session = sessions_.Resolve(request.session());
  if (!session.ok()) return done(session.status());
  const auto lease = ReadLease("lease", request.lease());
  if (!lease.ok()) return done(lease.status());
  sessions_.OnLoop(
      *session, CallClass::kRequest, done,
      [this, session = *session, lease = *lease, begun = false, &request, reply, done](storage::Slice& slice) mutable {
        EndRequestsWith(session);
        const auto held = pools_.Attach(session->about().id, session->about().tenant, lease);
        if (!held.ok()) return done(held.status()), true;
        if (request.has_to_fill() && !std::exchange(begun, true)) {
          const absl::Status set = SetFills(**held, request.to_fill());
          if (!set.ok()) return done(set), true;
        }
        if (!TakeAndWrite(**held, 0, slice, reply->mutable_admission())) return false;
        done(absl::OkStatus());
        return true;
      });
}

}  // namespace ashlar::daemon
