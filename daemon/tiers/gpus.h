// SPDX-License-Identifier: Apache-2.0
// Gpus: the configured GPUs and their queues.
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
  // Opens `queues` per GPU. FAILED_PRECONDITION names the field if the machine has no such GPU, or it cannot be used.
  static absl::StatusOr<Gpus> Open(const v1::Config& config, int queues);

  // In the order of the configuration.
  std::vector<const kernels::Gpu*> all() const;
  std::vector<storage::GpuLane*> lanes() const;

 private:
  std::vector<std::unique_ptr<storage::GpuLane>> lanes_;
};

// Returns the device numbers of the configured GPUs for the log.
std::string DevicesOf(const v1::Config& config);

}  // namespace ashlar::daemon
