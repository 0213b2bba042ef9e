// SPDX-License-Identifier: Apache-2.0
// BlockFile: the bytes of a disk tier in one file of fixed size, read and written in whole pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ashlar::storage {

// Thread-safe. Offsets, sizes and addresses must be multiples of kBlockBytes, and ranges inside the file:
// INVALID_ARGUMENT otherwise. A write is durable once a Sync that began after it has returned OK; before that, a power
// loss may keep it, lose it, or keep some of its sectors, in any order. After a failed Sync the state of earlier writes
// is unknown, even after a later Sync: they must be written again.
class BlockFile {
 public:
  static constexpr uint64_t kBlockBytes = 4096;

  virtual ~BlockFile() = default;
  virtual uint64_t size() const = 0;
  virtual absl::Status Read(uint64_t offset, std::span<std::byte> target) = 0;
  // After an error the range may hold anything.
  virtual absl::Status Write(uint64_t offset, std::span<const std::byte> source) = 0;
  virtual absl::Status Sync() = 0;
};

// Opens a file that bypasses the page cache (O_DIRECT), because its contents are cached in memory already. A missing
// file is created with mode 0600. All blocks are allocated, so that writes never run out of space; a file of another
// size is resized to `bytes`, a multiple of kBlockBytes. FAILED_PRECONDITION if another process has it open, the file
// system has no O_DIRECT, or it is a link or owned by another user (file_owner.h). RESOURCE_EXHAUSTED if the file
// system has no space, which is checked before allocating. UNAVAILABLE if the file system is read-only or fails. Errors
// name the path. `folder` is a descriptor of the path's directory, in which the file name is looked up; if negative,
// the directory is opened.
absl::StatusOr<std::unique_ptr<BlockFile>> OpenBlockFile(const std::string& path, uint64_t bytes, int folder = -1);

}  // namespace ashlar::storage
