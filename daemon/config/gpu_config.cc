// SPDX-License-Identifier: Apache-2.0
#include "daemon/config/gpu_config.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "proto/invalid.h"

namespace ashlar::daemon {
namespace {

constexpr uint32_t kMaxGpu = 1023;
constexpr int kMaxGpus = 16;

std::string Numbered(absl::string_view name, int index, int size) {
  return size == 1 ? std::string(name) : absl::StrCat(name, "[", index, "]");
}

}  // namespace

std::string HbmField(const v1::Config& config, int index) {
  return Numbered("hbm", index, config.hbm_size());
}

void FillGpuDefaults(v1::Config* config) {
  auto& tiers = *config->mutable_hbm();
  for (int i = tiers.size() - 1; i >= 0; --i) {
    if (tiers[i].capacity_bytes() == 0) tiers.DeleteSubrange(i, 1);
  }
  for (int i = 0; i < std::min(tiers.size(), config->gpu_size()); ++i) {
    if (!tiers[i].has_device()) tiers[i].set_device(config->gpu(i).device());
  }
}

absl::Status CheckGpus(const v1::Config& config) {
  if (config.gpu_size() > kMaxGpus) return Invalid("gpu: too many; expected at most ", kMaxGpus);
  std::set<uint32_t> devices, taken;
  for (int i = 0; i < config.gpu_size(); ++i) {
    const std::string field = Numbered("gpu", i, config.gpu_size());
    const uint32_t device = config.gpu(i).device();
    if (device > kMaxGpu) return Invalid(field, ".device: out of range; expected at most ", kMaxGpu);
    if (!devices.insert(device).second) return Invalid(field, ".device: ", device, " is given twice");
  }
  const int most = std::max(1, config.gpu_size());
  if (config.hbm_size() > most)
    return Invalid("hbm: ", config.hbm_size(), " tiers for ", config.gpu_size(),
                   " GPUs; expected at most one tier per GPU");
  for (int i = 0; i < config.hbm_size(); ++i) {
    if (!config.hbm(i).has_device()) continue;
    const uint32_t device = config.hbm(i).device();
    const std::string field = absl::StrCat(HbmField(config, i), ".device");
    if (!devices.contains(device)) return Invalid(field, ": ", device, " is not the device of any gpu entry");
    if (!taken.insert(device).second)
      return Invalid(field, ": GPU ", device, " already has an hbm tier; expected one entry per GPU");
  }
  return absl::OkStatus();
}

uint64_t LeastHbm(const v1::Config& config) {
  uint64_t least = 0;
  for (const v1::Hbm& tier : config.hbm()) {
    least = least == 0 ? tier.capacity_bytes() : std::min(least, tier.capacity_bytes());
  }
  return least;
}

}  // namespace ashlar::daemon
