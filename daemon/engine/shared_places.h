// SPDX-License-Identifier: Apache-2.0
// SharedPlaces: the places in an engine's regions that one call names. Each is checked, and all against one another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/session/region.h"
#include "daemon/session/row_array.h"
#include "daemon/session/session.h"

namespace ashlar::daemon {

// All errors are INVALID_ARGUMENT and name the field.
class SharedPlaces {
 public:
  enum class Access : uint8_t { kRead, kWrite };

  // `session` must outlive the object.
  explicit SharedPlaces(const Session& session) : session_(session) {}

  // `bytes` from `offset` on, which are written: inside the region, aligned to `alignment`.
  absl::StatusOr<std::byte*> Block(const std::string& field, uint64_t region, uint64_t offset, uint64_t bytes,
                                   uint64_t alignment);
  // `rows` rows (at least one), each of `row_bytes`, which must be aligned to floats, lie inside the region and not
  // overlap.
  absl::StatusOr<float*> Rows(const std::string& field, uint64_t region, uint64_t offset, uint64_t stride,
                              uint64_t rows, uint64_t row_bytes, Access access);

  // Checks that nothing that is written shares a byte with any other place. Call it once, when all places are known. A
  // region that was registered twice counts as two: an engine that does that harms only itself.
  absl::Status CheckApart();

  // In whose memory all places lie; null: the processor's.
  const kernels::Gpu* gpu() const { return gpu_.value_or(nullptr); }

  // Returns an object that keeps all the places mapped.
  std::shared_ptr<const void> keep() const;

 private:
  struct Place {
    std::string field;
    const Region* region;
    RowArray rows;
    bool is_block;
    Access access;
  };
  absl::StatusOr<const Region*> FindRegion(const std::string& field, uint64_t handle);

  const Session& session_;
  std::map<uint64_t, std::shared_ptr<const Region>> regions_;
  std::vector<Place> places_;
  std::optional<const kernels::Gpu*> gpu_;  // of the first
};

}  // namespace ashlar::daemon
