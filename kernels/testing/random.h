// SPDX-License-Identifier: Apache-2.0
// Random numbers of the kernels' tests. Every run draws a new seed, which every failure prints.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace ashlar::kernels::testing {

// A fresh seed, or the number in the environment variable ASHLAR_SEED, which repeats a failed run.
uint64_t FreshSeed();

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  double Uniform(double low, double high) { return std::uniform_real_distribution<double>(low, high)(engine_); }
  double Normal() { return std::normal_distribution<double>()(engine_); }
  // Both bounds included.
  int64_t Integer(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine_); }

  std::vector<float> Normals(size_t count);
  std::vector<float> Uniforms(size_t count, double low, double high);
  // A random order of 0 … count − 1.
  std::vector<int32_t> Permutation(int32_t count);

 private:
  std::mt19937_64 engine_;
};

}  // namespace ashlar::kernels::testing
