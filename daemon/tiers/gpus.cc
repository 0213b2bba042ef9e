// SPDX-License-Identifier: Apache-2.0
#include "daemon/tiers/gpus.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"

namespace ashlar::daemon {

absl::StatusOr<Gpus> Gpus::Open(const v1::Config& config, int queues) {
  Gpus gpus;
  for (const v1::Gpu& asked : config.gpu()) {
    std::string why;
    const kernels::Gpu* const gpu = kernels::FindGpu(static_cast<int>(asked.device()), &why);
    if (gpu == nullptr) {
      return absl::FailedPreconditionError(absl::StrCat("gpu.device ", asked.device(), ": ", why));
    }
    auto lane = storage::GpuLane::Make(*gpu, queues);
    if (!lane.ok()) return lane.status();
    gpus.lanes_.push_back(*std::move(lane));
  }
  return gpus;
}

std::vector<const kernels::Gpu*> Gpus::all() const {
  std::vector<const kernels::Gpu*> all;
  for (const auto& lane : lanes_) all.push_back(&lane->gpu());
  return all;
}

std::vector<storage::GpuLane*> Gpus::lanes() const {
  std::vector<storage::GpuLane*> lanes;
  for (const auto& lane : lanes_) lanes.push_back(lane.get());
  return lanes;
}

std::string DevicesOf(const v1::Config& config) {
  std::string devices;
  for (const v1::Gpu& gpu : config.gpu()) absl::StrAppend(&devices, devices.empty() ? "" : ",", gpu.device());
  return devices.empty() ? "none" : devices;
}

}  // namespace ashlar::daemon
