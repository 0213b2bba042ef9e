// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/nodes/engines.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/tokens.h"

namespace ashlar::simulation::nodes {
namespace {

constexpr uint64_t kFirstPosition = 5;
constexpr double kTolerance = 1e-5;
constexpr double kTokensPerSecond = 500;
// Limits of an engine's waits. A lookup's own deadline is 100 ms; a landing may wait for pieces that several holders
// delay for 20 s each. kHealed: how long after the last fault a holder may still count as unreachable: until it has
// reconnected, one call has ended and another was answered.
constexpr Nanos kHealed = 4 * kSecond;
constexpr Nanos kLookupWait = 400 * kMillisecond, kLandingWait = 120 * kSecond, kPlanWait = 120 * kSecond;

storage::Query Ask(const Text& text) {
  const ObjectHeader& plan = Plans().at(text);
  return {.kind = plan.kind, .key = plan.key, .shard = plan.shard, .ns = plan.ns, .tokens = plan.tokens};
}

bool IsBundle(const Text& text) {
  return Plans().at(text).shard.size > 1;
}

}  // namespace

void Engines::NextOperation() {
  if (!cluster_.has_engines) return;
  schedule_.After(schedule_.DrawTime(habits_.op_every), [this] { NextOperation(); });
  const std::optional<size_t> machine = AnyRunning();
  if (!machine.has_value()) return;
  const auto tenant = static_cast<TenantId>(1 + Draw(kTenants));
  const uint64_t choice = Draw(100);
  schedule_.Trace(choice);
  if (choice < 30) return Publish(*machine, AnyText(tenant), [](bool) {});
  if (choice < 34) return Evict(*machine);
  if (choice < 42 && habits_.prefills) return Plan(*machine);
  std::vector<Text> texts;
  for (uint64_t n = 1 + Draw(3); n > 0; --n) texts.push_back(AnyText(tenant));
  LookUp(*machine, tenant, std::move(texts), /*must_hit=*/false);
}

void Engines::LookUp(size_t machine, TenantId tenant, std::vector<Text> texts, bool must_hit) {
  const uint64_t number = ++drawn_;
  Prompt& prompt = prompts_[number];
  prompt.machine = machine;
  prompt.tenant = tenant;
  prompt.texts = std::move(texts);
  for (const Text& text : prompt.texts) prompt.queries.push_back(Ask(text));
  prompt.ends_by = schedule_.now() + kLookupWait;
  prompt.stage = "a lookup on other nodes";
  prompt.must_hit = must_hit;
  const daemon::RemoteQuestion question{prompt.queries};
  At(machine)->peers.lookup().Find(
      tenant, {&question, 1}, [this, number](const daemon::RemoteLookup::Adopted& adopted) { Found(number, adopted); });
  At(machine)->Pump();
}

void Engines::Found(uint64_t number, const daemon::RemoteLookup::Adopted& adopted) {
  const auto found = prompts_.find(number);
  if (found == prompts_.end()) return;  // the node is ending
  Prompt& prompt = found->second;
  prompt.stage = "a lookup";
  Node& node = *At(prompt.machine);
  node.held[number] = adopted;
  if (adopted != nullptr) adopted->Mark(prompt.queries);
  node.Post(prompt.tenant, [this, number] { LookHere(number); });
}

void Engines::LookHere(uint64_t number) {
  const auto found = prompts_.find(number);
  if (found == prompts_.end()) return;
  Prompt& prompt = found->second;
  Node& node = *At(prompt.machine);
  const storage::Match match = node.cache->Lookup(prompt.tenant, prompt.queries);
  node.held.erase(number);
  prompt.lease = match.lease;
  uint64_t position = kFirstPosition;
  for (size_t i = 0; i < prompt.texts.size(); ++i) {
    const Text& text = prompt.texts[i];
    const storage::Found& each = match.found[i];
    schedule_.Trace(static_cast<uint64_t>(each.reason));
    if (each.reason != MissReason::kNone) {
      CheckReason(prompt, text, each.reason);
      continue;
    }
    if (!published_.contains(text)) Fail("found what its tenant never published");
    if (!IsOf(*each.header, text)) Fail("found another text's object");
    if (each.slot->tenant != prompt.tenant) Fail("found in another tenant's memory");
    prompt.found.push_back(i);
    prompt.tiers.push_back(each.tier);
    prompt.positions.push_back(position);
    position += Plans().at(text).tokens;
  }
  if (prompt.lease == storage::LeaseId{}) {
    prompts_.erase(found);
    return;
  }
  prompt.pages = std::make_unique<storage::TestPages>(storage::TestPages::Holding(position));
  prompt.ends_by = schedule_.now() + kLandingWait;
  prompt.stage = "a landing";
  const Nanos later = schedule_.Chance(70) ? 0 : schedule_.DrawTime(kSecond);
  schedule_.For(node.life(), later, [this, number] {
    const auto still = prompts_.find(number);
    if (still == prompts_.end()) return;
    At(still->second.machine)->Post(still->second.tenant, [this, number] { Land(number); });
  });
}

void Engines::Land(uint64_t number) {
  const auto found = prompts_.find(number);
  if (found == prompts_.end()) return;
  Prompt& prompt = found->second;
  std::vector<storage::LandTarget::Segment> segments;
  for (size_t i = 0; i < prompt.found.size(); ++i) {
    segments.push_back({static_cast<uint32_t>(prompt.found[i]), prompt.positions[i]});
  }
  At(prompt.machine)
      ->cache->Land(prompt.tenant, number, prompt.lease, storage::TestTarget(*prompt.pages, std::move(segments)),
                    {.progress = [](uint32_t) {},
                     .done = [this, number](const std::vector<MissReason>& verdict) { Landed(number, verdict); }});
}

void Engines::Landed(uint64_t number, const std::vector<MissReason>& verdict) {
  const auto found = prompts_.find(number);
  if (found == prompts_.end()) return;
  Prompt& prompt = found->second;
  Node& node = *At(prompt.machine);
  const absl::StatusOr<storage::Match> held = node.cache->Held(prompt.tenant, prompt.lease);
  if (!held.ok()) return Fail("a lease is gone that no session ended");
  if (verdict.size() != prompt.found.size()) return Fail("a verdict of another number of segments");
  for (size_t i = 0; i < verdict.size(); ++i) {
    const Text& text = prompt.texts[prompt.found[i]];
    schedule_.Trace(static_cast<uint64_t>(verdict[i]));
    if (verdict[i] != MissReason::kNone) {
      CheckReason(prompt, text, verdict[i]);
      continue;
    }
    Reach(prompt.tiers[i] == TierKind::kRemote ? Event::kLandedRemote : Event::kLandedHere);
    if (IsBundle(text)) Reach(Event::kLandedBundle);
    Text bytes = text;
    if (bug_ == Bug::kFlipsLandedBits) prompt.pages->Key(0, prompt.positions[i] + 4, 0)[0] += 1;
    if (bug_ == Bug::kCrossesTenants) bytes.first = 1 + kTenants - text.first;
    const ObjectHeader& plan = Plans().at(text);
    const double rows = storage::LandingError(*prompt.pages, plan, ContentOf(bytes), prompt.positions[i]);
    if (!(rows < kTolerance)) Fail(absl::StrCat("bytes landed are not the bytes published: text ", text.second));
    const storage::Found& object = held->found[prompt.found[i]];
    if (object.reason != MissReason::kNone || object.slot == nullptr) continue;
    if (storage::TupleError(node.tier, *object.slot, *object.header, ContentOf(bytes)) != 0) {
      Fail(absl::StrCat("tuples read in place are not those published: text ", text.second));
    }
  }
  node.Post(prompt.tenant, [this, number] { LetGo(number); });
}

void Engines::LetGo(uint64_t number) {
  const auto found = prompts_.find(number);
  if (found == prompts_.end()) return;
  At(found->second.machine)->cache->Release(found->second.tenant, found->second.lease);
  prompts_.erase(found);
}

void Engines::CheckReason(const Prompt& prompt, const Text& text, MissReason reason) {
  switch (reason) {
    case MissReason::kPeerFailed:
      Reach(Event::kMissedPeerFailed);
      break;
    case MissReason::kChecksumFailed:
      Reach(Event::kMissedChecksum);
      if (fabric_.flipped == 0) Fail("a copy is corrupt, and nothing corrupted it");
      break;
    case MissReason::kDaemonUnavailable:
      if (!machines_[prompt.machine].stops) Fail("a node that does not stop is unavailable");
      break;
    case MissReason::kHolderUnreachable:
      if (schedule_.now() - cluster_.disturbed_at > habits_.lease_seconds * kSecond + kHealed) {
        Fail("a node is shunned, and nothing is in its way");
      }
      break;
    case MissReason::kNeverSeen:
    case MissReason::kBeingPublished:
    case MissReason::kAbandoned:
    case MissReason::kEvicted:
    case MissReason::kBudgetRefused:
    case MissReason::kTierError:
    case MissReason::kBusy:
      break;
    default:
      Fail(absl::StrCat("missed for a reason that there was not: ", absl::string_view(Name(reason))));
  }
  if (prompt.must_hit) {
    Node& node = *At(prompt.machine);
    const storage::TierUsage usage = node.tier.Usage(prompt.tenant);
    const storage::Cache::Stats cache = node.cache->stats();
    std::string here;
    for (const auto& [each, plan] : Plans()) {
      if (each.first != prompt.tenant || !node.cache->adoption().Knows(each.first, plan.key)) continue;
      absl::StrAppend(&here, " ", each.second, ":", plan.Extents(),
                      node.cache->upkeep().inventory().Where(each.first, plan.key, plan.shard).empty() ? "?" : "");
    }
    Say(absl::StrCat("of ", usage.capacity_bytes / limits::kExtentBytes, " extents ",
                     usage.used_bytes / limits::kExtentBytes, " are used; leases ", cache.leases, ", objects ",
                     cache.objects, ", copies under way ", cache.copies_under_way, ", leases of peers ",
                     node.peers.stats().holder.leases, ", remote copies ", node.peers.stats().objects.copies, ";",
                     here));
    Fail(absl::StrCat("node ", prompt.machine, " misses text ", text.second, " of tenant ", text.first,
                      ", which another node holds: ", absl::string_view(Name(reason))));
  }
}

void Engines::Publish(size_t machine, const Text& text, std::function<void(bool)> done) {
  At(machine)->Post(text.first,
                    [this, machine, text, done = std::move(done)] { PublishParts(machine, BundleOf(text), done); });
}

// One shard after another, like the ranks of an engine.
void Engines::PublishParts(size_t machine, std::vector<Text> parts, const std::function<void(bool)>& done) {
  if (At(machine) == nullptr) return;  // the node is ending
  if (parts.empty()) return done(true);
  Node& node = *At(machine);
  const Text text = parts.back();
  parts.pop_back();
  node.router->YieldSpace(text.first, Plans().at(text).key);
  const storage::Cache::Reservation reservation = node.cache->Reserve(text.first, Plans().at(text));
  schedule_.Trace(static_cast<uint64_t>(reservation.outcome));
  if (reservation.outcome == ReserveOutcome::kAlreadyPresent) return PublishParts(machine, std::move(parts), done);
  if (reservation.outcome != ReserveOutcome::kGranted) return done(false);
  Text bytes = text;
  if (bug_ == Bug::kPublishesOtherText && schedule_.Chance(10)) bytes.first = 1 + kTenants - text.first;
  published_.insert(text);
  node.cache->Publish(text.first, reservation.id, SourceOf(bytes, publishes_++),
                      [this, machine, text, parts, done](PublishOutcome outcome) {
                        schedule_.Trace(static_cast<uint64_t>(outcome));
                        const bool ends = At(machine) == nullptr || At(machine)->life()->ended;
                        if (ends) return;
                        if (outcome != PublishOutcome::kPublished && outcome != PublishOutcome::kBusy) {
                          Fail(absl::StrCat("a publish failed: ", absl::string_view(Name(outcome))));
                        }
                        if (outcome != PublishOutcome::kPublished) return done(false);
                        PublishParts(machine, parts, done);
                      });
}

void Engines::Evict(size_t machine) {
  const Text text = AnyText(static_cast<TenantId>(1 + Draw(kTenants)));
  At(machine)->Post(text.first, [this, machine, text] {
    if (At(machine) == nullptr) return;
    Node& node = *At(machine);
    evicted_.insert(text);
    const bool there = node.cache->retention().Evict(text.first, Plans().at(text).key);
    if (there && node.peers.stats().holder.leases > 0) Reach(Event::kEvictedUnderFetch);
  });
}

// Requests a plan for some cold segments, and waits until they arrive.
void Engines::Plan(size_t machine) {
  const auto tenant = static_cast<TenantId>(1 + Draw(kTenants));
  std::vector<Text> texts;
  for (uint64_t text = 1; text <= kTexts; ++text) {
    if (!IsBundle({tenant, text}) && schedule_.Chance(40)) texts.emplace_back(tenant, text);
  }
  if (texts.empty()) return;
  const uint64_t number = ++drawn_;
  plans_[number] = {.machine = machine, .tenant = tenant, .texts = texts, .ends_by = schedule_.now() + kPlanWait};
  At(machine)->Post(tenant, [this, machine, tenant, texts, number] {
    if (!plans_.contains(number)) return;
    std::vector<daemon::ColdSegment> cold;
    for (const Text& text : texts) {
      const ObjectHeader& plan = Plans().at(text);
      const int32_t id[] = {static_cast<int32_t>(text.second), static_cast<int32_t>(plan.tokens)};
      cold.push_back({.work = {.tenant = tenant,
                               .ns = plan.ns,
                               .key = plan.key,
                               .kind = plan.kind,
                               .tokens = plan.tokens,
                               .packed = std::make_shared<const std::string>(PackTokens(id))},
                      .shard = plan.shard,
                      .bytes = plan.bytes});
    }
    At(machine)->router->Plan(
        {.session = tenant, .tenant = tenant, .tokens_per_second = kTokensPerSecond}, std::move(cold),
        [this, number](const absl::StatusOr<daemon::Router::Planned>& planned) {
          const auto plan = plans_.find(number);
          if (plan == plans_.end()) return;
          if (!planned.ok() && !absl::IsResourceExhausted(planned.status())) Fail("a plan failed");
          if (!planned.ok() || planned->plan == 0) {
            plans_.erase(plan);
            return;
          }
          plan->second.plan = planned->plan;
          At(plan->second.machine)->Post(plan->second.tenant, [this, number] { AwaitPlan(number); });
        });
  });
}

void Engines::AwaitPlan(uint64_t number) {
  const auto found = plans_.find(number);
  if (found == plans_.end()) return;
  const Prefill& prefill = found->second;
  At(prefill.machine)
      ->router->Await(prefill.tenant, prefill.plan, 2 * kSecond,
                      [this, number](const absl::StatusOr<daemon::Router::States>& states) {
                        const auto plan = plans_.find(number);
                        if (plan == plans_.end()) return;
                        if (!states.ok()) return Fail("a plan is gone that no engine ended");
                        Node& node = *At(plan->second.machine);
                        node.Post(plan->second.tenant, [this, number, states = *states] { Planned(number, states); });
                      });
}

void Engines::Planned(uint64_t number, const daemon::Router::States& states) {
  const auto found = plans_.find(number);
  if (found == plans_.end()) return;
  if (std::ranges::count(states, daemon::PlannedSegmentState::kPending) > 0) return AwaitPlan(number);
  const Prefill prefill = found->second;
  Node& node = *At(prefill.machine);
  for (size_t i = 0; i < states.size(); ++i) {
    const Text& text = prefill.texts[i];
    if (states[i] != daemon::PlannedSegmentState::kPresent || evicted_.contains(text) ||
        machines_[prefill.machine].stops)
      continue;
    const storage::Query query = Ask(text);
    const storage::Match match = node.cache->Lookup(prefill.tenant, {&query, 1});
    const MissReason reason = match.found[0].reason;
    const bool damaged = reason == MissReason::kChecksumFailed && fabric_.flipped > 0;
    if (reason != MissReason::kNone && !damaged) {
      Fail(absl::StrCat("a planned segment is not where the plan says: node ", prefill.machine, ", text ", text.second,
                        ": ", absl::string_view(Name(reason))));
    }
    node.cache->Release(prefill.tenant, match.lease);
  }
  node.router->End(prefill.tenant, prefill.plan);
  plans_.erase(number);
}

void Engines::Started(Node& node) {
  if (!habits_.prefills) return;
  for (const storage::SessionId session : {3, 4}) {
    node.Post(Node::TenantOf(session),
              [this, machine = node.machine(), session] { OfferPrefill(machine, session, 0, false); });
  }
}

// Drops the calls of a node that has ended.
void Engines::Ended(size_t machine) {
  std::erase_if(prompts_, [&](const auto& prompt) { return prompt.second.machine == machine; });
  std::erase_if(plans_, [&](const auto& plan) { return plan.second.machine == machine; });
}

// Extends the deadlines of the calls of a node that stands still.
void Engines::StandStill(size_t machine, Nanos still) {
  for (auto& [number, prompt] : prompts_) {
    if (prompt.machine == machine) prompt.ends_by += still;
  }
  for (auto& [number, plan] : plans_) {
    if (plan.machine == machine) plan.ends_by += still;
  }
}

// A worker requests work, computes it, and asks again with the result.
void Engines::OfferPrefill(size_t machine, storage::SessionId session, uint64_t assignment, bool published) {
  if (At(machine) == nullptr) return;
  const TenantId tenant = Node::TenantOf(session);
  const daemon::PrefillWorkers::Result result{.assignment = assignment, .published = published};
  std::vector<daemon::PrefillWorkers::Result> results;
  if (assignment != 0) results.push_back(result);
  At(machine)->router->workers().Serve(
      {.session = session,
       .model = 1,
       .tenant = tenant,
       .ns = Plans().at({tenant, 1}).ns,
       .tokens_per_second = kTokensPerSecond},
      results, 2 * kSecond, [this, machine, session](const absl::StatusOr<daemon::PrefillWorkers::Given>& given) {
        Node* const node = At(machine);
        if (node == nullptr || node->life()->ended || !given.ok() || !cluster_.has_engines) return;
        if (given->assignment != 0) return Compute(machine, session, *given);
        node->Post(Node::TenantOf(session), [this, machine, session] { OfferPrefill(machine, session, 0, false); });
      });
}

void Engines::Compute(size_t machine, storage::SessionId session, const daemon::PrefillWorkers::Given& given) {
  const auto text = std::ranges::find_if(
      Plans(), [&](const auto& each) { return each.second.key == given.work.key && each.second.ns == given.work.ns; });
  if (text == Plans().end()) return Fail("a worker is given another tenant's work");
  Node& node = *At(machine);
  // Sometimes it takes far too long.
  const auto takes = static_cast<Nanos>(static_cast<double>(given.work.tokens) / kTokensPerSecond * 1e9);
  const Nanos stalls = cluster_.has_faults && schedule_.Chance(10) ? 10 * kSecond : 0;
  schedule_.For(node.life(), takes + stalls,
                [this, machine, session, text = text->first, assignment = given.assignment] {
                  Publish(machine, text, [this, machine, session, assignment](bool published) {
                    At(machine)->Post(Node::TenantOf(session), [this, machine, session, assignment, published] {
                      OfferPrefill(machine, session, assignment, published);
                    });
                  });
                });
}

}  // namespace ashlar::simulation::nodes
