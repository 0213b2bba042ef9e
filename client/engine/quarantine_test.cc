// SPDX-License-Identifier: Apache-2.0
#include "client/engine/quarantine.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <utility>

namespace ashlar::engine {
namespace {

TEST(Quarantine, ReleasesWhatItHoldsOnceQuiesced) {
  Quarantine quarantine;
  auto held = std::make_shared<int>();
  const std::weak_ptr<int> alive = held;
  quarantine.KeepLanding(std::nullopt, std::move(held));
  EXPECT_FALSE(alive.expired());
  quarantine.EndLandings();
  EXPECT_TRUE(alive.expired());
}

}  // namespace
}  // namespace ashlar::engine
