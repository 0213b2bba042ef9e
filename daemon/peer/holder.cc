// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/holder.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "proto/limits.h"
#include "storage/objects/object_bytes.h"

namespace ashlar::daemon {
namespace {

// Returns the name without its incarnation.
std::string NameOf(const std::string& node) {
  return node.substr(0, node.find('/'));
}

}  // namespace

// The extents of a leased object. Their addresses are valid as long as the lease, which outlives the grant; their bytes
// may still be in promotion.
class Holder::Bytes final : public GrantedBytes, public std::enable_shared_from_this<Bytes> {
 public:
  Bytes(Holder& holder, const Lease& lease, std::vector<std::byte*> extents,
        std::shared_ptr<std::atomic<uint64_t>> given)
      : holder_(holder), lease_(lease), extents_(std::move(extents)), given_(std::move(given)) {}

  void Resolve(uint64_t offset, uint64_t length, std::function<void(absl::StatusOr<Spans>)> answer) override {
    const uint64_t needed = (offset + length + limits::kExtentBytes - 1) / limits::kExtentBytes;
    if (whole_ >= needed) return answer(Give(offset, length));
    const std::shared_ptr<Bytes> self = shared_from_this();  // the grant may end before this runs
    holder_.loop_.PostCompletion(lease_.tenant, [this, self, offset, length, needed, answer = std::move(answer)] {
      const auto loaded = [this, self, offset, length, needed, answer](bool whole) {
        if (!whole) return answer(absl::NotFoundError("the object is no longer cached here"));
        whole_ = std::max<uint64_t>(whole_, needed);
        answer(Give(offset, length));
      };
      if (!holder_.cache_.WhenLoaded(lease_.session->id, lease_.lease, 0, needed, loaded)) loaded(false);
    });
  }
  // All bytes are there and stay, even if the object ends meanwhile.
  void BecameWhole() { whole_ = extents_.size(); }
  Spans Give(uint64_t offset, uint64_t length) {
    *given_ += length;
    return SpansOf(offset, length);
  }
  Spans SpansOf(uint64_t offset, uint64_t length) const {
    Spans spans;
    while (length > 0) {
      const uint64_t inside = offset % limits::kExtentBytes;
      const uint64_t take = std::min(length, limits::kExtentBytes - inside);
      spans.push_back({extents_[offset / limits::kExtentBytes] + inside, take});
      offset += take;
      length -= take;
    }
    return spans;
  }

