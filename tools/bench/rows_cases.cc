// SPDX-License-Identifier: Apache-2.0
// Landing and rotating: copies a segment's keys and values into an engine's pages.
#include <cmath>
#include <memory>
#include <vector>

#include "kernels/testing/names.h"
#include "tools/bench/kernel_cases.h"
#include "tools/bench/paged_planes.h"

namespace ashlar::bench {
namespace {

constexpr int32_t kHeads = 2, kDim = 256, kRotaryDim = 64;  // Qwen3-Next's
constexpr int64_t kStart = 20'000;                          // position at which the segment is landed
constexpr size_t kColdBytes = 400ull << 20;  // total size of the sets of inputs: more than the caches hold

struct Segment {
  int64_t tokens;
  int32_t layers;
  RowFormat format;

  double PlaneBytes() const { return static_cast<double>(tokens * kHeads) * format.RowBytes(kDim) * layers; }
  std::string Shape() const {
    return std::to_string(tokens) + " tokens, " + std::to_string(layers) + " layers, " + std::to_string(kHeads) + "x" +
           std::to_string(kDim) + format.Suffix();
  }
  size_t ColdSets(double bytes) const { return static_cast<size_t>(std::ceil(kColdBytes / bytes)); }
};

std::vector<double> Frequencies() {
  std::vector<double> frequencies(kRotaryDim / 2);
  for (size_t i = 0; i < frequencies.size(); ++i)
    frequencies[i] = std::pow(1e7, -2.0 * static_cast<double>(i) / kRotaryDim);
  return frequencies;
}

// One layer's stored keys or values, and the pages into which they land.
struct LayerPlane {
  LayerPlane(const Segment& segment, Numbers& numbers)
      : format(segment.format),
        tokens(segment.tokens),
        stored(format, tokens * kHeads, kDim, numbers),
        pages(format, tokens, kHeads, kDim, numbers),
        checksums(static_cast<size_t>(tokens / kUnitTokens)) {
    const auto row_bytes = static_cast<int64_t>(kDim * ElementBytes(format.dtype));
    for (int64_t t = 0; t < tokens; t += kUnitTokens) {
      units.push_back(stored.elements.memory.get() + t * kHeads * row_bytes);
      if (format.scaled) scales.push_back(stored.scales.data() + t * kHeads);
    }
  }

  static constexpr int32_t kUnitTokens = 16;
  RowFormat format;
  int64_t tokens;
  PlaneMemory stored;
  PagedPlane pages;
  std::vector<const void*> units;
  std::vector<const float*> scales;
  std::vector<uint64_t> checksums;
};

// Keys are rotated, values copied, and both hashed.
KernelCase LandCase(const Segment& segment) {
  const double bytes = 4 * segment.PlaneBytes();  // two planes, read and written
  KernelCase result{
      .op = "Land", .family = "gqa", .dtype = kernels::testing::Name(segment.format.dtype), .shape = segment.Shape()};
  result.bytes = bytes;
  result.prepare = [segment, bytes](const kernels::Kernels& kernels, kernels::Queue& queue) {
    auto sets = std::make_shared<std::vector<std::vector<LayerPlane>>>(segment.ColdSets(bytes));
    Numbers numbers;
    for (std::vector<LayerPlane>& planes : *sets) {
      for (int32_t i = 0; i < 2 * segment.layers; ++i) planes.emplace_back(segment, numbers);
    }
    return [=, &kernels, &queue, frequencies = Frequencies(), round = size_t{0}]() mutable {
      std::vector<LayerPlane>& planes = (*sets)[round++ % sets->size()];
      for (size_t i = 0; i < planes.size(); ++i) {
        LayerPlane& plane = planes[i];
        const bool keys = i % 2 == 0;
        kernels
            .Land({.source = {.units = plane.units.data(),
                              .scales = plane.scales.empty() ? nullptr : plane.scales.data(),
                              .unit_tokens = LayerPlane::kUnitTokens,
                              .tokens = plane.tokens,
                              .heads = kHeads,
                              .dim = kDim,
                              .dtype = plane.format.dtype},
                   .rotation = keys ? kernels::Rotation{RopeStyle::kHalfSplit, kRotaryDim, frequencies.data()}
                                    : kernels::Rotation{},
                   .delta = kStart,
                   .target = plane.pages.View(),
                   .unit_checksums = plane.checksums.data(),
                   .batch_bytes = static_cast<int64_t>(bytes / 2)},
                  queue)
            .Wait();
      }
    };
  };
  return result;
}

KernelCase RotateKeysCase(const Segment& segment) {
  const double bytes = 2 * segment.PlaneBytes();
  KernelCase result{.op = "RotateKeys", .family = "gqa", .dtype = kernels::testing::Name(segment.format.dtype)};
  result.shape = segment.Shape();
  result.bytes = bytes;
  result.prepare = [segment, bytes](const kernels::Kernels& kernels, kernels::Queue& queue) {
    const int64_t rows = segment.tokens * kHeads * segment.layers;
    auto sets = std::make_shared<std::vector<PlaneMemory>>();
    Numbers numbers;
    for (size_t i = 0; i < 2 * segment.ColdSets(bytes); ++i) sets->emplace_back(segment.format, rows, kDim, numbers);
    return [=, &kernels, &queue, frequencies = Frequencies(), round = size_t{0}]() mutable {
      PlaneMemory& source = (*sets)[round++ % sets->size()];
      PlaneMemory& target = (*sets)[round++ % sets->size()];
      kernels
          .RotateKeys({.rotation = {RopeStyle::kHalfSplit, kRotaryDim, frequencies.data()},
                       .delta = kStart,
                       .rows = rows,
                       .dim = kDim,
                       .dtype = segment.format.dtype,
                       .source = source.elements.memory.get(),
                       .target = target.elements.memory.get(),
                       .source_scales = segment.format.scaled ? source.scales.data() : nullptr,
                       .target_scales = segment.format.scaled ? target.scales.data() : nullptr},
                      queue)
          .Wait();
    };
  };
  return result;
}

}  // namespace

std::vector<KernelCase> RowsCases(bool quick) {
  std::vector<KernelCase> cases;
  for (const RowFormat format : kFormats) {
    const Segment segment{.tokens = quick ? 64 : 1024, .layers = quick ? 2 : 12, .format = format};
    cases.push_back(LandCase(segment));
    cases.push_back(RotateKeysCase(segment));
  }
  return cases;
}

}  // namespace ashlar::bench
