// SPDX-License-Identifier: Apache-2.0
// The selection of vector widths that are compiled. Every file that is compiled for each width includes this before
// hwy/foreach_target.h.
//
// CPUs older than AVX2 use the portable version; vectors without a fixed size have no arrays in registers. Every
// remaining width is tested (targets_test.cc and its neighbours).
#pragma once

#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
