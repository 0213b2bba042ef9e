// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/nodes/oracle.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/peer/directory/directory_keys.h"

namespace ashlar::simulation::nodes {

// Every wait ends by its deadline.
void Oracle::Watch() {
  schedule_.After(100 * kMillisecond, [this] { Watch(); });
  if (faults_.Disturbed()) cluster_.disturbed_at = schedule_.now();
  const auto late = [&](const auto& one) {
    const Node* const node = At(one.machine);
    return node != nullptr && node->life()->frozen_until <= schedule_.now() && one.ends_by < schedule_.now();
  };
  for (const auto& [number, prompt] : engines_.prompts()) {
    if (late(prompt)) Fail(absl::StrCat("node ", prompt.machine, " waits beyond a deadline for ", prompt.stage));
  }
  for (const auto& [number, plan] : engines_.plans()) {
    if (late(plan)) Fail(absl::StrCat("node ", plan.machine, " waits beyond a deadline for a plan"));
  }
  if (!calls_.wrong.empty()) Fail(calls_.wrong);
}

// Every node knows exactly the members and what they hold.
void Oracle::CheckConverged() {
  std::set<uint64_t> running;
  for (const size_t machine : Running()) running.insert(machines_[machine].incarnation);
  for (const size_t machine : Running()) {
    std::set<uint64_t> known;
    for (const auto& member : At(machine)->directory->Members()) known.insert(member->incarnation);
    if (known != running) {
      return Fail(absl::StrCat("node ", machine, " knows ", known.size(), " members of ", running.size()));
    }
    const daemon::DirectoryHealth health = At(machine)->directory->Health();
    if (!health.connected || !health.reason.empty()) {
      return Fail(absl::StrCat("node ", machine, "'s directory is ill: ", health.reason));
    }
    if (At(machine)->calls.connected() + 1 != running.size()) {
      return Fail(absl::StrCat("node ", machine, " is not connected with all others"));
    }
  }
  CheckMirrors();
}

void Oracle::CheckMirrors() {
  using Holder = std::pair<uint64_t, uint32_t>;  // an incarnation, and a shard's rank
  for (const auto& [text, plan] : Plans()) {
    if (plan.shard.rank > 0) continue;
    std::set<Holder> holders;
    for (const size_t machine : Running()) {
      for (const Text& part : BundleOf(text)) {
        const TensorShard& shard = Plans().at(part).shard;
        if (!At(machine)->cache->upkeep().inventory().Where(text.first, plan.key, shard).empty()) {
          holders.emplace(machines_[machine].incarnation, shard.rank);
        }
      }
    }
    for (const size_t machine : Running()) {
      std::set<Holder> told, others = holders;
      for (const daemon::Located& one : At(machine)->directory->Locate(plan.ns, {&plan.key, 1})) {
        told.emplace(one.member->incarnation, one.holding.shard.rank);
      }
      std::erase_if(others, [&](const Holder& one) { return one.first == machines_[machine].incarnation; });
      // If only objects used twice are announced, some are not.
      if (!habits_.announces_all && std::ranges::includes(others, told)) continue;
      if (told == others) continue;
      SayWhoHas(text, machine);
      return Fail(absl::StrCat("node ", machine, " knows of ", told.size(), " copies of text ", text.second,
                               " of tenant ", text.first, ", and there are ", others.size()));
    }
  }
}

void Oracle::SayWhoHas(const Text& text, size_t asked) {
  const ObjectHeader& plan = Plans().at(text);
  const daemon::DirectoryKeys keys("/ashlar", "default");
  for (const auto& one : At(asked)->directory->Locate(plan.ns, {&plan.key, 1})) {
    Say(absl::StrCat("node ", asked, " knows that ", one.member->node, " has shard ", one.holding.shard.rank));
  }
  for (const std::string& key : etcd_.Keys()) {
    const auto entry = keys.ReadEntry(key);
    if (!entry.has_value() || entry->id.key != daemon::Shorten(plan.key)) continue;
    for (const size_t machine : Running()) {
      if (machines_[machine].incarnation != entry->incarnation) continue;
      Say(absl::StrCat("etcd has that node ", machine, " has shard ", static_cast<int>(entry->id.rank)));
    }
  }
  for (const size_t machine : Running()) {
    Node& node = *At(machine);
    const daemon::DirectoryStats directory = node.directory->Stats();
    std::string where;
    for (const TierKind tier : node.cache->upkeep().inventory().Where(text.first, plan.key, plan.shard)) {
      absl::StrAppend(&where, " ", absl::string_view(Name(tier)));
    }
    Say(absl::StrCat("node ", machine, node.cache->adoption().Knows(text.first, plan.key) ? " knows it," : "", where,
                     "; waiting ", directory.queued_announcements, " + ", directory.queued_withdrawals, ", sent ",
                     directory.sent_announcements, " + ", directory.sent_withdrawals, ", copies under way ",
                     node.cache->stats().copies_under_way, ", leases ", node.cache->stats().leases));
  }
}

// Nothing is written under the name of a node that does not run.
void Oracle::CheckKeys() {
  const daemon::DirectoryKeys keys("/ashlar", "default");
  std::set<uint64_t> running, members;
  for (const size_t machine : Running()) running.insert(machines_[machine].incarnation);
  for (const std::string& key : etcd_.Keys()) {
    if (const auto member = keys.ReadMember(key)) {
      members.insert(*member);
    } else if (const auto entry = keys.ReadEntry(key); !entry.has_value()) {
      Fail("etcd has a key that is none");
    } else if (!running.contains(entry->incarnation)) {
      Fail("etcd has keys of a node that is gone");
    }
  }
  if (members != running) Fail("etcd has other members than there are");
}

// Every node lands something that another one is known to hold.
void Oracle::CheckEverythingLands() {
  for (const size_t machine : Running()) {
    Node& node = *At(machine);
    std::vector<Text> there;
    for (const auto& [text, plan] : Plans()) {
      if (node.cache->adoption().Knows(text.first, plan.key)) continue;
      std::map<uint64_t, uint32_t> shards;  // by holder
      for (const daemon::Located& one : node.directory->Locate(plan.ns, {&plan.key, 1})) {
        const size_t holder = Calls::MachineOf(*one.member);
        const std::string& tenant = Node::Tenants()[text.first];
        const bool shared = calls_.Shares(machine, holder, tenant) && calls_.Shares(holder, machine, tenant);
        shards[one.member->incarnation] += shared ? 1 : 0;
      }
      const bool whole =
          std::ranges::any_of(shards, [size = plan.shard.size](const auto& one) { return one.second == size; });
      if (whole) there.push_back(text);
    }
    if (there.empty()) continue;
    const Text text = there[Draw(there.size())];
    const daemon::PeersStats stats = node.peers.stats();
    Say(absl::StrCat("node ", machine, " wants text ", text.second, " of tenant ", text.first, "; asked ",
                     stats.lookup.asked, ", opened ", stats.lookup.opened, ", missed ", stats.lookup.missed,
                     ", failed ", stats.lookup.failed, ", adopted ", stats.lookup.adopted));
    engines_.LookUp(machine, text.first, {text}, /*must_hit=*/true);
    RunUntil(schedule_.now() + 5 * kSecond);  // the entries that it replaces are withdrawn
    const daemon::PeersStats behind = node.peers.stats();
    Say(absl::StrCat("asked ", behind.lookup.asked, ", opened ", behind.lookup.opened, ", missed ",
                     behind.lookup.missed, ", failed ", behind.lookup.failed, ", adopted ", behind.lookup.adopted));
    if (!report_.failure.empty()) return;
    if (!engines_.prompts().empty()) return Fail("an object does not land within seconds, and nothing is in its way");
  }
}

void Oracle::CheckNothingIsLeft() {
  for (const size_t machine : Running()) {
    Node& node = *At(machine);
    const auto expect_none = [&](uint64_t count, const char* what) {
      if (count > 0) Fail(absl::StrCat("node ", machine, " is left with ", count, " ", what));
    };
    const storage::Cache::Stats cache = node.cache->stats();
    const daemon::PeersStats peers = node.peers.stats();
    const daemon::TransportStats transport = node.transport->stats();
    const daemon::RouterFigures router = node.router->figures();
    expect_none(cache.leases, "leases");
    expect_none(cache.reservations, "reservations");
    expect_none(cache.landings, "landings");
    expect_none(cache.copies_under_way, "copies between tiers");
    expect_none(peers.holder.leases, "leases of peers");
    std::set<std::string> others;
    for (const size_t other : Running()) {
      if (other != machine) others.insert(daemon::ConnectedPeers::ReaderOf(At(other)->calls.hello()));
    }
    const std::vector<std::string> readers = node.peers.Readers();
    const auto gone = std::ranges::count_if(readers, [&](const auto& reader) { return !others.contains(reader); });
    expect_none(static_cast<uint64_t>(gone), "readers that have gone");
    expect_none(peers.objects.copies, "objects that other nodes keep for it");
    expect_none(peers.objects.reading, "pieces that it fetches");
    expect_none(peers.offered.under_way, "objects that it takes");
    expect_none(transport.grants, "grants");
    expect_none(transport.transfers, "transfers");
    expect_none(node.calls.under_way(), "calls to peers");
    expect_none(router.plans, "plans");
    expect_none(router.pending, "segments to be prefilled");
    expect_none(node.held.size(), "lookups");
  }
  if (!engines_.prompts().empty()) Fail("an engine's prompt never ended");
  if (!engines_.plans().empty()) Fail("an engine's plan never ended");
  if (calls_.unanswered > 0) Fail("a peer's call was never answered");
}

}  // namespace ashlar::simulation::nodes
