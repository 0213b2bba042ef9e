// SPDX-License-Identifier: Apache-2.0
// Context: what all parts of a driver share: the world, its random draws, and the report.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <string>
#include <utility>

#include "storage/cache.h"
#include "storage/slice.h"
#include "tests/simulation/simulation.h"
#include "tests/simulation/texts.h"
#include "tests/simulation/world.h"

namespace ashlar::simulation {

using storage::Cache;
using storage::Nanos;
using storage::SessionId;

inline constexpr int kSessions = 4;
inline constexpr uint64_t kConversations = 3;
inline constexpr Nanos kDeadline = 60'000'000'000;
inline constexpr double kTolerance = 1e-5;

inline TenantId TenantOf(SessionId session) {
  return 1 + session % 2;
}
// Returns whether the session's engine rebuilds states from spans.
inline bool Rebuilds(SessionId session) {
  return session % 3 != 0;
}

// Features that some seeds leave out, so that the others occur more often.
struct Features {
  bool prompts = false, compositions = false, pages = false, slices = false;
};

struct Context {
  Context(uint64_t seed, const Sizes& sizes, Bug bug) : world(seed, sizes, bug) {}

  World world;
  Report report;
  Features features;
};

// Base of the driver's parts: gives them short names for the context.
class DriverPart {
 protected:
  explicit DriverPart(Context& context) : world_(context.world), report_(context.report), features_(context.features) {}

  void Fail(const std::string& what) {
    if (report_.failure.empty()) report_.failure = what;
  }
  void Trace(uint64_t value) { report_.trace = (report_.trace ^ value) * 0x100000001B3; }
  void Reach(Event event) { ++report_.reached.counts[static_cast<size_t>(event)]; }

  Cache& cache() { return *world_.cache; }
  uint64_t Draw(uint64_t below) { return world_.Draw(below); }
  template <typename Container>
  auto Any(Container& container) {
    return std::next(container.begin(), static_cast<ptrdiff_t>(Draw(container.size())));
  }
  // Draws the time to compute a text, as declared by its engine; usually none.
  Nanos AnyRecompute() { return Draw(4) == 0 ? 1 + static_cast<Nanos>(Draw(kDeadline / 6)) : 0; }
  // Draws the time at which a lookup's texts are needed; usually now.
  Nanos AnyNeed() { return Draw(4) == 0 ? world_.clock.Now() + static_cast<Nanos>(Draw(kDeadline)) : 0; }
  Text AnyText(TenantId tenant) { return {tenant, 1 + Draw(kTexts)}; }
  ConversationId AnyConversation() {
    return Draw(2) == 0 ? ConversationId{static_cast<uint8_t>(1 + Draw(kConversations))} : ConversationId{};
  }
  // All of a call, or a few steps of one that can wait if `resume` is not empty.
  storage::Slice AnySlice(std::function<void()> resume = nullptr) {
    return features_.slices && Draw(2) == 0 ? storage::Slice(1 + Draw(4), std::move(resume)) : storage::Slice();
  }

  World& world_;
  Report& report_;
  const Features& features_;
};

}  // namespace ashlar::simulation
