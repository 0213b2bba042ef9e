// SPDX-License-Identifier: Apache-2.0
// The calls of ashlar.v1.Admin (ashlar/v1/admin.proto), one row per call: ashlarctl's client is made from this table. A
// new call also needs its handlers (admin_service.h and admin_server.cc in daemon/admin/).
#pragma once

// ROW(name, request, reply). Messages are in ashlar::v1. All calls are unary.
#define ASHLAR_ADMIN_CALLS(ROW)                       \
  ROW(Explain, Texts, ExplainReply)                   \
  ROW(LastMisses, LastMissesRequest, LastMissesReply) \
  ROW(Models, ModelsRequest, ModelsReply)             \
  ROW(Stats, StatsRequest, StatsReply)                \
  ROW(Sessions, SessionsRequest, SessionsReply)       \
  ROW(Peers, PeersRequest, PeersReply)                \
  ROW(GetConfig, GetConfigRequest, GetConfigReply)    \
  ROW(Pin, PinRequest, ObjectsReply)                  \
  ROW(Unpin, Texts, ObjectsReply)                     \
  ROW(Evict, Texts, ObjectsReply)                     \
  ROW(Drain, DrainRequest, DrainReply)                \
  ROW(Undrain, UndrainRequest, DrainReply)            \
  ROW(GetDrain, GetDrainRequest, DrainReply)          \
  ROW(Warm, Texts, WarmReply)                         \
  ROW(List, ListRequest, ListReply)                   \
  ROW(Erase, EraseRequest, EraseReply)                \
  ROW(Verify, VerifyRequest, VerifyReply)             \
  ROW(GetVerify, GetVerifyRequest, VerifyReply)       \
  ROW(Reload, ReloadRequest, ReloadReply)             \
  ROW(Probe, AdminProbeRequest, ProbeReply)

namespace ashlar::v1 {
#define ASHLAR_DECLARE(name, request, reply) \
  class request;                             \
  class reply;
ASHLAR_ADMIN_CALLS(ASHLAR_DECLARE)
#undef ASHLAR_DECLARE
}  // namespace ashlar::v1
