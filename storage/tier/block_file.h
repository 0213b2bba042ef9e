// SPDX-License-Identifier: Apache-2.0
// BlockFile: the bytes of a disk tier, one file of fixed size, read and written in whole pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ashlar::storage {

// Thread-safe. Offsets, sizes and addresses must be multiples of kBlockBytes, and ranges must lie inside the file:
// INVALID_ARGUMENT otherwise. A write is durable once a Sync that began after it has returned OK; before that, a power
// loss may keep it, lose it, or keep some of its sectors, in any order. After a failed Sync the state of the writes
// before it is unknown, and a later Sync says nothing about them: they must be written again.
class BlockFile {
 public:
  static constexpr uint64_t kBlockBytes = 4096;

  virtual ~BlockFile() = default;
  virtual uint64_t size() const = 0;
  virtual absl::Status Read(uint64_t offset, std::span<std::byte> target) = 0;
  // After an error the named bytes may be anything.
  virtual absl::Status Write(uint64_t offset, std::span<const std::byte> source) = 0;
  virtual absl::Status Sync() = 0;
};

// A file that bypasses the page cache (O_DIRECT): what is cached here is cached in memory already. It is made if there
// is none, with mode 0600, and all of its blocks are allocated, so that writing never runs out of room; a file of
// another size becomes `bytes` long. `bytes` must be a multiple of kBlockBytes. One process at a time:
// FAILED_PRECONDITION while another has it, and where the file system cannot bypass its cache; RESOURCE_EXHAUSTED where
// it has no room, which is asked for first: nothing is allocated then; UNAVAILABLE where it is read-only or fails.
// FAILED_PRECONDITION where it is a link, or another user's (file_owner.h). Errors name the path. `folder`: a
// descriptor of the path's folder, in which the file's name is looked up; negative: the path's folder is opened.
absl::StatusOr<std::unique_ptr<BlockFile>> OpenBlockFile(const std::string& path, uint64_t bytes, int folder = -1);

}  // namespace ashlar::storage
