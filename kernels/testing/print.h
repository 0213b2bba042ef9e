// How GoogleTest shows a back end that is a test's parameter: by its name, the same in every run.
#pragma once

#include <ostream>

#include "kernels/kernels.h"

namespace ashlar::kernels {

inline void PrintTo(const Kernels* kernels, std::ostream* out) {
  *out << kernels->name();
}

}  // namespace ashlar::kernels
