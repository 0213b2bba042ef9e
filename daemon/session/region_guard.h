// SPDX-License-Identifier: Apache-2.0
// RegionGuard: keeps the daemon from allocating pages of engines' own memory.
//
// An engine may free pages of its memfd at any moment, also between the check that precedes a call and the call's
// writes. A write to such a page would allocate it at the daemon's charge. The kernel is asked to report the write
// instead (userfaultfd). The daemon then gives the region up for good: it puts memory of its own in the place of the
// mapping, where the calls under way read zeros and write what nobody will see. That memory is emptied over and over.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "daemon/runtime/unique_fd.h"

namespace ashlar::daemon {

// Thread-safe.
class RegionGuard : public std::enable_shared_from_this<RegionGuard> {
 public:
  // A mapping that is guarded. Destroy it before the mapping ends.
  class Guarded {
   public:
    ~Guarded();
    Guarded(const Guarded&) = delete;
    Guarded& operator=(const Guarded&) = delete;

    bool lost() const { return lost_; }  // a page was touched that was not there

   private:
    friend class RegionGuard;
    Guarded(std::shared_ptr<RegionGuard> guard, std::byte* data, uint64_t bytes)
        : guard_(std::move(guard)), data_(data), bytes_(bytes) {}

    const std::shared_ptr<RegionGuard> guard_;
    std::byte* const data_;
    const uint64_t bytes_;
    bool replaced_ = false;  // by memory of the daemon's; guarded by mutex_
    std::atomic<bool> lost_{false};
  };

  // Null, with a warning in the log, where the kernel or a filter of system calls does not allow it.
  static std::shared_ptr<RegionGuard> Make();
  ~RegionGuard();
  RegionGuard(const RegionGuard&) = delete;
  RegionGuard& operator=(const RegionGuard&) = delete;

  // Guards a shared mapping of a memfd for reading and writing, which begins at a page. Null where the kernel refuses.
  std::unique_ptr<Guarded> Guard(std::byte* data, uint64_t bytes);

 private:
  RegionGuard(UniqueFd faults, UniqueFd stop);
  void Run();
  void Answer();  // all faults that are reported
  void GiveUp(std::byte* page);
  bool EmptyReplaced();  // false: none is

  const UniqueFd faults_, stop_;
  std::mutex mutex_;
  std::map<std::byte*, Guarded*> guarded_;  // by their beginnings; guarded by mutex_
  std::thread thread_;
};

}  // namespace ashlar::daemon
