// SPDX-License-Identifier: Apache-2.0
// Measuring on this machine what decoding_choice.h chooses by.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "kernels/decoding_choice.h"
#include "kernels/kernels.h"

namespace ashlar::kernels {

struct DecodeTrial {
  LinearShape shape;  // of a family that DecodeBuffered supports
  DType state = DType::kF32;
  DType buffer = DType::kF16;
  std::optional<DType> rounded;  // type of the states' copies; none: no copies
  int32_t requests = 1;          // requests that decode in one call
  int32_t layers = 1;            // layers of this shape, run in turn
};

// Seconds on the clock by which work is timed; the default is a steady clock.
using DecodeClock = std::function<double()>;

// The seconds of a token of one request in one layer: means of calls, each the least of several rounds, since other
// work on the machine only adds. Every layer of every request has states of its own, so that they lie where they will
// lie when the engine decodes: in a cache or in memory. Of many, as many as take kTrialBytes stand for all. Takes some
// tenths of a second for states that lie in memory. Of a back end with memory() nothing can be measured so: choose by
// bytes.
inline constexpr int64_t kTrialBytes = int64_t{256} << 20;
DecodeCosts MeasureDecoding(const Kernels& kernels, Queue& queue, const DecodeTrial& trial,
                            const DecodeClock& clock = {});

}  // namespace ashlar::kernels
