// ComingArena: an arena that is made ahead of need.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/status/statusor.h"
#include "kernels/gpu.h"

namespace ashlar::storage {

// Making an arena takes as long as the kernel takes to clear its pages, some 40 ms for 64 MiB. So another thread makes
// it; if it is needed before that thread has begun, the thread that needs it makes it, and else waits for the rest.
class ComingArena {
 public:
  using Made = absl::StatusOr<std::unique_ptr<kernels::ArenaMemory>>;
  explicit ComingArena(std::function<Made()> make) : make_(std::move(make)) {}

  void Make() {  // thread-safe
    std::call_once(once_, [this] { made_ = make_(); });
  }
  Made Take() {  // once
    Make();
    return std::move(made_);
  }

 private:
  const std::function<Made()> make_;
  std::once_flag once_;
  Made made_ = absl::UnknownError("arena: not made");
};

}  // namespace ashlar::storage
