// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/fetch/remote_lookup.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

#include "proto/limits.h"

namespace ashlar::daemon {
// One Find. It continues when its last object is settled or its time has passed. Objects that nothing took until both
// lookups have ended and all replies have arrived are released.
class RemoteLookup::Call {
 public:
  Call(RemoteLookup& lookup, storage::TenantId its_tenant, std::function<void(Adopted)> then)
      : tenant(its_tenant), lookup_(lookup), then_(std::move(then)) {}

  bool waits() const { return then_ != nullptr; }
  void Settle(const std::shared_ptr<Call>& self) {
    if (--open_ > 0) return;
    if (waits()) return GoOn(self);
    if (ended_) GiveBack();
  }
  // The lookups keep the call alive; its end releases what they left.
  void GoOn(const std::shared_ptr<Call>& self) {
    for (const auto& [key, shards] : objects_) {
      if (lookup_.asking_.contains({tenant, key})) found_.unreachable_.insert(key);  // too late
    }
    auto ended = [self](const Found*) {
      self->lookup_.loop_.PostCompletion(self->tenant, [self] {
        self->ended_ = true;
        if (self->open_ == 0) self->GiveBack();
      });
    };
    std::exchange(then_, nullptr)(Adopted(&found_, std::move(ended)));
  }
  // Adds an object that this call's lookups may use.
  void Add(const Key& key, uint32_t shards) {
    ++lookup_.using_[{tenant, key}];
    objects_.emplace_back(key, shards);
  }
  void Expect() { ++open_; }
  void Unreachable(const Key& key) {
    if (waits()) found_.unreachable_.insert(key);
  }

  const storage::TenantId tenant;

 private:
  void GiveBack() {
    for (const auto& [key, shards] : std::exchange(objects_, {})) {
      const auto used = lookup_.using_.find({tenant, key});
      if (--used->second > 0) continue;  // another call's lookups may still use it
      lookup_.using_.erase(used);
      for (uint32_t rank = 0; rank < shards; ++rank) {
        lookup_.cache_->adoption().SettleRemote(tenant, key, {.rank = rank, .size = shards});
      }
    }
  }

