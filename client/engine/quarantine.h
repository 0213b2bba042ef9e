// SPDX-License-Identifier: Apache-2.0
// Memory that the daemon may still write into, and pages that are the cache's: of landings and staging of compositions
// whose end is not known, and of requests that ended before they were done.
#pragma once

#include <chrono>
#include <cstdint>
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

// Thread-safe. Its end waits until all is quiet.
class Quarantine {
 public:
  // A request's pages. They go back to the engine once: by Claim, or by Take.
  class Doubt;
  // A page: the set of page numbers that it is of (LayerGroups::SetOf), and its number.
  using Page = std::pair<uint32_t, int32_t>;

  // `landing`: none where nothing writes.
  std::shared_ptr<Doubt> Keep(std::optional<Landing> landing, std::vector<Page> pages);
  // The memory goes back to the staging, which outlives this.
  void Keep(Composition composition, Staging::Held memory);

  enum class Claimed : uint8_t { kQuiet, kDoubtful, kTaken };
  // kQuiet: the pages are the engine's now, and Take does not give them back. kTaken: it has.
  Claimed Claim(Doubt& doubt);
  // Pages of a set that are quiet now, of which nobody was told yet: how many. Waits up to `timeout` for the first, if
  // there are any to wait for.
  uint64_t Take(uint32_t set, std::span<int32_t> pages, std::chrono::milliseconds timeout);
  // The place of the first of a set's `pages` that is here.
  std::optional<size_t> Find(uint32_t set, std::span<const int32_t> pages);

 private:
  struct ComposedDoubt {
    Staging::Held memory;
    Composition composition;  // goes first, and waits
  };

  void Sort() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // takes out what was found quiet

  Mutex mutex_;
  std::vector<std::shared_ptr<Doubt>> doubts_ ABSL_GUARDED_BY(mutex_);
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;  // of doubts_, that the next Take asks first
  std::vector<ComposedDoubt> compositions_ ABSL_GUARDED_BY(mutex_);
  std::map<uint32_t, std::vector<int32_t>> quiet_ ABSL_GUARDED_BY(mutex_);  // by set
};

}  // namespace ashlar::engine
