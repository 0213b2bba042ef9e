// SPDX-License-Identifier: Apache-2.0
#include "kernels/testing/random.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>

namespace ashlar::kernels::testing {

uint64_t FreshSeed() {
  if (const char* seed = std::getenv("ASHLAR_SEED")) return std::strtoull(seed, nullptr, 10);
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

std::vector<float> Random::Normals(size_t count) {
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(Normal());
  return values;
}

std::vector<float> Random::Uniforms(size_t count, double low, double high) {
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(Uniform(low, high));
  return values;
}

std::vector<int32_t> Random::Permutation(int32_t count) {
  std::vector<int32_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), engine_);
  return order;
}

}  // namespace ashlar::kernels::testing
