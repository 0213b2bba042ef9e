// Memory that the daemon may still write into, and pages that are the cache's: of landings and staging of compositions
// whose end is not known, and of requests that ended before they were done.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "ashlar/client.h"
#include "client/engine/staging.h"

namespace ashlar::engine {

// Thread-safe. Its end waits until all is quiet.
class Quarantine {
 public:
  // A request's pages. They go back to the engine once: by Claim, or by Take.
  class Doubt;

  // `landing`: none where nothing writes.
  std::shared_ptr<Doubt> Keep(std::optional<Landing> landing, std::vector<int32_t> pages);
  // The memory goes back to the staging, which outlives this.
  void Keep(Composition composition, Staging::Held memory);

  enum class Claimed : uint8_t { kQuiet, kDoubtful, kTaken };
  // kQuiet: the pages are the engine's now, and Take does not give them back. kTaken: it has.
  Claimed Claim(Doubt& doubt);
  // Pages that are quiet now, of which nobody was told yet: how many. Waits up to `timeout` for the first, if there are
  // any to wait for.
  uint64_t Take(std::span<int32_t> pages, std::chrono::milliseconds timeout);
  // The place of the first of `pages` that is here.
  std::optional<size_t> Find(std::span<const int32_t> pages);

 private:
  struct ComposedDoubt {
    Staging::Held memory;
    Composition composition;  // goes first, and waits
  };

  void Sort();  // needs mutex_

  std::mutex mutex_;
  std::vector<std::shared_ptr<Doubt>> doubts_;  // guarded by mutex_, as all below
  std::vector<ComposedDoubt> compositions_;
  std::vector<int32_t> quiet_;
};

}  // namespace ashlar::engine
