// SPDX-License-Identifier: Apache-2.0
// ComingArena: an arena that is created in advance.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/status/statusor.h"
#include "kernels/gpu.h"
#include "storage/memory/memory_reserve.h"

namespace ashlar::storage {

// Creating an arena takes as long as the kernel needs to clear its pages, about 40 ms for 64 MiB, so another thread
// creates it. If the arena is needed before that thread has started, the caller creates it; otherwise it waits.
class ComingArena {
 public:
  using Made = absl::StatusOr<std::unique_ptr<kernels::ArenaMemory>>;
  explicit ComingArena(std::function<Made()> make) : make_(std::move(make)) {}

  void Make() {  // thread-safe
    std::call_once(once_, [this] {
      made_ = make_();
      if (!made_.ok()) return;
      data_ = (*made_)->data();
      bytes_ = (*made_)->bytes();
    });
  }
  // Runs on the preparing thread. Take() may run concurrently. Also maps the pages, so that the first writes cause no
  // page faults (24 ms per 64 MiB).
  void MakeAhead() {
    Make();
    if (data_ != nullptr) MapPages(data_, bytes_);
  }
  Made Take() {  // call once
    Make();
    return std::move(made_);
  }

 private:
  const std::function<Made()> make_;
  std::once_flag once_;
  Made made_ = absl::UnknownError("arena: not created");
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace ashlar::storage
