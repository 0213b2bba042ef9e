// SPDX-License-Identifier: Apache-2.0
// History: what has happened to the texts and the cache. The oracle checks answers against it.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "tests/simulation/context.h"

namespace ashlar::simulation {

struct History {
  // The daemon was killed: pins and drains ended, and the uses of objects begin again.
  void Crashed(Nanos now) {
    pins.clear();
    pinned_prefixes.clear();
    for (auto& [text, last] : used) last = surely_used[text] = now;
    drains = false;
  }

  std::set<Text> published, declined;  // since the start
  std::set<Text> operator_evicted;
  std::map<Text, Nanos> pins;  // by text: until when
  // Time of the last lookup, publish or offer; and the latest one that surely counts.
  std::map<Text, Nanos> used, surely_used;

  bool evicted_prefixes = false;                       // whether the operator evicted some
  std::set<std::pair<TenantId, Key>> pinned_prefixes;  // pinned by the operator

  std::map<Text, uint64_t> erased;  // erased permanently and not published since: at which step
  std::set<Text> republished;       // since the latest erasure began
  std::set<TenantId> half_erased;   // a crash came first, and objects may be partly overwritten

  bool drains = false;
  bool hung = false;  // whether the disk ever hung
};

}  // namespace ashlar::simulation
