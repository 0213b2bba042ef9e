// Threads that an engine lends, as kernels take them.
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
