// SPDX-License-Identifier: Apache-2.0
// The common fixture of the tests of linear layers.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "kernels/testing/linear_inputs.h"
#include "kernels/testing/print.h"

namespace ashlar::kernels::testing {

// One back end, one family, one order.
class LinearFixture : public ::testing::TestWithParam<std::tuple<Backend, Family, StateOrder>> {
 protected:
  const Kernels& kernels() const { return *std::get<0>(GetParam()).kernels; }
  Layer Draw(int32_t largest_dim, Character character) {
    return RandomLayer(random_, family_, order_, largest_dim, character);
  }
  // With these heads and dimensions.
  Layer Draw(LinearShape shape, Character character) {
    shape.family = family_;
    shape.order = order_;
    return Layer(random_, shape, character);
  }

  const Family family_ = std::get<1>(GetParam());
  const StateOrder order_ = std::get<2>(GetParam());
  const uint64_t seed_ = FreshSeed();
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, "ASHLAR_SEED=" + std::to_string(seed_)};
  Random random_{seed_};
  Runner runner_{std::get<0>(GetParam())};
  Runner reference_{Reference()};
};

inline std::string NameOf(const ::testing::TestParamInfo<std::tuple<Backend, Family, StateOrder>>& instance) {
  return ::testing::PrintToString(std::get<0>(instance.param)) + "_" + Name(std::get<1>(instance.param)) + "_" +
         Name(std::get<2>(instance.param));
}

inline constexpr bool kErasing = true, kNotErasing = false;
inline std::vector<Family> FamiliesThat(bool erase) {
  std::vector<Family> families;
  for (const Family family : kFamilies) {
    if (Erases(family) == erase) families.push_back(family);
  }
  return families;
}

template <typename Families = decltype(kFamilies)>
auto OverFamilies(const std::vector<Backend>& backends, const Families& families = kFamilies) {
  return ::testing::Combine(::testing::ValuesIn(backends), ::testing::ValuesIn(families),
                            ::testing::Values(StateOrder::kKeyFirst, StateOrder::kValueFirst));
}

}  // namespace ashlar::kernels::testing
