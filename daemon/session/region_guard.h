// SPDX-License-Identifier: Apache-2.0
// RegionGuard: prevents the daemon from allocating pages of engines' own memory.
//
// An engine may free pages of its memfd at any time, also between a call's check and its writes. Writing to such a page
// would allocate it at the daemon's charge. The kernel is asked to report the access instead (userfaultfd). The daemon
// then abandons the region permanently: it replaces the mapping by memory of its own, in which calls in flight read
// zeros and write data that is discarded. That memory is emptied repeatedly.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <thread>

#include "daemon/runtime/unique_fd.h"
#include "kernels/mutex.h"

namespace ashlar::daemon {

// Thread-safe.
class RegionGuard : public std::enable_shared_from_this<RegionGuard> {
 public:
  // A guarded mapping. Destroy it before unmapping.
  class Guarded {
   public:
    ~Guarded();
    Guarded(const Guarded&) = delete;
    Guarded& operator=(const Guarded&) = delete;

    bool lost() const { return lost_; }  // a missing page was touched

   private:
    friend class RegionGuard;
    Guarded(std::shared_ptr<RegionGuard> guard, std::byte* data, uint64_t bytes)
        : guard_(std::move(guard)), data_(data), bytes_(bytes) {}

    const std::shared_ptr<RegionGuard> guard_;
    std::byte* const data_;
    const uint64_t bytes_;
    bool replaced_ = false;  // the daemon's memory replaces it; only the guard's thread uses the flag
    std::atomic<bool> lost_{false};
  };

  // Returns null and logs a warning if the kernel or a seccomp filter does not allow it.
  static std::shared_ptr<RegionGuard> Make();
  ~RegionGuard();
  RegionGuard(const RegionGuard&) = delete;
  RegionGuard& operator=(const RegionGuard&) = delete;

  // Guards a shared read-write mapping of a memfd that starts at a page boundary. Returns null if the kernel refuses.
  std::unique_ptr<Guarded> Guard(std::byte* data, uint64_t bytes);

 private:
  RegionGuard(UniqueFd faults, UniqueFd stop);
  void Run();
  void Answer();  // handles all reported faults
  void ReplaceLost(std::byte* page);
  bool EmptyReplaced();  // returns false if there is none

  const UniqueFd faults_, stop_;
  Mutex mutex_;
  std::map<std::byte*, Guarded*> guarded_ ABSL_GUARDED_BY(mutex_);  // key: start address
  std::thread thread_;
};

}  // namespace ashlar::daemon
