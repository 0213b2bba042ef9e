// In-place sharing: Admit, ExtendAdmission, MarkFilled, AttachAdmission.
#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "ashlar/v1/cache.pb.h"
#include "daemon/engine/engine_service.h"
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

void Write(const PagePools::Request& held, v1::Admission* out) {
  for (const PagePool::Segment& segment : held.pool->Segments(held.admission)) {
    v1::SharedPages* shared = out->add_segments();
    shared->set_content(static_cast<uint32_t>(segment.content));
    AddPages(segment.pages, shared->mutable_pages());
  }
  AddPages(held.pool->OwnPages(held.admission), out->mutable_own_pages());
}

void Write(const PagePool::Shortage& shortage, v1::PageShortage* out) {
  out->set_needed(shortage.needed);
  out->set_free(shortage.free);
  out->set_reclaimable(shortage.reclaimable);
  out->set_held(shortage.held);
}

// Returns the shared pages that each segment wants. A segment that is too short for an interior shares nothing.
std::vector<PagePool::Want> WantsOf(const std::vector<storage::Query>& segments, const Pages& pages) {
  std::vector<PagePool::Want> wants;
  for (const storage::Query& segment : segments) {
    const PagePlacement placement =
        PlaceInPages(pages.model().layout, segment.kind, segment.tokens, pages.page_tokens());
    wants.push_back({segment.key, static_cast<uint32_t>(placement.shared_pages)});
  }
  return wants;
}

}  // namespace

void EngineService::EndRequestsWith(const std::shared_ptr<Session>& session) {
  Session::MetadataState& state = session->metadata();
  if (std::exchange(state.ends_requests, true)) return;
  state.when_drained.push_back([this, id = session->about().id] { pools_.ReleaseAll(id); });
}

void EngineService::Admit(const v1::AdmitRequest& request, v1::AdmitReply* reply, Done done) {
  const auto session = Resolve(request.session());
  if (!session.ok()) return done(session.status());
  auto pages = (*session)->FindPages(request.pages_id());
  if (pages == nullptr) return done(Invalid("pages_id: unknown handle ", request.pages_id()));
  if (pages->pool() == nullptr) return done(Invalid("pages_id: declared without allocate"));
  const auto lease = ReadLease("lease", request.lease());
  if (!lease.ok()) return done(lease.status());
  if (request.deadline_ns() < 0) return done(Invalid("deadline_ns: negative"));
  if (request.prompt().needed_in_ns() != 0) return done(Invalid("prompt.needed_in_ns: pages are admitted now"));
  if (!request.prompt().conversation().empty()) return done(Invalid("prompt.conversation: pages are of segments"));
  const auto segments = ReadSegments("prompt", request.prompt(), pages->model());
  if (!segments.ok()) return done(segments.status());
  std::vector<PagePool::Want> wants = WantsOf(*segments, *pages);
  OnLoop(*session, Room::kRequest, done,
         [this, session = *session, pages = std::move(pages), lease = *lease, wants = std::move(wants), &request, reply,
          done] {
           // The client has released the lease by then, and would never release it again.
           if (request.deadline_ns() != 0 && MonotonicClock().Now() >= request.deadline_ns()) {
             return done(absl::DeadlineExceededError("deadline_ns: passed"));
           }
           if (cache_.draining()) return done(absl::UnavailableError("the daemon drains"));
           EndRequestsWith(session);
           const storage::SessionId id = session->about().id;
           const auto answer =
               pools_.Admit(id, session->about().tenant, lease, pages->pool(), wants, request.own_pages());
           if (!answer.ok()) return done(answer.status());
           if (answer->admission == 0) {
             Write(answer->shortage, reply->mutable_lacks());
           } else {
             Write(*pools_.Find(id, lease), reply->mutable_admission());
           }
           done(absl::OkStatus());
         });
}

void EngineService::ExtendAdmission(const v1::ExtendAdmissionRequest& request, v1::AdmitReply* reply, Done done) {
  const auto session = Resolve(request.session());
  if (!session.ok()) return done(session.status());
  const auto lease = ReadLease("lease", request.lease());
  if (!lease.ok()) return done(lease.status());
  OnLoop(*session, Room::kRequest, done, [this, session = *session, lease = *lease, &request, reply, done] {
    const PagePools::Request* held = pools_.Find(session->about().id, lease);
    if (held == nullptr) return done(absl::NotFoundError("lease: not held"));
    PagePool::Shortage shortage;
    if (held->pool->Extend(held->admission, request.own_pages(), shortage)) {
      Write(*held, reply->mutable_admission());
    } else {
      Write(shortage, reply->mutable_lacks());
    }
    done(absl::OkStatus());
  });
}

void EngineService::MarkFilled(const v1::MarkFilledRequest& request, v1::MarkFilledReply*, Done done) {
  const auto session = Resolve(request.session());
  if (!session.ok()) return done(session.status());
  const auto lease = ReadLease("lease", request.lease());
  if (!lease.ok()) return done(lease.status());
  OnLoop(*session, Room::kRequest, done, [this, session = *session, lease = *lease, &request, done] {
    const PagePools::Request* held = pools_.Find(session->about().id, lease);
    if (held == nullptr) return done(absl::NotFoundError("lease: not held"));
    const std::vector<PagePool::Segment> segments = held->pool->Segments(held->admission);
    for (int i = 0; i < request.segments_size(); ++i) {  // all of them, before any
      const uint32_t index = request.segments(i);
      if (index >= segments.size()) return done(Invalid("segments[", i, "]: the request has ", segments.size()));
      if (segments[index].pages.empty()) return done(Invalid("segments[", i, "]: it shares no pages"));
      if (segments[index].content == PageContent::kBeingFilled) {
        return done(Invalid("segments[", i, "]: another request fills it"));
      }
    }
    for (const uint32_t index : request.segments()) held->pool->Filled(held->admission, index);
    done(absl::OkStatus());
  });
}

void EngineService::AttachAdmission(const v1::AttachAdmissionRequest& request, v1::AdmitReply* reply, Done done) {
  const auto session = Resolve(request.session());
  if (!session.ok()) return done(session.status());
  const auto lease = ReadLease("lease", request.lease());
  if (!lease.ok()) return done(lease.status());
  OnLoop(*session, Room::kRequest, done, [this, session = *session, lease = *lease, reply, done] {
    EndRequestsWith(session);
    const auto held = pools_.Attach(session->about().id, session->about().tenant, lease);
    if (!held.ok()) return done(held.status());
    Write(**held, reply->mutable_admission());
    done(absl::OkStatus());
  });
}

}  // namespace ashlar::daemon
