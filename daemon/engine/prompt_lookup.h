// SPDX-License-Identifier: Apache-2.0
// PromptLookup: looks one prompt up and writes its answer, in slices.
#pragma once

#include <cstddef>
#include <memory>

#include "daemon/engine/engine_service.h"
#include "daemon/engine/match_reply.h"
#include "daemon/engine/request_fields.h"
#include "daemon/session/session.h"
#include "storage/cache.h"
#include "storage/lookup/search.h"

namespace ashlar::daemon {

// The metadata thread only.
class EngineService::PromptLookup {
 public:
  // All must outlive it. `lease`: the name that it is to have; all zero: any.
  PromptLookup(EngineService& service, const Session& session, const Asked& asked, MatchReplyWriter& writer,
               v1::PromptMatch* out, const storage::LeaseId& lease = {})
      : service_(service), session_(session), asked_(asked), writer_(writer), out_(out), lease_(lease) {}

  // False: there is more to do.
  bool Run(storage::Slice& slice);
  // Returns the match after the last slice. Its objects stay valid as long as its lease.
  const storage::Match& match() const { return match_; }

 private:
  void Lose();
  uint64_t TokensFound() const;

  EngineService& service_;
  const Session& session_;
  const Asked& asked_;
  MatchReplyWriter& writer_;
  v1::PromptMatch* const out_;
  const storage::LeaseId lease_;
  std::unique_ptr<storage::Search> search_;  // while it runs
  bool found_ = false;
  storage::Match match_;
  size_t written_ = 0;
};

}  // namespace ashlar::daemon
