// SPDX-License-Identifier: Apache-2.0
// Memory of the kind that an engine shares with the daemon: a memfd, mapped and touched.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "absl/status/statusor.h"

namespace ashlar::bench {

class SharedMemory {
 public:
  // Returns an error if the kernel refuses it.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Make(size_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  explicit SharedMemory(std::span<std::byte> bytes) : bytes_(bytes) {}
  const std::span<std::byte> bytes_;
};

}  // namespace ashlar::bench
