// SPDX-License-Identifier: Apache-2.0
// Quarantine: memory that the daemon may still write to, and pages that the cache owns: those of unresolved landings
// and compositions, and of requests that ended before they were done.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "client/engine/staging.h"
#include "client/session/client.h"
#include "kernels/mutex.h"

namespace ashlar::engine {

// Thread-safe. The destructor waits until everything is quiesced.
class Quarantine {
 public:
  // A request's unresolved pages. They are returned to the engine once: by Claim, or by Take.
  class Unresolved;
  // A page: its set of page numbers (LayerGroups::SetOf), and its number.
  using Page = std::pair<uint32_t, int32_t>;

  // Keeps a landing that writes to no pages of the engine. EndLandings destroys quiesced landings with their leases,
  // and then releases `held`.
  void KeepLanding(std::optional<Landing> landing, std::shared_ptr<const void> held);
  void EndLandings();
  // `landing`: none if nothing writes to the pages.
  std::shared_ptr<Unresolved> Keep(std::optional<Landing> landing, std::vector<Page> pages);
  // The memory returns to the staging, which must outlive this object.
  void Keep(Composition composition, Staging::Held memory);

  enum class Claimed : uint8_t { kQuiesced, kUnresolved, kTaken };
  // kQuiesced: the engine now owns the pages, and Take does not return them. kTaken: Take has returned them.
  Claimed Claim(Unresolved& unresolved);
  // Writes quiesced pages of a set that were not returned before, and returns their number. Waits up to `timeout` for
  // the first page, if any is unresolved.
  uint64_t Take(uint32_t set, std::span<int32_t> pages, std::chrono::milliseconds timeout);
  // The index of the first of a set's `pages` that is stored here.
  std::optional<size_t> Find(uint32_t set, std::span<const int32_t> pages);

 private:
  struct KeptLanding {
    std::shared_ptr<const void> held;
    std::optional<Landing> landing;  // destroyed before `held`; the destructor waits
  };
  struct UnresolvedComposition {
    Staging::Held memory;
    Composition composition;  // destroyed before `memory`; the destructor waits
  };

  void Sort() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // moves the quiesced pages out

  Mutex mutex_;
  std::vector<std::shared_ptr<Unresolved>> unresolved_ ABSL_GUARDED_BY(mutex_);
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;  // index in unresolved_ that the next Take asks first
  std::deque<KeptLanding> landings_ ABSL_GUARDED_BY(mutex_);
  std::vector<UnresolvedComposition> compositions_ ABSL_GUARDED_BY(mutex_);
  std::map<uint32_t, std::vector<int32_t>> quiesced_ ABSL_GUARDED_BY(mutex_);  // quiesced pages by set
};

}  // namespace ashlar::engine
