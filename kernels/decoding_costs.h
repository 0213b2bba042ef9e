// SPDX-License-Identifier: Apache-2.0
// Measures the costs on this machine that decoding_choice.h chooses by.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "kernels/decoding_choice.h"
#include "kernels/kernels.h"

namespace ashlar::kernels {

struct DecodeTrial {
  LinearShape shape;  // DecodeBuffered supports its family
  DType state = DType::kF32;
  DType buffer = DType::kF16;
  std::optional<DType> rounded;  // type of the states' copies; none: no copies
  int32_t requests = 1;          // requests that decode in one call
  int32_t layers = 1;            // layers of this shape, run in turn
};

// Seconds on the clock by which work is timed; the default is a steady clock.
using DecodeClock = std::function<double()>;

// The seconds of a token of one request in one layer: means of calls, each the minimum of several rounds, because other
// work on the machine only adds time. Every layer of every request has separate states, so that they are in a cache or
// in memory as when the engine decodes. If there are many, those that fit in kTrialBytes represent all. Takes some
// tenths of a second for states in memory. A back end with memory() cannot be measured like this: choose by bytes.
inline constexpr int64_t kTrialBytes = int64_t{256} << 20;
DecodeCosts MeasureDecoding(const Kernels& kernels, Queue& queue, const DecodeTrial& trial,
                            const DecodeClock& clock = {});

}  // namespace ashlar::kernels
