// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/nodes/crowd.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>

#include "absl/strings/str_cat.h"
#include "daemon/peer/announcer.h"
#include "daemon/peer/directory/directory_writer.h"

namespace ashlar::simulation::nodes {
namespace {

Digest DigestOf(uint64_t number) {
  std::mt19937_64 random(number);
  Digest digest;
  for (size_t i = 0; i < 4; ++i) {
    const uint64_t word = random();
    std::memcpy(digest.bytes.data() + 8 * i, &word, sizeof word);
  }
  return digest;
}

class Crowd {
 public:
  Crowd(const CrowdOptions& options, uint64_t seed)
      : options_(options), schedule_(seed), network_(schedule_, options.nodes + 1), etcd_(schedule_, Bug::kNone) {}
  ~Crowd() {
    for (Member& member : members_) Kill(member);
  }

  CrowdReport Run();

 private:
  struct Member {
    std::unique_ptr<MachineClock> clock;
    std::shared_ptr<Life> life;
    std::unique_ptr<DirectoryProcess> directory;
    std::unique_ptr<daemon::Announcer> announcer;
    std::vector<TierKind> announced;  // tier of each object
  };

  NamespaceId ModelOf(size_t node) const { return DigestOf(1'000'000'000 + node % options_.models); }
  void Start(size_t node);
  // Flushes a node's announcer, from now on.
  void Flush(size_t node);
  void Tick(size_t node);
  bool ReportAll(size_t node, storage::ReportWalk& walk, storage::Slice& slice);
  static void Kill(Member& member) {
    if (member.directory == nullptr) return;
    member.life->ended = true;
    member.announcer = nullptr;
    member.directory = nullptr;
  }
  // Seconds from now until it holds; -1: not in `most`.
  double Until(const std::function<bool()>& holds, Nanos most = 3600 * kSecond);
  size_t Living() const {
    return static_cast<size_t>(std::ranges::count_if(members_, [](const Member& m) { return m.directory != nullptr; }));
  }
  bool AllKnown();
  bool AllWhole();
  double Seconds() const { return static_cast<double>(schedule_.now()) / 1e9; }

  const CrowdOptions options_;
  Schedule schedule_;
  Network network_;
  Etcd etcd_;
  std::vector<Member> members_;
};

void Crowd::Start(size_t node) {
  Member& member = members_[node];
  member.clock = std::make_unique<MachineClock>(schedule_, schedule_.DrawTime(kSecond), 1.0);
  member.life = std::make_shared<Life>();
  // Not from within the directory's own step.
  daemon::DirectoryEvents events{.announce_again = [this, node] {
    schedule_.For(members_[node].life, 0, [this, node] { members_[node].announcer->Again(); });
  }};
  member.directory = std::make_unique<DirectoryProcess>(network_, etcd_, node, member.life, *member.clock,
                                                        options_.directory, std::move(events), 0, [] {});
  (*member.directory)->Follow(ModelOf(node));
  member.announcer = std::make_unique<daemon::Announcer>(**member.directory, daemon::AnnounceMode::kAll,
                                                         std::vector<std::optional<uint8_t>>{});
  member.announced.assign(options_.objects, TierKind::kNone);
  Flush(node);
  Tick(node);
}

void Crowd::Flush(size_t node) {
  members_[node].announcer->Flush(
      [&](storage::ReportWalk& walk, storage::Slice& slice) { return ReportAll(node, walk, slice); });
  schedule_.For(members_[node].life, kSecond / 10, [this, node] { Flush(node); });
}

void Crowd::Tick(size_t node) {
  members_[node].announcer->Tick();
  schedule_.For(members_[node].life, kSecond, [this, node] { Tick(node); });
}

// Like a cache with all objects in dram. Later ones are worth more.
bool Crowd::ReportAll(size_t node, storage::ReportWalk& walk, storage::Slice& slice) {
  Member& member = members_[node];
  for (; walk.after < options_.objects; ++walk.after) {
    if (!slice.Take()) return false;
    const uint64_t i = walk.after;
    if (walk.lost) member.announced[i] = TierKind::kNone;
    ObjectHeader header{.ns = ModelOf(node), .key = DigestOf(node * 1'000'000 + i)};
    header.tokens = 1;
    header.bytes = 1'000'000;
    const storage::Residence residence{
        .nearest = TierKind::kDram, .uses = static_cast<uint32_t>(i), .announced = member.announced[i]};
    member.announced[i] = member.announcer->Resides({0, storage::PoolKind::kPublic}, header, residence);
  }
  return true;
}

double Crowd::Until(const std::function<bool()>& holds, Nanos most) {
  const Nanos began = schedule_.now();
  while (!holds()) {
    if (schedule_.now() - began > most) return -1;
    const Nanos look = schedule_.now() + kSecond / 10;
    while (schedule_.RunNext(look)) {
    }
  }
  return static_cast<double>(schedule_.now() - began) / 1e9;
}

bool Crowd::AllKnown() {
  const size_t living = Living();
  return std::ranges::all_of(members_, [&](Member& member) {
    return member.directory == nullptr ||
           ((*member.directory)->Members().size() == living && (*member.directory)->Health().connected);
  });
}

// Entries of dead nodes are swept from etcd, and thereby from the mirrors.
bool Crowd::AllWhole() {
  std::vector<uint64_t> of_model(options_.models, 0);
  for (size_t node = 0; node < members_.size(); ++node) {
    if (members_[node].directory != nullptr) of_model[node % options_.models] += options_.objects;
  }
  for (size_t node = 0; node < members_.size(); ++node) {
    if (members_[node].directory == nullptr) continue;
    const daemon::DirectoryStats stats = (*members_[node].directory)->Stats();
    if (stats.entries != of_model[node % options_.models] - options_.objects) return false;
  }
  return etcd_.Count() == Living() * (1 + options_.objects);
}

CrowdReport Crowd::Run() {
  CrowdReport report;
  members_.resize(options_.nodes);
  for (size_t node = 0; node < options_.nodes; ++node) Start(node);
  const Nanos began = schedule_.now();
  report.members_known = Until([&] { return AllKnown(); });
  Until([&] { return AllWhole(); });
  report.announced = static_cast<double>(schedule_.now() - began) / 1e9;
  const Etcd::Counts& counts = etcd_.counts();
  const auto nodes = static_cast<double>(options_.nodes);
  report.transactions = counts.transactions;
  report.keys_a_node_second = static_cast<double>(options_.objects) / report.announced;
  report.budget_a_node_second = daemon::DirectoryWriter::Rate(options_.directory, options_.nodes);
  report.events_a_node_second = static_cast<double>(counts.events) / nodes / report.announced;
  report.bytes_a_node_second = static_cast<double>(counts.event_bytes) / nodes / report.announced;
  report.bytes_an_event =
      static_cast<double>(counts.event_bytes) / static_cast<double>(std::max<uint64_t>(1, counts.events));
  for (Member& member : members_) {
    const daemon::DirectoryStats stats = (*member.directory)->Stats();
    report.entries_a_mirror = std::max(report.entries_a_mirror, stats.entries);
    report.bytes_a_mirror = std::max(report.bytes_a_mirror, stats.bytes);
  }
  const uint64_t kept_alive = counts.keep_alives;
  const Nanos minute = schedule_.now() + 60 * kSecond;
  while (schedule_.RunNext(minute)) {
  }
  report.keep_alives_second = static_cast<double>(counts.keep_alives - kept_alive) / 60;

  for (size_t node = 0; node < options_.nodes / 10; ++node) Kill(members_[node * 10]);
  report.dead_erased = Until([&] { return AllKnown(); });
  const double swept = Until([&] { return AllWhole(); });
  report.swept = swept < 0 ? swept : report.dead_erased + swept;

  etcd_.Stop();
  etcd_.Erase();
  etcd_.Start();
  const Nanos emptied = schedule_.now();
  report.emptied_members = Until([&] { return etcd_.Count() >= Living() && AllKnown(); });
  Until([&] { return AllWhole(); });
  report.emptied_announced = static_cast<double>(schedule_.now() - emptied) / 1e9;
  if (!AllKnown() || !AllWhole()) report.failure = "the directory has not converged";
  return report;
}

}  // namespace

CrowdReport RunCrowd(const CrowdOptions& options, uint64_t seed) {
  CrowdOptions with_etcd = options;
  with_etcd.directory.endpoints = {"etcd:2379"};
  return Crowd(with_etcd, seed).Run();
}

std::string ToJson(const CrowdOptions& options, const CrowdReport& report) {
  return absl::StrCat(
      "{\"nodes\": ", options.nodes, ", \"objects_a_node\": ", options.objects, ", \"models\": ", options.models,
      ", \"lease_s\": ", options.directory.lease_seconds, ", \"members_known_s\": ", report.members_known,
      ", \"announced_s\": ", report.announced, ", \"keys_a_node_s\": ", report.keys_a_node_second,
      ", \"budget_a_node_s\": ", report.budget_a_node_second, ", \"transactions\": ", report.transactions,
      ", \"events_a_node_s\": ", report.events_a_node_second, ", \"bytes_a_node_s\": ", report.bytes_a_node_second,
      ", \"bytes_an_event\": ", report.bytes_an_event, ", \"keep_alives_s\": ", report.keep_alives_second,
      ", \"entries_a_mirror\": ", report.entries_a_mirror, ", \"bytes_a_mirror\": ", report.bytes_a_mirror,
      ", \"dead_erased_s\": ", report.dead_erased, ", \"swept_s\": ", report.swept,
      ", \"emptied_members_s\": ", report.emptied_members, ", \"emptied_announced_s\": ", report.emptied_announced,
      "}");
}

}  // namespace ashlar::simulation::nodes
