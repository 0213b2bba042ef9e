// SPDX-License-Identifier: Apache-2.0
// Transports that read remote memory by UCX's software, and registered memory for them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/peer/transport/transport.h"

namespace ashlar::daemon {

inline std::unique_ptr<Transport> StartReading(TransportOptions options = {}) {
  options.reads = RemoteReads::kBySoftware;
  auto started = Transport::Start(std::move(options));
  EXPECT_TRUE(started.ok()) << started.status();
  return *std::move(started);
}

template <class Condition>
void WaitFor(Condition condition) {
  while (!condition()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// Returns when the owner has the grant's memory back.
inline void RevokeNow(Transport& transport, const Grant& grant) {
  std::promise<void> quiesced;
  transport.Revoke(grant.number, [&] { quiesced.set_value(); });
  quiesced.get_future().wait();
}

// Memory in areas, and an object whose extents are anywhere in them.
struct Areas {
  static constexpr size_t kArea = 4 << 20, kExtent = 64 * 1024;

  explicit Areas(size_t count) : bytes(count, std::vector<std::byte>(kArea)) {}

  void RegisterAt(Transport& transport) {
    const uint64_t before = transport.stats().registered_bytes;
    for (auto& area : bytes) transport.Register(area.data(), area.size(), MemoryType::kHost);
    EXPECT_EQ(transport.stats().registered_bytes, before + bytes.size() * kArea);
  }
  // `ordered`: runs are longer than extents.
  Spans Object(size_t size, bool ordered, std::mt19937_64& random) {
    Spans extents;
    for (auto& area : bytes) {
      for (size_t at = 0; at < kArea; at += kExtent) extents.push_back({area.data() + at, kExtent});
    }
    if (!ordered) std::shuffle(extents.begin(), extents.end(), random);
    extents.resize((size + kExtent - 1) / kExtent);
    extents.back() = extents.back().first(size - (extents.size() - 1) * kExtent);
    return extents;
  }

  std::vector<std::vector<std::byte>> bytes;
};

}  // namespace ashlar::daemon
