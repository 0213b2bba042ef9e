// SPDX-License-Identifier: Apache-2.0
// Staging: memory besides the engine's own that the daemon reads and writes for this engine: published tensors, and
// rows to compose.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "client/session/client.h"
#include "kernels/mutex.h"

namespace ashlar::engine {

// Hosted regions, each held for one call and then reused. Thread-safe.
class Staging {
 public:
  explicit Staging(Client& client) : client_(client) {}

  // A held region, allocated from the front. The region returns to the staging when this is destroyed; the staging must
  // outlive it.
  class Held {
   public:
    Held(Held&& other) noexcept = default;
    Held& operator=(Held&&) = delete;
    ~Held();

    const Region& region() const { return region_; }
    // Returns the next `bytes` bytes, aligned to 64.
    std::byte* Take(uint64_t bytes);
    // Frees all bytes.
    void Clear() { used_ = 0; }

   private:
    friend class Staging;
    Held(Staging& staging, Region region) : staging_(&staging), region_(std::move(region)) {}
    struct Erase {
      void operator()(Staging*) const {}
    };
    std::unique_ptr<Staging, Erase> staging_;  // null: moved from
    Region region_;
    uint64_t used_ = 0;
  };

  static uint64_t Align(uint64_t bytes) { return (bytes + 63) / 64 * 64; }
  // Holds a region for `bytes` bytes in all, each piece aligned. Errors are Client::HostRegion's.
  absl::StatusOr<Held> Hold(uint64_t bytes);

 private:
  static constexpr size_t kKept = 8;  // limit of unused regions that are kept

  Client& client_;
  Mutex mutex_;
  std::vector<Region> free_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ashlar::engine
