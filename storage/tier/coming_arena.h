// SPDX-License-Identifier: Apache-2.0
// ComingArena: an arena that is made ahead of need.
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

// Making an arena takes as long as the kernel takes to clear its pages, some 40 ms for 64 MiB. So another thread makes
// it; if it is needed before that thread has begun, the thread that needs it makes it, and else waits for the rest.
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
  // By the other thread: then maps the pages, so that who writes there first takes no page faults (24 ms in 64 MiB).
  // Meanwhile the arena may be taken.
  void MakeAhead() {
    Make();
    if (data_ != nullptr) MapPages(data_, bytes_);
  }
  Made Take() {  // once
    Make();
    return std::move(made_);
  }

 private:
  const std::function<Made()> make_;
  std::once_flag once_;
  Made made_ = absl::UnknownError("arena: not made");
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace ashlar::storage
