// SPDX-License-Identifier: Apache-2.0
// The calls of ashlar.v1.Cache (ashlar/v1/cache.proto), one row per call: names, shapes, metrics and the bodies of the
// client's calls come from this table. A new call also needs its declaration in client/session/rpc.h, and its handlers
// (engine_service.h and cache_service.cc in daemon/).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

// UNARY(name, request, reply, callers); STREAM for calls with several replies. Messages are in ashlar::v1. `callers` is
// Sessions, or All if ended sessions may call too.
#define ASHLAR_CACHE_CALLS(UNARY, STREAM)                               \
  UNARY(OpenModel, OpenModelRequest, OpenModelReply, Sessions)          \
  UNARY(CloseModel, CloseModelRequest, CloseModelReply, Sessions)       \
  UNARY(DeclarePages, DeclarePagesRequest, DeclarePagesReply, Sessions) \
  UNARY(Match, MatchRequest, MatchReply, Sessions)                      \
  UNARY(Reserve, ReserveRequest, ReserveReply, Sessions)                \
  UNARY(Publish, PublishRequest, PublishReply, Sessions)                \
  UNARY(Abandon, AbandonRequest, AbandonReply, Sessions)                \
  UNARY(Commit, CommitRequest, CommitReply, Sessions)                   \
  STREAM(Land, LandRequest, LandEvent, Sessions)                        \
  STREAM(LookupAndLand, LookupAndLandRequest, LandEvent, Sessions)      \
  UNARY(Advance, AdvanceRequest, CompositionReply, Sessions)            \
  UNARY(Quiesce, QuiesceRequest, QuiesceReply, All)                     \
  UNARY(Release, ReleaseRequest, ReleaseReply, Sessions)                \
  UNARY(AttachLease, AttachLeaseRequest, AttachLeaseReply, Sessions)    \
  UNARY(Admit, AdmitRequest, AdmitReply, Sessions)                      \
  UNARY(ExtendAdmission, ExtendAdmissionRequest, AdmitReply, Sessions)  \
  UNARY(MarkFilled, MarkFilledRequest, MarkFilledReply, Sessions)       \
  UNARY(AttachAdmission, AttachAdmissionRequest, AdmitReply, Sessions)  \
  UNARY(PlanPrefill, PlanPrefillRequest, PlanPrefillReply, Sessions)    \
  UNARY(AwaitPrefill, AwaitPrefillRequest, AwaitPrefillReply, Sessions) \
  UNARY(EndPrefill, EndPrefillRequest, EndPrefillReply, Sessions)       \
  UNARY(ServePrefill, ServePrefillRequest, ServePrefillReply, Sessions) \
  UNARY(HandOff, HandOffRequest, HandOffReply, Sessions)                \
  UNARY(Probe, ProbeRequest, ProbeReply, Sessions)

namespace ashlar::v1 {
#define ASHLAR_DECLARE(name, request, reply, callers) \
  class request;                                      \
  class reply;
ASHLAR_CACHE_CALLS(ASHLAR_DECLARE, ASHLAR_DECLARE)
#undef ASHLAR_DECLARE
}  // namespace ashlar::v1

namespace ashlar {

enum class CallShape : uint8_t { kUnary, kStream };
enum class Callers : uint8_t { kSessions, kAll };

enum class CacheCall : uint8_t {
#define ASHLAR_NAME(name, ...) k##name,
  ASHLAR_CACHE_CALLS(ASHLAR_NAME, ASHLAR_NAME)
#undef ASHLAR_NAME
};

struct CacheCallRow {
  absl::string_view name, request, reply;
  CallShape shape;
  Callers callers;
};

inline constexpr auto kCacheCalls = std::to_array<CacheCallRow>({
#define ASHLAR_UNARY(name, request, reply, callers) {#name, #request, #reply, CallShape::kUnary, Callers::k##callers},
#define ASHLAR_STREAM(name, request, reply, callers) {#name, #request, #reply, CallShape::kStream, Callers::k##callers},
    ASHLAR_CACHE_CALLS(ASHLAR_UNARY, ASHLAR_STREAM)
#undef ASHLAR_UNARY
#undef ASHLAR_STREAM
});

constexpr const CacheCallRow& RowOf(CacheCall call) {
  return kCacheCalls[static_cast<size_t>(call)];
}

}  // namespace ashlar
