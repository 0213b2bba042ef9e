// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/directory/etcd_directory.h"

#include <algorithm>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/peer/directory/directory_session.h"
#include "daemon/runtime/named_thread.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

uint64_t Draw() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

EntryId MakeId(const NamespaceId& ns, const Key& key, const TensorShard& shard) {
  return {Shorten(ns), Shorten(key), static_cast<uint8_t>(shard.rank), static_cast<uint8_t>(shard.size - 1)};
}

bool CanBeSaid(const TensorShard& shard) {
  return shard.size > 0 && shard.size <= limits::kMaxTensorShards && shard.rank < shard.size;
}

}  // namespace

struct EtcdDirectory::State {
  State(const EtcdDirectoryOptions& options, std::shared_ptr<const Member> self, DirectoryEvents events,
        const storage::Clock& clock, std::unique_ptr<EtcdClient> client, uint64_t seed)
      : shared(options), session(options, self, std::move(events), clock, std::move(client), seed, &shared) {
    shared.members = {self};
    shared.health = {.connected = false, .since = clock.Now(), .reason = "not connected yet"};
  }

  DirectoryShared shared;
  DirectorySession session;
  std::thread thread;  // not started: the owner calls Step
};

EtcdDirectory::EtcdDirectory(const EtcdDirectoryOptions& options, Member self, DirectoryEvents events,
                             const storage::Clock& clock)
    : EtcdDirectory(options, std::move(self), std::move(events), clock,
                    EtcdClient::Make(clock, DirectorySession::Limits(options)), Draw) {
  state_->thread = NamedThread("directory", [this] { state_->session.Run(); });
}

EtcdDirectory::EtcdDirectory(const EtcdDirectoryOptions& options, Member self, DirectoryEvents events,
                             const storage::Clock& clock, std::unique_ptr<EtcdClient> client,
                             const std::function<uint64_t()>& random) {
  self.incarnation = random();
  state_ = std::make_unique<State>(options, std::make_shared<const Member>(std::move(self)), std::move(events), clock,
                                   std::move(client), random());
}

storage::Nanos EtcdDirectory::Step() {
  return state_->session.Step();
}

EtcdDirectory::~EtcdDirectory() {
  if (!state_->thread.joinable()) {
    state_->session.Leave();
    return;
  }
  {
    MutexLock lock(state_->shared.mutex);
    state_->shared.stopping = true;
  }
  state_->session.Wake();
  state_->thread.join();
}

bool EtcdDirectory::Announce(const NamespaceId& ns, const Key& key, const Holding& holding, double worth) {
  if (!CanBeSaid(holding.shard) || holding.bytes > kMostHoldingBytes) return false;
  bool idle = false, taken = false;
  {
    MutexLock lock(state_->shared.mutex);
    idle = state_->shared.queue.size() == 0;
    taken = state_->shared.queue.Announce({MakeId(ns, key, holding.shard), holding, worth});
  }
  if (idle) state_->session.Wake();
  return taken;
}

void EtcdDirectory::Withdraw(const NamespaceId& ns, const Key& key, const TensorShard& shard) {
  if (!CanBeSaid(shard)) return;
  bool idle = false;
  {
    MutexLock lock(state_->shared.mutex);
    idle = state_->shared.queue.size() == 0;
    state_->shared.queue.Withdraw(MakeId(ns, key, shard));
  }
  if (idle) state_->session.Wake();
}

size_t EtcdDirectory::RemainingCapacity() const {
  MutexLock lock(state_->shared.mutex);
  return state_->shared.queue.RemainingCapacity();
}

bool EtcdDirectory::WasDisplaced(const NamespaceId& ns, const Key& key, const TensorShard& shard) const {
  if (!CanBeSaid(shard)) return false;
  MutexLock lock(state_->shared.mutex);
  return state_->shared.queue.WasDisplaced(MakeId(ns, key, shard));
}

void EtcdDirectory::Follow(const NamespaceId& ns) {
  {
    MutexLock lock(state_->shared.mutex);
    if (++state_->shared.followed[Shorten(ns)] > 1) return;
  }
  state_->session.Wake();
}

