// SPDX-License-Identifier: Apache-2.0
// LentWorkers: the threads that an engine lends, in the form that kernels take.
#pragma once

#include "ashlar/engine.h"
#include "kernels/device.h"

namespace ashlar::engine {

class LentWorkers final : public kernels::Workers {
 public:
  explicit LentWorkers(const engine::Workers& lent) : lent_(lent) {}

  int Size() const override { return lent_.size; }
  void Run(int64_t count, Body body, void* context) override { lent_.run(lent_.context, count, body, context); }

 private:
  const engine::Workers lent_;
};

}  // namespace ashlar::engine
