// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/composition_actions.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "proto/limits.h"

namespace ashlar::simulation {
namespace {

constexpr uint32_t kLayers[] = {storage::kTestLinearLayers[0], storage::kTestLinearLayers[2]};
constexpr size_t kMostInteriors = 2;
constexpr double kOfTheLargest = 1e-5;  // largest difference

double Largest(const std::vector<float>& numbers) {
  double largest = 0;
  for (const float number : numbers) largest = std::max<double>(largest, std::abs(number));
  return largest;
}

bool IsAlmost(const std::vector<float>& found, const std::vector<float>& expected) {
  const double tolerance = kOfTheLargest * Largest(expected);
  return std::ranges::equal(found, expected, [&](float a, float b) { return std::abs(double{a} - b) <= tolerance; });
}

}  // namespace

void CompositionActions::Compose() {
  if (clients_.leases.empty()) return;
  const Lease& lease = *Any(clients_.leases);
  const absl::StatusOr<Match> held = cache().Held(lease.session, lease.id);
  if (!held.ok()) return Fail("a lease is gone that no session ended");
  Composing composing{.session = lease.session, .layer = kLayers[Draw(std::size(kLayers))]};
  storage::Composition work;
  for (uint64_t n = Draw(4) == 0 ? 1 : kMostInteriors; n > 0 && !lease.texts.empty(); --n) {
    const Text text = *Any(lease.texts);
    const auto found = std::ranges::find_if(
        held->found, [&](const Found& each) { return each.header != nullptr && IsOf(*each.header, text); });
    if (found == held->found.end()) continue;  // dropped since
    work.interiors.push_back({.segment = static_cast<uint32_t>(found - held->found.begin())});
    composing.texts.push_back(text);
  }
  if (work.interiors.empty()) return;
  if (world_.bug == Bug::kComposesInAnotherOrder) std::ranges::reverse(work.interiors);
  composing.state = std::make_shared<std::vector<float>>(StateBefore());
  work.layers.push_back({.layer = composing.layer,
                         .shape = storage::TestShape(),
                         .state = {.data = reinterpret_cast<std::byte*>(composing.state->data())}});
  work.keep = composing.state;
  clients_.Use(lease.id, true);
  const LandingId number = clients_.next_landing++;
  const SessionId session = lease.session;
  const LeaseId id = lease.id;
  clients_.compositions.emplace(number, std::move(composing));
  cache().Compose(session, number, id, std::move(work),
                  [this, number](const storage::CompositionVerdict& verdict) { Composed(number, verdict); });
}

void CompositionActions::Composed(LandingId number, const storage::CompositionVerdict& verdict) {
  const auto found = clients_.compositions.find(number);
  if (found == clients_.compositions.end()) return Fail("a composition was answered twice");
  const Composing composing = std::move(found->second);
  clients_.compositions.erase(found);
  Trace(static_cast<uint64_t>(verdict.outcome));
  if (verdict.outcome == MissReason::kNone) {
    Reach(Event::kComposed);
    if (!IsAlmost(*composing.state, StateAfter(composing.layer, composing.texts))) {
      Fail("a state is not what its interiors make of it");
    }
    return;
  }
  if (verdict.outcome == MissReason::kCancelled) {
    if (!composing.cancelled) Fail("a composition ended as cancelled without Cancel");
    return;
  }
  if (world_.bug == Bug::kWritesRefusedStates) (*composing.state)[0] += 1;
  if (*composing.state != StateBefore()) Fail("a state was written, and an interior could not be had");
  if (verdict.outcome == MissReason::kBusy) {
    if (oracle_.MayBegin(TenantOf(composing.session)) && clients_.compositions.size() < limits::kMaxCompositions) {
      Fail("a composition was refused, and there was space for it");
    }
    return;
  }
  Reach(Event::kNotComposed);
  for (size_t i = 0; i < verdict.interiors.size(); ++i) {
    if (verdict.interiors[i] != MissReason::kNone) oracle_.CheckMiss(composing.texts[i], verdict.interiors[i]);
  }
}

}  // namespace ashlar::simulation
