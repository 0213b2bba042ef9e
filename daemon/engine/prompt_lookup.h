// SPDX-License-Identifier: Apache-2.0
// PromptLookup: looks up one prompt and writes the reply, in slices.
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
  // All arguments must outlive the object. `lease` is the id of the new lease; all zero for a random one.
  PromptLookup(EngineService& service, const Session& session, const ParsedPrompt& asked, MatchReplyWriter& writer,
               v1::PromptMatch* out, const storage::LeaseId& lease = {})
      : service_(service), session_(session), asked_(asked), writer_(writer), out_(out), lease_(lease) {}

  // Returns false if more is left.
  bool Run(storage::Slice& slice);
  // Returns the match after the last slice. Its objects stay valid as long as its lease.
  const storage::Match& match() const { return match_; }
  uint64_t TokensFound() const;  // after the last slice

 private:
  void DropSegments();

  EngineService& service_;
  const Session& session_;
  const ParsedPrompt& asked_;
  MatchReplyWriter& writer_;
  v1::PromptMatch* const out_;
  const storage::LeaseId lease_;
  std::unique_ptr<storage::Search> search_;  // null after the search
  bool found_ = false;
  storage::Match match_;
  size_t written_ = 0;
};

}  // namespace ashlar::daemon
