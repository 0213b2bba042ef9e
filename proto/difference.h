// SPDX-License-Identifier: Apache-2.0
// FirstDifference: finds the first field in which the declarations of two engines differ. Engines with different
// declarations do not share objects.
#pragma once

#include <optional>
#include <string>

#include "proto/layout.h"

namespace ashlar {

struct Difference {
  std::string field;  // field name as Validate reports it, such as "identity.lora" or "layout.layers[3].rope.scale"
  std::string first, second;  // values of the field; enumerations as numbers
  bool operator==(const Difference&) const = default;
};

// Returns the first differing field in the order of the canonical encoding, or nothing if both are equal.
std::optional<Difference> FirstDifference(const Identity& first, const Identity& second);
std::optional<Difference> FirstDifference(const Layout& first, const Layout& second);

}  // namespace ashlar
