// SPDX-License-Identifier: Apache-2.0
// Landing: Land, LookupAndLand, CancelLanding, Quiesce.
#include <algorithm>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.pb.h"
#include "daemon/engine/engine_service.h"
#include "daemon/engine/match_reply.h"
#include "daemon/engine/prompt_lookup.h"
#include "daemon/engine/repeated_pages.h"
#include "daemon/engine/request_fields.h"
#include "proto/invalid.h"
#include "proto/limits.h"
#include "proto/page_placement.h"

namespace ashlar::daemon {

struct EngineService::LandOrder {
  storage::LandingId id = 0;
  storage::LeaseId lease{};
  std::shared_ptr<const Pages> pages;
  storage::LandTarget target;
  std::vector<size_t> tables;           // position of each group's table in target.page_table (Pages::Divide)
  std::vector<RepeatedPages> repeated;  // one per table; a single one if all groups share pages

  // Reads the fields that both calls have.
  template <typename Request>
  absl::Status Read(const Request& request, const Session& session, bool needs_pages);
  absl::Status ReadSegments(const v1::LandRequest& request);
  // Claims the pages of positions [first, end) of all groups for writing.
  absl::Status Claim(const std::string& field, uint64_t first, uint64_t end);
  // Adds every hit at its position in the prompt.
  void TakeAll(const ParsedPrompt& asked, const v1::PromptMatch& match);
  // Checks that the landing writes only declared pages of the match's own model, and no slot twice. `allocated`: the
  // pages among them that the daemon allocates.
  absl::Status CheckTargets(const storage::Match& match, std::vector<storage::PageId>& allocated);
};

template <typename Request>
absl::Status EngineService::LandOrder::Read(const Request& request, const Session& session, bool needs_pages) {
  id = request.landing();
  const auto read = ReadLease("lease", request.lease());
  if (!read.ok()) return read.status();
  lease = *read;
  pages = session.FindPages(request.pages_id());
  if (pages == nullptr && needs_pages) return Invalid("pages_id: unknown handle ", request.pages_id());
  if (pages != nullptr) {
    if (absl::Status whole = pages->region()->CheckWhole("pages_id"); !whole.ok()) return whole;
  }
  if (static_cast<uint64_t>(request.page_table_size()) > limits::kMaxPromptTokens) {
    return Invalid("page_table: too many; expected at most ", limits::kMaxPromptTokens);
  }
  target.page_table.assign(request.page_table().begin(), request.page_table().end());
  target.keep = pages;
  if (pages == nullptr) return absl::OkStatus();
  const std::span<const uint32_t> group_pages(request.group_pages().data(), request.group_pages_size());
  auto divided = pages->Divide(target.page_table.size(), group_pages);
  if (!divided.ok()) return divided.status();
  tables = *std::move(divided);
  target.rows = pages->RowsIn(target.page_table, tables);  // stays valid when the target moves
  const std::span<const int32_t> table(target.page_table);
  if (pages->common_pages()) {
    repeated.emplace_back(table);
  } else {
    for (size_t g = 0; g + 1 < tables.size(); ++g) {
      repeated.emplace_back(table.subspan(tables[g], tables[g + 1] - tables[g]));
    }
  }
  return absl::OkStatus();
}

absl::Status EngineService::LandOrder::Claim(const std::string& field, uint64_t first, uint64_t end) {
  for (size_t g = 0; g + 1 < tables.size(); ++g) {
    const uint64_t page_tokens = pages->groups()[g].page_tokens;
    const uint64_t first_page = first / page_tokens, end_page = (end + page_tokens - 1) / page_tokens;
    const size_t begin = tables[g], within = pages->common_pages() ? begin : 0;
    RepeatedPages& among = repeated[pages->common_pages() ? 0 : g];
    if (const auto twice = among.Claim(within + first_page, within + end_page)) {
      return Invalid(field, ": page_table[", begin - within + twice->entry, "]: names the same page as page_table[",
                     begin - within + twice->earlier, "]");
    }
  }
  return absl::OkStatus();
}

absl::Status EngineService::LandOrder::ReadSegments(const v1::LandRequest& request) {
  const auto objects = static_cast<uint64_t>(request.segments_size()) + request.tuples_only_size();
  if (objects > limits::kMaxObjectsPerLanding) {
    return Invalid("segments and tuples_only: too many; expected at most ", limits::kMaxObjectsPerLanding);
  }
  std::set<uint32_t> given;
  for (int i = 0; i < request.segments_size(); ++i) {
    const v1::LandSegment& segment = request.segments(i);
    if (!given.insert(segment.segment()).second) return Invalid("segments[", i, "].segment: given twice");
    if (segment.first_position() > kMaxPosition)
      return Invalid("segments[", i, "].first_position: out of range; expected at most ", kMaxPosition);
    const auto first = static_cast<int64_t>(segment.first_position());
    const auto most = static_cast<int64_t>(kMaxPosition);
    if (segment.rotary_shift() < -first || segment.rotary_shift() > most - first) {
      return Invalid("segments[", i, "].rotary_shift: out of range; first_position + rotary_shift must be 0 to ",
                     kMaxPosition);
    }
    target.segments.push_back({.index = segment.segment(),
                               .first_position = segment.first_position(),
                               .rotary_shift = segment.rotary_shift()});
  }
  for (int i = 0; i < request.tuples_only_size(); ++i) {
    const uint32_t segment = request.tuples_only(i);
    if (!given.insert(segment).second) return Invalid("tuples_only[", i, "]: given twice");
    target.segments.push_back({.index = segment, .tokens = 0});
  }
  return absl::OkStatus();
}

void EngineService::LandOrder::TakeAll(const ParsedPrompt& asked, const v1::PromptMatch& match) {
  const auto segments = static_cast<uint32_t>(match.segments_size());
  uint64_t position = 0;
  for (uint32_t i = 0; i < segments; position += asked.segments[i++].tokens) {
    if (match.segments(static_cast<int>(i)).miss_reason() == 0) target.segments.push_back({i, position});
  }
  const v1::PrefixMatch& prefix = match.prefix();
  for (const v1::SegmentMatch& block : prefix.blocks()) target.segments.push_back({block.object(), 0});
  if (prefix.has_checkpoint()) target.segments.push_back({prefix.checkpoint().object(), 0});
  if (prefix.has_span()) target.segments.push_back({prefix.span().object(), 0});
}

namespace {

// Checks that the landing may write pages that the daemon allocates. A running request's own pages may hold anything.
// Shared pages hold their segment at the position that every request expects, and may be written only until they are
// filled. Appends the pages.
absl::Status CheckAllocated(const std::string& field, const Pages& pages, std::span<const int32_t> page_table,
                            const storage::LandTarget::Segment& segment, const ObjectHeader& header, uint64_t tokens,
                            bool of_prefix, std::vector<storage::PageId>& written) {
  const uint64_t page_tokens = pages.page_tokens(), first = segment.first_position + header.first_token;
  const PagePlacement placement = PlaceInPages(pages.model().layout, header.kind, header.tokens, pages.page_tokens());
  const bool in_place = (segment.first_position == placement.first_slot && segment.rotary_shift == 0) ||
                        (pages.position_free() && segment.first_position % page_tokens == placement.first_slot);
  for (uint64_t i = first / page_tokens; i <= (first + tokens - 1) / page_tokens; ++i) {
    const storage::PageId page = page_table[i];
    const storage::PagePool::Writable writable = pages.pool()->MayWrite(page);
    if (writable == storage::PagePool::Writable::kNo) {
      return Invalid(field, ": page_table[", i, "]: page ", page,
                     " cannot be written; expected a page of the request, or a shared page that it fills");
    }
    const bool to_fill = writable == storage::PagePool::Writable::kToFill;
    // Of the shared pages, a block may be written only to those that were allocated for its key.
    if (to_fill && of_prefix && !pages.pool()->Holds(header.key, i - first / page_tokens, page)) {
      return Invalid(field, ": page_table[", i, "]: page ", page,
                     " is shared; a prefix must land on the request's own pages, or on the shared pages of its blocks");
    }
    if (to_fill && !of_prefix && !in_place) {
      return Invalid(field, ".first_position: keys in shared pages must not depend on the prompt; expected slot ",
                     placement.first_slot, " without rotation, got position ", segment.first_position, " rotated to ",
                     static_cast<int64_t>(segment.first_position) + segment.rotary_shift);
    }
    written.push_back(page);
  }
  return absl::OkStatus();
}

// Returns `keep` together with pins on the written pages. If the request ends before its landing, its pages are not
// reused until all writes have ended. The result may be dropped on any thread. Called on the metadata thread.
std::shared_ptr<const void> PinUntilQuiesced(EventLoop& loop, storage::TenantId tenant,
                                             std::shared_ptr<const void> keep, std::shared_ptr<storage::PagePool> pool,
                                             std::vector<storage::PageId> pages) {
  pool->Pin(pages);
  const void* const address = keep.get();
  return {address, [&loop, tenant, keep = std::move(keep), pool = std::move(pool),
                    pages = std::move(pages)](const void*) mutable {
            loop.PostCompletion(tenant, [keep = std::move(keep), pool = std::move(pool), pages = std::move(pages)] {
              pool->Unpin(pages);
            });
          }};
}

// The verdict of a landing that does not reach the cache; counted here.
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

absl::Status EngineService::LandOrder::CheckTargets(const storage::Match& match,
                                                    std::vector<storage::PageId>& allocated) {
  std::vector<std::pair<uint64_t, uint64_t>> written;  // positions [first, last)
  for (size_t i = 0; i < target.segments.size(); ++i) {
    const storage::LandTarget::Segment& segment = target.segments[i];
    const std::string field = absl::StrCat("segments[", i, "]");
    if (segment.index >= match.found.size())
      return Invalid(field, ".segment: out of range; the match has ", match.found.size(), " segments");
    const storage::Found& found = match.found[segment.index];
    if (found.reason != MissReason::kNone) continue;  // nothing to write; the verdict is that reason
    const ObjectHeader& header = *found.header;
    if (pages != nullptr && !pages->model().Has(header))
      return Invalid("pages_id: the pages belong to a different model than the lease");
    if (header.kind != ObjectKind::kSegment && segment.first_position != 0) {
      return Invalid(field, ".first_position: must be 0 for a prefix");
    }
    if (header.kind != ObjectKind::kSegment && segment.rotary_shift != 0) {
      return Invalid(field, ".rotary_shift: must be 0 for a prefix");
    }
    if (header.stored_tokens == 0 || segment.tokens == 0) continue;  // writes nothing
    const uint64_t first = segment.first_position + header.first_token;
    const uint64_t tokens = std::min(header.stored_tokens, match.prefix.RowsOf(segment.index));
    const absl::Status inside = pages->CheckPositions(target.page_table, tables, first, tokens);
    if (!inside.ok()) return Invalid(field, ": ", inside.message());
    if (absl::Status once = Claim(field, first, first + tokens); !once.ok()) return once;
    if (pages->pool() != nullptr) {
      const bool of_prefix = match.prefix.objects.Has(segment.index);
      absl::Status may =
          CheckAllocated(field, *pages, target.page_table, segment, header, tokens, of_prefix, allocated);
      if (!may.ok()) return may;
    }
    written.emplace_back(first, first + tokens);
  }
  std::sort(written.begin(), written.end());
  for (size_t i = 1; i < written.size(); ++i) {
    if (written[i].first < written[i - 1].second) {
      return Invalid("segments: two segments overlap at position ", written[i].first);
    }
  }
  return absl::OkStatus();
}

void EngineService::Land(const v1::LandRequest& request, LandingReplies& replies) {
  const Done refused = [&replies](absl::Status status) { replies.Ended(std::move(status)); };
  const auto session = sessions_.Resolve(request.session());
  if (!session.ok()) return refused(session.status());
  auto landing = std::make_shared<LandOrder>();
  const bool needs_pages = request.pages_id() != 0 || !request.segments().empty();
  if (absl::Status read = landing->Read(request, **session, needs_pages); !read.ok()) return refused(read);
  if (absl::Status read = landing->ReadSegments(request); !read.ok()) return refused(read);
  sessions_.OnLoop(*session, CallClass::kRequest, refused, [this, session = *session, landing, &replies] {
    const absl::StatusOr<storage::Match> match = cache_.Held(session->about().id, landing->lease);
    const auto miss_all = [&](MissReason reason) {
      replies.Ended(MissAll(observer_, session->about().tenant, landing->target.segments, match, reason));
    };
    if (!session->metadata().landings.MayStart(landing->id)) return miss_all(MissReason::kCancelled);
    if (!match.ok()) return miss_all(MissReason::kLeaseLost);
    Begin(*session, *landing, *match, replies);
  });
}

bool EngineService::Begin(const Session& session, LandOrder& landing, const storage::Match& match,
                          LandingReplies& replies) {
  std::vector<storage::PageId> allocated;
  if (absl::Status fits = landing.CheckTargets(match, allocated); !fits.ok()) {
    replies.Ended(fits);
    return false;
  }
  if (!allocated.empty()) {
    landing.target.keep = PinUntilQuiesced(loop_, session.about().tenant, std::move(landing.target.keep),
                                           landing.pages->pool(), allocated);
  }
  // Data that landed into a region that was lost meanwhile is a miss.
  auto done = [pages = landing.pages, &replies](absl::StatusOr<std::vector<MissReason>> verdict) {
    if (verdict.ok() && pages != nullptr && pages->region()->lost()) {
      std::ranges::replace(*verdict, MissReason::kNone, MissReason::kInvalidRequest);
    }
    replies.Ended(std::move(verdict));
  };
  cache_.Land(session.about().id, landing.id, landing.lease, std::move(landing.target),
              {[&replies](uint32_t layers) { replies.Landed(layers); }, std::move(done)});
  return true;
}

void EngineService::LookupAndLand(const v1::LookupAndLandRequest& request, LandingReplies& replies) {
  const Done refused = [&replies](absl::Status status) { replies.Ended(std::move(status)); };
  const auto session = sessions_.Resolve(request.session());
  if (!session.ok()) return refused(session.status());
  const auto model = (*session)->FindModel(request.model());
  if (model == nullptr) return refused(Invalid("model: unknown handle ", request.model()));
  auto landing = std::make_shared<LandOrder>();
  if (absl::Status read = landing->Read(request, **session, /*needs_pages=*/true); !read.ok()) return refused(read);
  if (landing->lease == storage::LeaseId{}) return refused(Invalid("lease: all zero; expected a lease from Match"));
  if (request.prompt().needed_in_ns() != 0)
    return refused(Invalid("prompt.needed_in_ns: must be 0, because a landing starts immediately"));
  if (const uint64_t lookups = CountLookups(request.prompt(), *model); lookups > limits::kMaxLookupsPerMatch) {
    return refused(Invalid("prompt: ", lookups, " shards of segments; expected at most ", limits::kMaxLookupsPerMatch));
  }
  auto asked = ReadPrompt("prompt", request.prompt(), *model);
  if (!asked.ok()) return refused(asked.status());
  struct Call {
    ParsedPrompt asked;
    v1::PromptMatch answer;
    MatchReplyWriter writer;
    std::optional<PromptLookup> lookup;
    RemoteLookup::Adopted adopted;
  };
  const auto call =
      std::make_shared<Call>(Call{.asked = *std::move(asked), .answer = {}, .writer = MatchReplyWriter()});
  const auto look_up = [this, session = *session, model, call, landing, &replies](storage::Slice& slice) {
    prefills_.EndRoutesWith(session);
    if (!session->metadata().landings.MayStart(landing->id)) {
      replies.Ended(absl::CancelledError("landing: cancelled by Quiesce"));
      return true;
    }
    if (!call->lookup) {
      call->lookup.emplace(*this, *session, call->asked, call->writer, &call->answer, landing->lease);
    }
    if (!call->lookup->Run(slice)) return false;
    NoteBacklog(*session, *model, call->asked.tokens, *call->lookup);
    const storage::Match& match = call->lookup->match();
    landing->TakeAll(call->asked, call->answer);
    const auto& found = landing->target.segments;
    if (found.empty()) {
      replies.Ended(std::vector<MissReason>());
    } else if (!Begin(*session, *landing, match, replies)) {
      cache_.Release(session->about().id, landing->lease);
      return true;
    }
    replies.Matched(std::move(call->answer));
    return true;
  };
  FindElsewhere((*session)->about().tenant, {&call->asked},
                [this, session = *session, call, refused, look_up](RemoteLookup::Adopted adopted) {
                  if (adopted != nullptr) adopted->Mark(call->asked.segments);
                  call->adopted = std::move(adopted);
                  sessions_.OnLoop(session, CallClass::kRequest, refused, look_up);
                });
}

void EngineService::CancelLanding(const std::string& secret, storage::LandingId landing) {
  const auto session = sessions_.Resolve(secret);
  if (!session.ok()) return;  // the session's end cancels all landings
  loop_.PostCompletion((*session)->about().tenant, [this, session = *session, landing] {
    if (session->metadata().open) cache_.Quiesce(session->about().id, landing, [] {});
  });
}

void EngineService::Quiesce(const v1::QuiesceRequest& request, v1::QuiesceReply*, Done done) {
  if (request.daemon_epoch() != table_.daemon_epoch()) {
    return done(
        absl::FailedPreconditionError("daemon_epoch: the daemon has restarted since; its earlier landings have ended"));
  }
  const auto quiesced = [done] { done(absl::OkStatus()); };
  const std::optional<SessionTable::Owner> owner = table_.OwnerOf(request.session());
  if (!owner.has_value()) return quiesced();  // it has drained, or never existed
  const bool posted =
      loop_.PostRelease(owner->tenant, [this, secret = request.session(), landing = request.landing(), quiesced] {
        const std::shared_ptr<Session> session = table_.Find(secret);
        if (session == nullptr || !session->metadata().open) return table_.WhenDrained(secret, quiesced);
        session->metadata().landings.Silence(landing);
        cache_.Quiesce(session->about().id, landing, quiesced);
      });
  if (!posted) done(absl::ResourceExhaustedError("the daemon's metadata queue is full; try again"));
}

}  // namespace ashlar::daemon