  RemoteLookup& lookup_;
  std::function<void(Adopted)> then_;
  size_t open_ = 1;  // pending objects, plus one until all are requested
  bool ended_ = false;
  Found found_;  // constant once `then_` has it
  std::vector<std::pair<Key, uint32_t>> objects_;
};

void RemoteLookup::Find(storage::TenantId tenant, std::span<const RemoteQuestion> prompts,
                        std::function<void(Adopted)> then) {
  Wants wants = Locate(prompts);
  if (wants.segments.empty() && wants.prefixes.empty()) return then(nullptr);
  const auto call = std::make_shared<Call>(*this, tenant, then);
  const bool posted =
      loop_.Post(tenant, [this, call, wants = std::move(wants)]() mutable { Begin(call, std::move(wants)); });
  if (!posted) then(nullptr);
}

void RemoteLookup::Begin(const std::shared_ptr<Call>& call, Wants located) {
  std::vector<Want> wants = std::move(located.segments), asked;
  for (Prefix& prefix : located.prefixes) Choose(call->tenant, std::move(prefix), wants);
  for (Want& want : wants) {
    const Place key{call->tenant, want.key};
    if (cache_->adoption().Knows(call->tenant, want.key)) {
      if (using_.contains(key)) call->Add(want.key, want.shards);  // another call requested it and may release it
      continue;
    }
    const auto [place, first] = asking_.try_emplace(key);
    if (first && (asking_.size() > options_.most_waiting || want.shards > limits::kMaxPeerKeysPerCall)) {
      asking_.erase(place);
      continue;
    }
    if (!first && std::ranges::count(place->second, call) > 0) continue;
    place->second.push_back(call);
    call->Expect();
    call->Add(want.key, want.shards);
    if (!first) ++stats_.joined;
    if (first) asked.push_back(std::move(want));
  }
  deadlines_.emplace_back(clock_.Now() + options_.deadline, call);
  Ask(call->tenant, std::move(asked));
  call->Settle(call);
}

void RemoteLookup::Tick() {
  const storage::Nanos now = clock_.Now();
  for (; !deadlines_.empty(); deadlines_.pop_front()) {
    const auto& [deadline, call] = deadlines_.front();
    if (call->waits() && deadline > now) return;
    if (!call->waits()) continue;
    ++stats_.late;
    call->GoOn(call);
  }
}

// Asks the nearest known holder of each object, with one call per node.
void RemoteLookup::Ask(storage::TenantId tenant, std::vector<Want> wants) {
  std::map<std::string, std::vector<Want>> by_node;
  for (Want& want : wants) {
    std::erase_if(want.holders, [&](const auto& member) { return !opener_.Shares(*member, tenant); });
    const size_t left_out =
        std::erase_if(want.holders, [&](const auto& member) { return !rates_.MayAsk(member->node); });
    want.unreachable |= left_out > 0;
    if (want.holders.empty()) {
      Settled(tenant, want.key, want.unreachable);
      continue;
    }
    std::ranges::stable_sort(want.holders, {}, [&](const std::shared_ptr<const Member>& member) {
      return std::pair(objects_->Distrusts(*member, want.key), rates_.Estimate(member->node, want.bytes));
    });
    by_node[want.holders.front()->node].push_back(std::move(want));
  }
  for (auto& [node, of_node] : by_node) {
    for (size_t begin = 0; begin < of_node.size();) {
      std::vector<Want> some;
      std::vector<PeerObject> objects;
      for (; begin < of_node.size(); ++begin) {
        Want& want = of_node[begin];
        if (!objects.empty() && objects.size() + want.shards > limits::kMaxPeerKeysPerCall) break;
        for (uint32_t rank = 0; rank < want.shards; ++rank) {
          objects.push_back({want.key, {.rank = rank, .size = want.shards}});
        }
        some.push_back(std::move(want));
      }
      stats_.asked += objects.size();
      const std::shared_ptr<const Member> member = some.front().holders.front();
      opener_.Open(tenant, member, std::move(objects), [this, tenant, some = std::move(some)](Opener::Opened opened) {
        Answered(tenant, some, std::move(opened));
      });
    }
  }
}

void RemoteLookup::Answered(storage::TenantId tenant, const std::vector<Want>& wants, Opener::Opened opened) {
  std::vector<Want> again;
  size_t next = 0;
  for (const Want& want : wants) {
    const std::span shards(opened.begin() + static_cast<ptrdiff_t>(next), want.shards);
    next += want.shards;
    const bool unreachable = want.unreachable || std::ranges::any_of(shards, [](const auto& shard) {
                               return absl::IsUnavailable(shard.status()) || absl::IsDeadlineExceeded(shard.status());
                             });
    const bool adopted = Adopt(tenant, want, shards);
    if (adopted || want.holders.size() == 1 || !AnyoneWaits(tenant, want.key)) {
      Settled(tenant, want.key, !adopted && unreachable);
      continue;
    }
    again.push_back(want);
    again.back().unreachable = unreachable;
    again.back().holders.erase(again.back().holders.begin());
  }
  if (!again.empty()) Ask(tenant, std::move(again));
}

bool RemoteLookup::AnyoneWaits(storage::TenantId tenant, const Key& key) const {
  return std::ranges::any_of(asking_.at({tenant, key}), [](const auto& call) { return call->waits(); });
}

bool RemoteLookup::Adopt(storage::TenantId tenant, const Want& want, std::span<absl::StatusOr<OpenedObject>> shards) {
  const bool here = cache_->adoption().Knows(tenant, want.key);  // an engine here was faster
  bool whole = true;
  for (absl::StatusOr<OpenedObject>& shard : shards) {
    if (shard.ok() && (shard->header.ns != want.ns || shard->header.kind != want.kind)) {
      opener_.Close(shard->member, shard->lease);
      shard = absl::DataLossError("header: namespace or kind does not match the request");
    }
    whole &= shard.ok();
    ++(shard.ok() ? stats_.opened : absl::IsNotFound(shard.status()) ? stats_.missed : stats_.failed);
  }
  for (absl::StatusOr<OpenedObject>& shard : shards) {
    if (!shard.ok()) continue;
    const std::shared_ptr<const Member> member = shard->member;
    if (!whole || here) {
      opener_.Close(member, shard->lease);
      continue;
    }
    ObjectHeader header = shard->header;
    const storage::Nanos cost = rates_.Transfer(member->node, header.bytes, clock_.Now());
    const storage::RemoteCopyId copy = objects_->Add(tenant, *std::move(shard), want.holders);
    if (cache_->adoption().AdoptRemote({tenant, want.pool}, std::move(header), copy, cost)) {
      ++stats_.adopted;
      cache_->offers().SetGroup(tenant, want.key, want.group);
    } else {
      objects_->Release(copy);
    }
  }
  return whole || here;
}

void RemoteLookup::Settled(storage::TenantId tenant, const Key& key, bool unreachable) {
  const auto waiting = asking_.extract({tenant, key});
  for (const std::shared_ptr<Call>& call : waiting.mapped()) {
    if (unreachable) call->Unreachable(key);
    call->Settle(call);
  }
}

void RemoteLookup::Found::Mark(std::span<storage::Query> queries) const {
  for (storage::Query& query : queries) query.unreachable = unreachable_.contains(query.key);
}

}  // namespace ashlar::daemon
