// Landing: Land, CancelLanding, Quiesce.
#include <algorithm>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.pb.h"
#include "daemon/engine_service.h"
#include "daemon/repeated_pages.h"
#include "daemon/request_fields.h"
#include "proto/limits.h"
#include "proto/page_placement.h"

namespace ashlar::daemon {
namespace {

template <typename... Parts>
absl::Status Bad(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

struct Landing {
  storage::LandingId id = 0;
  storage::LeaseId lease{};
  std::shared_ptr<const Pages> pages;
  storage::LandTarget target;
  RepeatedPages repeated;  // in target.page_table
};

absl::StatusOr<Landing> ReadLanding(const v1::LandRequest& request, const Session& session) {
  Landing landing;
  landing.id = request.landing();
  const auto lease = ReadLease("lease", request.lease());
  if (!lease.ok()) return lease.status();
  landing.lease = *lease;
  landing.pages = session.FindPages(request.pages_id());
  if (landing.pages == nullptr) return Bad("pages_id: unknown handle ", request.pages_id());
  if (static_cast<uint64_t>(request.segments_size()) > limits::kMaxObjectsPerLanding) {
    return Bad("segments: more than ", limits::kMaxObjectsPerLanding);
  }
  std::set<uint32_t> given;
  for (int i = 0; i < request.segments_size(); ++i) {
    const v1::LandSegment& segment = request.segments(i);
    if (!given.insert(segment.segment()).second) return Bad("segments[", i, "].segment: given twice");
    if (segment.first_position() > kMaxPosition) return Bad("segments[", i, "].first_position: out of range");
    landing.target.segments.push_back({segment.segment(), segment.first_position()});
  }
  landing.target.rows = landing.pages->rows();
  if (static_cast<uint64_t>(request.page_table_size()) > limits::kMaxPromptTokens) {
    return Bad("page_table: more than ", limits::kMaxPromptTokens);
  }
  landing.target.page_table.assign(request.page_table().begin(), request.page_table().end());
  landing.repeated = RepeatedPages(landing.target.page_table);
  landing.target.keep = landing.pages;
  return landing;
}

// Whether pages that the daemon allocates may be written so: a running request's own may hold anything; those that all
// requests share hold their segment as every request would find it there, and only until they are filled. Appends them.
absl::Status CheckAllocated(const std::string& field, const Landing& landing,
                            const storage::LandTarget::Segment& segment, const ObjectHeader& header, bool of_prefix,
                            std::vector<storage::PageId>& written) {
  const Pages& pages = *landing.pages;
  const uint64_t page_tokens = pages.page_tokens(), first = segment.first_position + header.first_token;
  const PagePlacement placement = PlaceInPages(pages.model().layout, header.kind, header.tokens, pages.page_tokens());
  const bool in_place = segment.first_position == placement.first_slot ||
                        (pages.position_free() && segment.first_position % page_tokens == placement.first_slot);
  for (uint64_t i = first / page_tokens; i <= (first + header.stored_tokens - 1) / page_tokens; ++i) {
    const storage::PageId page = landing.target.page_table[i];
    const storage::PagePool::Writable writable = pages.pool()->MayWrite(page);
    if (writable == storage::PagePool::Writable::kNo) {
      return Bad(field, ": page_table[", i, "]: page ", page, " is neither a request's own nor to be filled");
    }
    if (writable == storage::PagePool::Writable::kToFill && of_prefix) {
      return Bad(field, ": page_table[", i, "]: page ", page, " is shared, and a prefix lands on own pages alone");
    }
    if (writable == storage::PagePool::Writable::kToFill && !in_place) {
      return Bad(field, ".first_position: shared pages hold keys from their segment's own start, which stands at slot ",
                 placement.first_slot, "; keys landed at ", segment.first_position, " depend on the position");
    }
    written.push_back(page);
  }
  return absl::OkStatus();
}

// Whether all that the landing would write lies on declared pages of the lease's own model, each position and each
// page's slot once. `allocated`: what it would write of the pages that the daemon allocates.
absl::Status CheckTargets(Landing& landing, const storage::Match& match, std::vector<storage::PageId>& allocated) {
  std::vector<std::pair<uint64_t, uint64_t>> written;  // positions [first, last)
  for (size_t i = 0; i < landing.target.segments.size(); ++i) {
    const storage::LandTarget::Segment& segment = landing.target.segments[i];
    const std::string field = absl::StrCat("segments[", i, "]");
    if (segment.index >= match.found.size()) return Bad(field, ".segment: the match has ", match.found.size());
    const storage::Found& found = match.found[segment.index];
    if (found.reason != MissReason::kNone) continue;  // nothing to write; its verdict is that reason
    const ObjectHeader& header = *found.header;
    if (!landing.pages->model().Has(header)) return Bad("pages_id: pages of another model than the lease's");
    if (header.kind != ObjectKind::kSegment && segment.first_position != 0) {
      return Bad(field, ".first_position: a prefix stands at 0");
    }
    if (header.stored_tokens == 0) continue;
    const uint64_t first = segment.first_position + header.first_token;
    const absl::Status inside = landing.pages->CheckPositions(landing.target.page_table, first, header.stored_tokens);
    if (!inside.ok()) return Bad(field, ": ", inside.message());
    const uint64_t end = first + header.stored_tokens, page_tokens = landing.pages->page_tokens();
    if (const auto twice = landing.repeated.Claim(first / page_tokens, (end + page_tokens - 1) / page_tokens)) {
      return Bad(field, ": page_table[", twice->entry, "]: the page of page_table[", twice->earlier, "] again");
    }
    if (landing.pages->pool() != nullptr) {
      const bool of_prefix = segment.index - match.prefix.first < match.prefix.count;
      if (absl::Status may = CheckAllocated(field, landing, segment, header, of_prefix, allocated); !may.ok())
        return may;
    }
    written.emplace_back(first, end);
  }
  std::sort(written.begin(), written.end());
  for (size_t i = 1; i < written.size(); ++i) {
    if (written[i].first < written[i - 1].second) {
      return Bad("segments: two of them would write position ", written[i].first);
    }
  }
  return absl::OkStatus();
}

// `keep` and, for as long as it is kept, pins on what is written: should the request end before its landing, nobody
// else gets its pages until nothing writes there any more. Let go on any thread. The metadata thread calls.
std::shared_ptr<const void> PinUntilQuiet(EventLoop& loop, std::shared_ptr<const void> keep,
                                          std::shared_ptr<storage::PagePool> pool, std::vector<storage::PageId> pages) {
  pool->Pin(pages);
  const void* const address = keep.get();
  return {address,
          [&loop, keep = std::move(keep), pool = std::move(pool), pages = std::move(pages)](const void*) mutable {
            loop.PostCompletion(
                [keep = std::move(keep), pool = std::move(pool), pages = std::move(pages)] { pool->Unpin(pages); });
          }};
}

// The verdict of a landing that the cache never sees, and must therefore be counted here.
std::vector<MissReason> MissAll(storage::Observer& observer, storage::TenantId tenant,
                                std::span<const storage::LandTarget::Segment> segments,
                                const absl::StatusOr<storage::Match>& match, MissReason reason) {
  for (const storage::LandTarget::Segment& segment : segments) {
    const bool known = match.ok() && segment.index < match->found.size();
    const ObjectHeader* header = known ? match->found[segment.index].header : nullptr;
    if (header == nullptr) {
      observer.Miss(tenant, ObjectKind::kSegment, reason, 0);
    } else {
      observer.Miss(tenant, header->kind, reason, header->tokens);
    }
  }
  return std::vector<MissReason>(segments.size(), reason);
}

}  // namespace

void EngineService::Land(const v1::LandRequest& request, LandEvents events) {
  const Done refused = [done = events.done](absl::Status status) { done(std::move(status)); };
  const auto session = Resolve(request.session());
  if (!session.ok()) return refused(session.status());
  auto read = ReadLanding(request, **session);
  if (!read.ok()) return refused(read.status());
  auto landing = std::make_shared<Landing>(*std::move(read));
  OnLoop(*session, Room::kRequest, refused, [this, session = *session, landing, events = std::move(events)] {
    const storage::SessionId id = session->about().id;
    const absl::StatusOr<storage::Match> match = cache_.Held(id, landing->lease);
    const auto miss_all = [&](MissReason reason) {
      events.done(MissAll(observer_, session->about().tenant, landing->target.segments, match, reason));
    };
    if (!session->metadata().landings.MayStart(landing->id)) return miss_all(MissReason::kCancelled);
    if (cache_.stats().landings >= max_landings_) return miss_all(MissReason::kBusy);
    if (!match.ok()) return miss_all(MissReason::kLeaseLost);
    std::vector<storage::PageId> allocated;
    if (absl::Status fits = CheckTargets(*landing, *match, allocated); !fits.ok()) return events.done(fits);
    if (!allocated.empty()) {
      landing->target.keep = PinUntilQuiet(loop_, std::move(landing->target.keep), landing->pages->pool(), allocated);
    }
    cache_.Land(id, landing->id, landing->lease, std::move(landing->target), {events.progress, events.done});
  });
}

void EngineService::CancelLanding(const v1::LandRequest& request) {
  const auto session = Resolve(request.session());
  if (!session.ok()) return;  // its end cancels all
  loop_.PostCompletion([this, session = *session, landing = request.landing()] {
    if (session->metadata().open) cache_.Quiesce(session->about().id, landing, [] {});
  });
}

void EngineService::Quiesce(const v1::QuiesceRequest& request, v1::QuiesceReply*, Done done) {
  if (request.run() != table_.run()) {
    return done(
        absl::FailedPreconditionError("run: this is another run of the daemon, which cannot answer for that one"));
  }
  const auto quiet = [done] { done(absl::OkStatus()); };
  const bool posted = loop_.PostRelease([this, secret = request.session(), landing = request.landing(), quiet] {
    const std::shared_ptr<Session> session = table_.Find(secret);
    if (session == nullptr || !session->metadata().open) return table_.WhenDrained(secret, quiet);
    session->metadata().landings.Silence(landing);
    cache_.Quiesce(session->about().id, landing, quiet);
  });
  if (!posted) done(absl::ResourceExhaustedError("the metadata queue is full"));
}

}  // namespace ashlar::daemon
