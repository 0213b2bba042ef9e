// SPDX-License-Identifier: Apache-2.0
#include "client/engine/request_pages.h"

#include <utility>

#include "client/engine/status.h"

namespace ashlar::engine {

Status RequestPages::Take(const GivenPages& given, uint64_t tokens, const std::string& field) {
  if (Status status = CheckTables(cache_.groups, given, field); !status.ok()) return status;
  if (Status status = CheckReach(cache_.groups, given, 0, tokens, field); !status.ok()) return status;
  if (given.page_count > 0 && !cache_.has_pages()) return Invalid(field, ".page_table: the cache has no pages");
  if (Status status = CheckNotKept(cache_.groups, given, cache_.quarantine, field); !status.ok()) return status;
  tables_ = GroupedPages::From(given);
  owner_ = tables_.empty() ? Owner::kNone : Owner::kEngine;
  unresolved_.reset();
  return {};
}

void RequestPages::Lend() {
  if (owner_ == Owner::kEngine) owner_ = Owner::kDaemon;
}

void RequestPages::Return() {
  if (owner_ == Owner::kDaemon) owner_ = Owner::kEngine;
}

void RequestPages::Keep(std::optional<Landing> landing, std::shared_ptr<const void> held) {
  if (owner_ == Owner::kNone) {
    return cache_.quarantine.KeepLanding(std::move(landing), std::move(held));
  }
  unresolved_ = cache_.quarantine.Keep(std::move(landing), tables_.InSets(cache_.groups));
  tables_.clear();
  owner_ = Owner::kCache;
}

Status RequestPages::Claim() {
  switch (cache_.quarantine.Claim(*unresolved_)) {
    case Quarantine::Claimed::kUnresolved:
      return Pending();
    case Quarantine::Claimed::kTaken:
      return MakeStatus(Code::kFailedPrecondition, "TakeQuiescedPages has already returned the pages");
    case Quarantine::Claimed::kQuiesced:
      break;
  }
  owner_ = Owner::kNone;  // owned by the engine, no longer by this request
  return {};
}

}  // namespace ashlar::engine
