// SPDX-License-Identifier: Apache-2.0
// SharedPlaces: the memory ranges in an engine's regions that one call names. Each range is checked, and all against
// each other.
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

// All errors are INVALID_ARGUMENT with the field's name.
class SharedPlaces {
 public:
  enum class Access : uint8_t { kRead, kWrite };

  // `session` must outlive the object.
  explicit SharedPlaces(const Session& session) : session_(session) {}

  // Adds a block of `bytes` at `offset` that the call writes. It must lie inside the region and be aligned to
  // `alignment`.
  absl::StatusOr<std::byte*> Block(const std::string& field, uint64_t region, uint64_t offset, uint64_t bytes,
                                   uint64_t alignment);
  // Adds `rows` rows (at least one) of `row_bytes` each. They must be aligned to floats, lie inside the region and not
  // overlap.
  absl::StatusOr<float*> Rows(const std::string& field, uint64_t region, uint64_t offset, uint64_t stride,
                              uint64_t rows, uint64_t row_bytes, Access access);

  // Checks that no written range overlaps another range. Call it once, after the last range. A region that was
  // registered twice counts as two; such an engine can only corrupt its own memory.
  absl::Status CheckApart();

  // The GPU whose memory all ranges are in; null for host memory.
  const kernels::Gpu* gpu() const { return gpu_.value_or(nullptr); }

  // Returns an object that keeps all ranges mapped.
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
  std::optional<const kernels::Gpu*> gpu_;  // GPU of the first range
};

}  // namespace ashlar::daemon
