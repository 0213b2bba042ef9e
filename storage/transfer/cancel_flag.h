// SPDX-License-Identifier: Apache-2.0
// CancelFlag: asks work on other threads to stop.
#pragma once

#include <atomic>
#include <memory>

namespace ashlar::storage {

// Copies share one flag. Transfers check it between tasks of about 1 MiB.
class CancelFlag {
 public:
  void Cancel() const { flag_->store(true, std::memory_order_relaxed); }
  bool cancelled() const { return flag_->load(std::memory_order_relaxed); }

 private:
  std::shared_ptr<std::atomic<bool>> flag_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace ashlar::storage
