// SPDX-License-Identifier: Apache-2.0
// Descriptor, Mapping: owners of file descriptors and of mappings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ashlar::internal {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }

  // A second descriptor of the same file, closed on exec.
  static absl::StatusOr<Descriptor> Duplicate(int fd);

 private:
  int fd_ = -1;
};

// Shared memory mapped into this process; unmapped on destruction.
class Mapping {
 public:
  enum class Access { kRead, kReadWrite };

  // Maps the first `bytes` of a memfd. INVALID_ARGUMENT unless the file is at least that long and sealed with
  // F_SEAL_SHRINK: otherwise it could be truncated, and reading it would kill this process.
  static absl::StatusOr<Mapping> Map(int memfd, uint64_t bytes, Access access);

  Mapping() = default;
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Mapping();

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  Mapping(std::byte* data, size_t size) : data_(data), size_(size) {}

  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace ashlar::internal
