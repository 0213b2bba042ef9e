// The operations of kernels/ as `ashlar-bench kernels` times them: a table, of which each subject has a file.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace ashlar::bench {

// One operation on one shape.
struct KernelCase {
  std::string op;  // as named in kernels.h
  std::string family;
  std::string dtype;
  std::string shape;  // for people: the sizes that matter, "n 16, heads 1152, 128x128"
  double bytes = 0;   // that must be read and written, each once
  double flops = 0;   // a multiplication and an addition count two
  // Makes inputs and returns what is timed; inputs live as long as it. Whoever has less memory to move than the caches
  // hold should take turns through several sets of it.
  std::function<std::function<void()>(const kernels::Kernels&, kernels::Queue&)> prepare;
};

// `quick`: smaller shapes, to see that everything runs; their ratios say nothing.
std::vector<KernelCase> LinearCases(bool quick);
std::vector<KernelCase> RowsCases(bool quick);
std::vector<KernelCase> AttentionCases(bool quick);
std::vector<KernelCase> DecodingCases(bool quick);

// Multiply-adds in registers for `span` seconds: the floating-point limit of this machine, in operations per second.
double MeasureFmaPeak(double span, kernels::Workers& workers);

}  // namespace ashlar::bench
