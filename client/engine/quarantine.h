// Quarantine: memory that the daemon may still write: pages of landings, and staging memory of compositions, whose end
// is not known.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "ashlar/client.h"
#include "client/engine/staging.h"

namespace ashlar::engine {

// Thread-safe. Its destructor waits until all memory is quiet.
class Quarantine {
 public:
  // The pages go back to the engine by Take.
  void Keep(Landing landing, std::vector<int32_t> pages);
  // The memory goes back to the staging, which outlives this.
  void Keep(Composition composition, Staging::Held memory);

  // Returns how many pages are quiet now that were not returned before, and writes them to `pages`. Waits up to
  // `timeout` for the first, if there are any to wait for.
  uint64_t Take(std::span<int32_t> pages, std::chrono::milliseconds timeout);

 private:
  struct Doubt {
    std::vector<int32_t> pages;
    Landing landing;  // goes first, and waits
  };
  struct ComposedDoubt {
    Staging::Held memory;
    Composition composition;  // goes first, and waits
  };

  void Sort();  // needs mutex_

  std::mutex mutex_;
  std::vector<Doubt> landings_;  // guarded by mutex_, as all below
  std::vector<ComposedDoubt> compositions_;
  std::vector<int32_t> quiet_;
};

}  // namespace ashlar::engine
