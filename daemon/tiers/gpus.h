// SPDX-License-Identifier: Apache-2.0
// Gpus: the GPUs that a configuration names, with the queues of each.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/gpu.h"
#include "storage/transfer/gpu_lane.h"

namespace ashlar::v1 {
class Config;
}

namespace ashlar::daemon {

class Gpus {
 public:
  // `queues` of each. FAILED_PRECONDITION naming the field where the machine has no such GPU, or it cannot be used.
  static absl::StatusOr<Gpus> Open(const v1::Config& config, int queues);

  // In the configuration's order.
  std::vector<const kernels::Gpu*> all() const;
  std::vector<storage::GpuLane*> lanes() const;

 private:
  std::vector<std::unique_ptr<storage::GpuLane>> lanes_;
};

// The numbers of the configuration's GPUs as the log says them.
std::string DevicesOf(const v1::Config& config);

}  // namespace ashlar::daemon
