// SPDX-License-Identifier: Apache-2.0
// The common part of fuzz targets. A target is one function over bytes; libFuzzer or replay.cc calls it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

[[noreturn]] inline void FuzzFailed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "%s:%d: does not hold: %s\n", file, line, condition);
  std::abort();
}

// Ends the program, so that a fuzzer keeps the input, where a property does not hold.
#define FUZZ_EXPECT(condition) ((condition) ? void() : FuzzFailed(#condition, __FILE__, __LINE__))
