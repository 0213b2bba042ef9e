// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/streams.h"

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "tools/bench/bench.h"

namespace ashlar::bench {
namespace {

constexpr size_t kLineWords = 8;  // words of a cache line, which is transferred as a whole
constexpr size_t kBlockWords = (64 << 10) / sizeof(uint64_t),
                 kWays = 4;  // words of the parts of a block that are walked in parallel
constexpr int64_t kRunsPerWorker = 8;

// No other file knows that it stays zero.
std::atomic<uint64_t> zero{0};

// Calls touch(word) for one word of every cache line of a block. Walks four pages in parallel: CPU prefetchers stop at
// the end of a page of 4 KiB, and a core does not reach its bandwidth on a single one.
template <typename Word, typename Touch>
void ForEachLine(Word* block, const Touch& touch) {
  constexpr size_t kWay = kBlockWords / kWays;
  for (size_t at = 0; at < kWay; at += kLineWords) {
    for (size_t way = 0; way < kWays; ++way) touch(block[way * kWay + at]);
  }
}

template <typename Word, typename Walk>
double Stream(Word* words, size_t bytes, kernels::Workers& workers, const Walk& walk) {
  const auto blocks = static_cast<int64_t>(bytes / sizeof(uint64_t) / kBlockWords);
  const int64_t runs = std::min<int64_t>(blocks, workers.Size() * kRunsPerWorker);
  return Seconds([&] {
    kernels::ParallelFor(workers, runs, [&](int64_t run) {
      for (int64_t b = blocks * run / runs; b < blocks * (run + 1) / runs; ++b) {
        walk(words + static_cast<size_t>(b) * kBlockWords);
      }
    });
  });
}

}  // namespace

double ReadStream(std::span<const std::byte> memory, kernels::Workers& workers) {
  return Stream(reinterpret_cast<const uint64_t*>(memory.data()), memory.size(), workers, [](const uint64_t* block) {
    uint64_t bits = 0;
    ForEachLine(block, [&](const uint64_t& word) { bits |= word; });
    zero.fetch_and(~bits, std::memory_order_relaxed);
  });
}

double UpdateStream(std::span<std::byte> memory, kernels::Workers& workers) {
  const uint64_t nothing = zero.load();
  return Stream(reinterpret_cast<uint64_t*>(memory.data()), memory.size(), workers,
                [nothing](uint64_t* block) { ForEachLine(block, [nothing](uint64_t& word) { word += nothing; }); });
}

}  // namespace ashlar::bench