 private:
  Holder& holder_;
  const Lease lease_;
  const std::vector<std::byte*> extents_;
  const std::shared_ptr<std::atomic<uint64_t>> given_;
  std::atomic<uint64_t> whole_{0};  // number of whole extents, from the start
};

static_assert(Transport::kMostArenas == kMaxPeerArenas && Transport::kMostRuns == kMaxPeerRuns);

void Holder::RegisterArenas(Transport& transport, storage::MemoryTier& tier) {
  const MemoryType type = tier.gpu() == nullptr ? MemoryType::kHost : MemoryType::kCuda;
  if (!transport.Reaches(type)) return;
  Transport::CopyIn copy_in;
  if (const kernels::Gpu* const gpu = tier.gpu(); gpu != nullptr) {
    copy_in = [gpu](std::byte* to, std::span<const std::byte> from) {
      gpu->CopyToDevice(to, from.data(), from.size());
    };
  }
  tier.OnArena([&transport, type, copy_in](const kernels::ArenaMemory& arena) {
    transport.Register(arena.data(), arena.bytes(), type, copy_in);
  });
}

bool Holder::Open(const std::string& node, storage::TenantId tenant, const PeerOpen& open,
                  std::vector<PeerOpened>& opened, storage::Slice& slice) {
  Node& state = nodes_[node];
  if (state.given == nullptr) {
    std::shared_ptr<std::atomic<uint64_t>>& given = given_[NameOf(node)];
    if (given == nullptr) given = std::make_shared<std::atomic<uint64_t>>(0);
    state.given = given;
  }
  while (opened.size() < open.objects.size()) {
    if (!slice.Take()) return false;
    const PeerObject& wanted = open.objects[opened.size()];
    PeerOpened& answer = opened.emplace_back();
    answer.miss = OpenOne(state, tenant, {.key = wanted.key, .shard = wanted.shard}, open.lease_ms, answer);
    ++(answer.miss == MissReason::kNone ? stats_.opened : stats_.missed);
    if (answer.miss == MissReason::kNone && options_.gave) {
      options_.gave(NameOf(node), tenant, wanted.key);
    }
  }
  return true;
}

MissReason Holder::OpenOne(Node& node, storage::TenantId tenant, const storage::Query& query, uint32_t lease_ms,
                           PeerOpened& opened) {
  if (node.leases.size() >= options_.leases_of_a_node) return MissReason::kBusy;
  if (options_.gives && !options_.gives()) return MissReason::kDaemonUnavailable;
  // An object that only another node has is not forwarded: the requester knows that node too.
  if (cache_.upkeep().inventory().Where(tenant, query.key, query.shard).empty()) return MissReason::kNeverSeen;
  std::shared_ptr<Session>& session = node.sessions[tenant];
  if (session == nullptr) {
    session = std::make_shared<Session>(Session{.id = next_session_++});
    const bool from_gpus = transport_.Reaches(MemoryType::kCuda);
    cache_.OpenSession(session->id, tenant,
                       from_gpus ? storage::SessionOf::kNodeReachingGpus : storage::SessionOf::kNode);
  }
  const storage::Match match = cache_.Lookup(session->id, {&query, 1});
  const storage::Found& found = match.found.front();
  if (found.reason != MissReason::kNone) return found.reason;
  ++session->leases;
  Lease lease{.session = session,
              .tenant = tenant,
              .lease = match.lease,
              .bytes = found.header->bytes,
              .ends_at = clock_.Now() + storage::Nanos{1'000'000} * lease_ms};
  const storage::Tier& tier = *tiers_.at(found.slot->runs.front().arena / storage::kArenasApart);
  std::vector<std::byte*> extents = storage::ObjectBytes(tier, *found.slot).extents();
  const auto bytes = std::make_shared<Bytes>(*this, lease, std::move(extents), node.given);
  // Counts as a use of the lease, so the cache keeps it until its release: a peer's lease has its own time limit.
  cache_.WhenLoaded(session->id, match.lease, 0, found.header->Extents(), [bytes](bool whole) {
    if (whole) bytes->BecameWhole();
  });
  const Grant grant = transport_.Allow(found.header->bytes, bytes);
  lease.grant = grant.number;
  opened = {.header = EncodeHeader(*found.header),
            .bytes = found.header->bytes,
            .tier = found.tier,
            .lease = match.lease,
            .grant = {.number = grant.number, .secret = grant.secret},
            .lease_ms = lease_ms};
  // These are the tenant's own arenas: a reader with their keys belongs to the tenant.
  RemoteMemory memory = transport_.Describe(bytes->SpansOf(0, found.header->bytes));
  for (RemoteArena& arena : memory.arenas) opened.arenas.push_back({std::move(arena.key), arena.base, arena.bytes});
  for (const RemoteRun& run : memory.runs) opened.runs.push_back({run.arena, run.offset, run.bytes});
  node.leases.emplace(match.lease, lease);
  node.bytes += lease.bytes;
  ++stats_.leases;
  return MissReason::kNone;
}

uint32_t Holder::Renew(const std::string& node, const PeerLease& lease, uint32_t lease_ms) {
  const auto state = nodes_.find(node);
  if (state == nodes_.end()) return 0;
  const auto found = state->second.leases.find(lease);
  if (found == state->second.leases.end()) return 0;
  found->second.ends_at = clock_.Now() + storage::Nanos{1'000'000} * lease_ms;
  return lease_ms;
}

void Holder::Close(const std::string& node, const PeerLease& lease) {
  const auto state = nodes_.find(node);
  if (state == nodes_.end()) return;
  if (const auto ended = state->second.leases.extract(lease)) {
    state->second.bytes -= ended.mapped().bytes;
    End(ended.mapped());
  }
}

// The object stays until the transport has released it.
void Holder::End(const Lease& lease) {
  --stats_.leases;
  transport_.Revoke(lease.grant, [this, lease] {
    loop_.PostCompletion(lease.tenant, [this, lease] {
      cache_.Release(lease.session->id, lease.lease);
      --lease.session->leases;
      CloseIfGone(*lease.session);
    });
  });
}

void Holder::Gone(const std::string& node) {
  const auto gone = nodes_.extract(node);
  if (gone.empty()) return;
  for (const auto& [name, lease] : gone.mapped().leases) End(lease);
  for (const auto& [tenant, session] : gone.mapped().sessions) {
    session->gone = true;
    CloseIfGone(*session);
  }
}

void Holder::CloseIfGone(const Session& session) {
  if (session.gone && session.leases == 0) cache_.CloseSession(session.id, [] {});
}

void Holder::CloseAll() {
  while (!nodes_.empty()) Gone(std::string(nodes_.begin()->first));
}

void Holder::Tick() {
  const storage::Nanos now = clock_.Now();
  for (auto& [name, node] : nodes_) {
    for (auto lease = node.leases.begin(); lease != node.leases.end();) {
      if (lease->second.ends_at > now) {
        ++lease;
        continue;
      }
      ++stats_.expired;
      node.bytes -= lease->second.bytes;
      End(lease->second);
      lease = node.leases.erase(lease);
    }
  }
}

Holder::Stats Holder::stats() const {
  Stats stats = stats_;
  stats.nodes = nodes_.size();
  return stats;
}

std::map<std::string, Holder::OfNode> Holder::ByNode() const {
  std::map<std::string, OfNode> figures;
  for (const auto& [name, given] : given_) figures[name].given = *given;
  for (const auto& [node, state] : nodes_) {
    OfNode& of_node = figures[NameOf(node)];
    of_node.leases += state.leases.size();
    of_node.bytes += state.bytes;
  }
  return figures;
}

std::vector<std::string> Holder::Readers() const {
  std::vector<std::string> names;
  for (const auto& [name, state] : nodes_) names.push_back(name);
  return names;
}

void Holder::Keep(const std::set<std::string>& nodes) {
  std::set<std::string> holding;
  for (const auto& [node, state] : nodes_) holding.insert(NameOf(node));
  std::erase_if(given_, [&](const auto& each) { return !nodes.contains(each.first) && !holding.contains(each.first); });
}

}  // namespace ashlar::daemon
