// SPDX-License-Identifier: Apache-2.0
// HostQueue: the queue of back ends that compute on the CPU. Work is done when it has been submitted.
#pragma once

#include "kernels/device.h"

namespace ashlar::kernels {

class HostQueue final : public Queue {
 public:
  explicit HostQueue(Workers* workers) : workers_(workers) {}

  uint64_t Completed() const override { return UINT64_MAX; }
  void WaitFor(uint64_t) override {}

  // Null: the calling thread alone.
  Workers* workers() const { return workers_; }

 private:
  Workers* const workers_;
};

}  // namespace ashlar::kernels
