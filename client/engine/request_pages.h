// SPDX-License-Identifier: Apache-2.0
// RequestPages: a request's page tables, and the owner of the pages: the engine, the daemon, or the cache.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "ashlar/engine.h"
#include "client/engine/cache_state.h"
#include "client/engine/page_tables.h"
#include "client/engine/quarantine.h"
#include "client/session/landing.h"

namespace ashlar::engine {

class RequestPages {
 public:
  explicit RequestPages(CacheState& cache) : cache_(cache) {}

  // Takes the page tables of a call, for a prompt of `tokens` tokens. The engine owns the pages. `field` names the
  // arguments in errors.
  Status Take(const GivenPages& given, uint64_t tokens, const std::string& field);

  bool empty() const { return tables_.empty(); }
  const GroupedPages& tables() const { return tables_; }

  // The engine lends its pages to the daemon, which may write to them until they are returned.
  void Lend();
  void Return();
  bool lent() const { return owner_ == Owner::kDaemon; }
  // The cache keeps the pages, to which `landing` may still write. Without pages it keeps the landing, and `held` until
  // the landing is quiesced.
  void Keep(std::optional<Landing> landing, std::shared_ptr<const void> held = nullptr);
  bool kept() const { return owner_ == Owner::kCache; }
  // For kept pages. kOk: nothing can write to them any longer, and they belong to the engine.
  Status Claim();

 private:
  enum class Owner : uint8_t { kNone, kDaemon, kEngine, kCache };

  CacheState& cache_;
  GroupedPages tables_;
  Owner owner_ = Owner::kNone;
  std::shared_ptr<Quarantine::Unresolved> unresolved_;  // the pages that the cache keeps
};

}  // namespace ashlar::engine