void EtcdDirectory::Unfollow(const NamespaceId& ns) {
  {
    MutexLock lock(state_->shared.mutex);
    const auto found = state_->shared.followed.find(Shorten(ns));
    if (found == state_->shared.followed.end() || --found->second > 0) return;
    state_->shared.followed.erase(found);
  }
  state_->session.Wake();
}

std::vector<Located> EtcdDirectory::Locate(const NamespaceId& ns, std::span<const Key> keys) const {
  return state_->shared.mirror.Locate(ns, keys);
}

std::vector<uint64_t> EtcdDirectory::Depths(const NamespaceId& ns, uint64_t end, size_t most) const {
  return state_->shared.mirror.Depths(ns, end, most);
}

std::vector<uint64_t> EtcdDirectory::SpanEnds(const NamespaceId& ns, uint64_t begin, uint64_t end, size_t most) const {
  return state_->shared.mirror.SpanEnds(ns, begin, end, most);
}

void EtcdDirectory::Erase(const ClusterErasure& erasure, std::function<void(const absl::Status&)> done) {
  absl::Status refused;
  {
    DirectoryShared& shared = state_->shared;
    MutexLock lock(shared.mutex);
    if (!shared.health.connected) {
      refused = absl::UnavailableError(absl::StrCat("the directory is not reachable: ", shared.health.reason));
    } else if (shared.erasures.size() + shared.to_erase.size() >= kMostErasures) {
      refused = absl::ResourceExhaustedError(
          absl::StrCat("erasures: the directory already has ", kMostErasures, " erasures; try again later"));
    } else {
      shared.to_erase.push_back({erasure, std::move(done)});
    }
  }
  if (!refused.ok()) return done(refused);
  state_->session.Wake();
}

std::vector<ClusterErasure> EtcdDirectory::Erasures() const {
  std::vector<ClusterErasure> erasures;
  MutexLock lock(state_->shared.mutex);
  for (const auto& [revision, erasure] : state_->shared.erasures) erasures.push_back(erasure);
  return erasures;
}

void EtcdDirectory::Erased(int64_t revision) {
  {
    MutexLock lock(state_->shared.mutex);
    if (std::exchange(state_->shared.erased, revision) == revision) return;
  }
  state_->session.Wake();
}

bool EtcdDirectory::BeingErased(const std::string& tenant, const NamespaceId& ns) const {
  DirectoryShared& shared = state_->shared;
  MutexLock lock(shared.mutex);
  if (shared.erasures.empty()) return false;
  int64_t everywhere = INT64_MAX;
  for (const auto& member : shared.members) everywhere = std::min(everywhere, member->erased);
  return std::any_of(shared.erasures.upper_bound(everywhere), shared.erasures.end(), [&](const auto& one) {
    return one.second.tenant == tenant && (!one.second.ns || *one.second.ns == ns);
  });
}

std::vector<std::shared_ptr<const Member>> EtcdDirectory::Members() const {
  MutexLock lock(state_->shared.mutex);
  return state_->shared.members;
}

DirectoryHealth EtcdDirectory::Health() const {
  MutexLock lock(state_->shared.mutex);
  return state_->shared.health;
}

DirectoryStats EtcdDirectory::Stats() const {
  DirectoryShared& shared = state_->shared;
  DirectoryStats stats;
  {
    MutexLock lock(shared.mutex);
    stats = shared.counted;
    stats.members = shared.members.size();
    stats.queued_announcements = shared.queue.announcements();
    stats.queued_withdrawals = shared.queue.withdrawals();
    stats.dropped_announcements = shared.queue.dropped_announcements();
    stats.dropped_withdrawals = shared.queue.dropped_withdrawals();
  }
  stats.entries = shared.mirror.entries();
  stats.bytes = shared.mirror.Bytes();
  stats.entries_refused = shared.mirror.refused();
  return stats;
}

}  // namespace ashlar::daemon
