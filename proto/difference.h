// SPDX-License-Identifier: Apache-2.0
// FirstDifference: the field in which two engines' declarations differ, so that neither finds what the other published.
#pragma once

#include <optional>
#include <string>

#include "proto/layout.h"

namespace ashlar {

struct Difference {
  std::string field;          // as Validate names it: "identity.lora", "layout.layers[3].rope.scale"
  std::string first, second;  // its values; enumerations as their numbers
  bool operator==(const Difference&) const = default;
};

// The first field that differs, in the order of the canonical encoding; none where the two are the same.
std::optional<Difference> FirstDifference(const Identity& first, const Identity& second);
std::optional<Difference> FirstDifference(const Layout& first, const Layout& second);

}  // namespace ashlar
