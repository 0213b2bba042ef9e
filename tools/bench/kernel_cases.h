// SPDX-License-Identifier: Apache-2.0
// KernelCase: the operations of kernels/ that `ashlar-bench kernels` times, a table with a file for each subject.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace ashlar::bench {

// One operation on one shape.
struct KernelCase {
  std::string op;  // name in kernels.h
  std::string family;
  std::string dtype;
  std::string shape;  // label with the sizes, such as "n 16, heads 1152, 128x128"
  double bytes = 0;   // bytes to read and write, each once
  double flops = 0;   // a multiplication and an addition count two
  // Creates inputs and returns the timed function; inputs live as long as it. A case whose memory fits in the caches
  // should rotate through several sets of inputs.
  std::function<std::function<void()>(const kernels::Kernels&, kernels::Queue&)> prepare;
};

// `quick`: smaller shapes, to check that everything runs; their ratios mean nothing.
std::vector<KernelCase> LinearCases(bool quick);
std::vector<KernelCase> RowsCases(bool quick);
std::vector<KernelCase> AttentionCases(bool quick);
std::vector<KernelCase> DecodingCases(bool quick);

// Multiply-adds in registers for `span` seconds: the floating-point limit of this machine, in operations per second.
double MeasureFmaPeak(double span, kernels::Workers& workers);

}  // namespace ashlar::bench
