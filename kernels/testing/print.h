// SPDX-License-Identifier: Apache-2.0
// Printers that show a GoogleTest parameter by its name, the same in every run.
#pragma once

#include <ostream>

#include "kernels/kernels.h"
#include "kernels/testing/names.h"

namespace ashlar::kernels {

inline void PrintTo(const Kernels* kernels, std::ostream* out) {
  *out << kernels->name();
}

}  // namespace ashlar::kernels

namespace ashlar {

inline void PrintTo(Family family, std::ostream* out) {
  *out << kernels::testing::Name(family);
}
inline void PrintTo(StateOrder order, std::ostream* out) {
  *out << kernels::testing::Name(order);
}

}  // namespace ashlar
