// SPDX-License-Identifier: Apache-2.0
// AdmissionCalls: the calls of ashlar.v1.Cache for segments and prefixes shared in place, and the page pools behind
// them.
#pragma once

#include <memory>

#include "daemon/engine/session_calls.h"
#include "daemon/session/session.h"
#include "proto/cache_calls.h"
#include "storage/cache.h"
#include "storage/sharing/page_pools.h"

namespace ashlar::daemon {

// Its calls are like EngineService's.
class AdmissionCalls {
 public:
  using Done = SessionCalls::Done;

  // All must outlive this object.
  AdmissionCalls(SessionCalls& sessions, storage::Cache& cache) : sessions_(sessions), cache_(cache) {}

  void Admit(const v1::AdmitRequest& request, v1::AdmitReply* reply, Done done);
  void ExtendAdmission(const v1::ExtendAdmissionRequest& request, v1::AdmitReply* reply, Done done);
  void MarkFilled(const v1::MarkFilledRequest& request, v1::MarkFilledReply* reply, Done done);
  void AttachAdmission(const v1::AttachAdmissionRequest& request, v1::AdmitReply* reply, Done done);

  // The metadata thread only.
  storage::PagePools& pools() { return pools_; }
  const storage::PagePools& pools() const { return pools_; }

 private:
  // Ends the session's requests when the session ends. The metadata thread only.
  void EndRequestsWith(const std::shared_ptr<Session>& session);

  SessionCalls& sessions_;
  storage::Cache& cache_;
  storage::PagePools pools_;  // the metadata thread only
};

}  // namespace ashlar::daemon
