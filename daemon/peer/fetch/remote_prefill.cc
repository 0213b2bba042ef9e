// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/fetch/remote_prefill.h"

#include <algorithm>

#include "proto/prefill_limits.h"

namespace ashlar::daemon {
namespace {

constexpr storage::Nanos kMillisecond = 1'000'000;

}  // namespace

template <typename Ask>
void RemotePrefill::AskAll(const NotBefore& none, const NamespaceId& ns, Ask ask) {
  const storage::Nanos now = clock_.Now();
  size_t asked = 0;
  for (const std::shared_ptr<const Member>& member : directory_.Members()) {
    if (member->node == self_ || !rates_.MayAsk(member->node) || asked == kMostNodes) continue;
    const NotBefore::key_type place(member->incarnation, ns);
    if (const auto known = none.find(place); known != none.end() && known->second > now) continue;
    ++asked;
    ask(member, place);
  }
}

void RemotePrefill::Remember(NotBefore& none, const NotBefore::key_type& place) {
  if (none.size() >= kMostNone) none.clear();
  none[place] = clock_.Now() + kNoneFor;
}

void RemotePrefill::Find(storage::TenantId tenant, const NamespaceId& ns,
                         std::function<void(std::vector<RemoteWorker>)> done) {
  const storage::Nanos now = clock_.Now();
  const auto search = std::make_shared<Search<RemoteWorker>>(
      Search<RemoteWorker>{.deadline = now + kPatience, .done = std::move(done)});
  AskAll(none_, ns, [&](const std::shared_ptr<const Member>& member, const NotBefore::key_type& place) {
    ++search->open;
    using Reply = absl::StatusOr<std::vector<PeerWorker>>;
    const auto answered = [this, search, member, place, now](const Reply& reply) {
      const storage::Nanos took = clock_.Now() - now;
      if (reply.ok() && !reply->empty()) {
        none_.erase(place);
        for (const PeerWorker& worker : *reply) {
          search->found.push_back({.member = member,
                                   .worker = worker.worker,
                                   .tokens_per_second = worker.tokens_per_second,
                                   .queued_tokens = worker.queued_tokens,
                                   .capacity = worker.capacity,
                                   .delay = took});
        }
      } else {
        Remember(none_, place);
      }
      Settle(searches_, search);
    };
    asker_.Workers(*member, names_.at(tenant), ns, [this, tenant, answered](Reply reply) {
      const auto shared = std::make_shared<Reply>(std::move(reply));
      loop_.PostCompletion(tenant, [answered, shared] { answered(*shared); });
    });
  });
  searches_.push_back(search);
  Settle(searches_, search);
}

void RemotePrefill::Probe(storage::TenantId tenant, const NamespaceId& ns, std::shared_ptr<const v1::Prompt> prompt,
                          std::function<void(std::vector<v1::NodeProbe>)> done) {
  using Nodes = Search<v1::NodeProbe>;
  const auto search = std::make_shared<Nodes>(Nodes{.deadline = clock_.Now() + kPatience, .done = std::move(done)});
  const bool fits = prompt->tokens().size() <= limits::kMaxPrefillTokens * sizeof(int32_t);
  const PeerProbe probe{.ns = ns, .prompt = std::move(prompt)};
  const auto ask = [&](const std::shared_ptr<const Member>& member, const NotBefore::key_type& place) {
    ++search->open;
    using Reply = absl::StatusOr<v1::NodeProbe>;
    const auto answered = [this, search, member, place](Reply& reply) {
      if (reply.ok()) {
        reply->set_node(member->node);
        search->found.push_back(*std::move(reply));
      } else if (absl::IsNotFound(reply.status()) || absl::IsUnimplemented(reply.status())) {
        Remember(no_model_, place);
      }
      Settle(probes_, search);
    };
    asker_.Probe(*member, names_.at(tenant), probe, [this, tenant, answered](Reply reply) {
      const auto shared = std::make_shared<Reply>(std::move(reply));
      loop_.PostCompletion(tenant, [answered, shared] { answered(*shared); });
    });
  };
  if (fits) AskAll(no_model_, ns, ask);
  probes_.push_back(search);
  Settle(probes_, search);
}

template <typename Answer>
void RemotePrefill::Settle(Searches<Answer>& searches, const std::shared_ptr<Search<Answer>>& search) {
  if (--search->open > 0 || !search->done) return;
  std::erase(searches, search);
  std::exchange(search->done, nullptr)(std::move(search->found));
}

template <typename Answer>
void RemotePrefill::EndLate(Searches<Answer>& searches) {
  const storage::Nanos now = clock_.Now();
  Searches<Answer> over;
  std::erase_if(searches, [&](const std::shared_ptr<Search<Answer>>& search) {
    if (search->deadline <= now) over.push_back(search);
    return search->deadline <= now;
  });
  for (const auto& search : over) std::exchange(search->done, nullptr)(std::move(search->found));
}

void RemotePrefill::Tick() {
  EndLate(searches_);
  EndLate(probes_);
}

void RemotePrefill::Prefill(const RemoteWorker& worker, const PrefillWork& work, storage::Nanos patience,
                            std::function<void(absl::Status)> done) {
  const auto millis = std::clamp<storage::Nanos>(patience / kMillisecond, 1, limits::kMaxPeerPrefillMillis);
  PeerPrefill prefill{.ns = work.ns,
                      .worker = worker.worker,
                      .kind = work.kind,
                      .tokens = *work.packed,
                      .key = work.key,
                      .patience_ms = static_cast<uint32_t>(millis),
                      .lease_ms = Opener::kLeaseMillis};
  using Reply = absl::StatusOr<PeerOpened>;
  asker_.Prefill(*worker.member, names_.at(work.tenant), std::move(prefill),
                 [this, member = worker.member, work, done = std::move(done)](Reply reply) {
                   const auto shared = std::make_shared<Reply>(std::move(reply));
                   loop_.PostCompletion(work.tenant, [this, member, work, done, shared] {
                     if (!shared->ok()) return done(shared->status());
                     // The lease started when the reply was written; the delay since then is comparatively short.
                     done(Adopt(member, work, **std::move(shared), clock_.Now()));
                     cache_->adoption().SettleRemote(work.tenant, work.key, {});
                   });
                 });
}

// Adopts objects that the other node has leased, so that lookups find them.
absl::Status RemotePrefill::Adopt(const std::shared_ptr<const Member>& member, const PrefillWork& work,
                                  PeerOpened answer, storage::Nanos asked_at) {
  absl::StatusOr<OpenedObject> opened = TakeOpened(answer, member, asked_at);
  if (!opened.ok()) return opened.status();
  if (opened->header.ns != work.ns || opened->header.kind != work.kind) {
    opener_.Close(member, opened->lease);
    return absl::DataLossError("header: namespace or kind does not match the request");
  }
  if (directory_.BeingErased(names_.at(work.tenant), work.ns)) {  // it may have existed before
    opener_.Close(member, opened->lease);
    return absl::NotFoundError("the object is being erased");
  }
  ObjectHeader header = opened->header;
  const storage::Nanos cost = rates_.Estimate(member->node, header.bytes);
  const storage::RemoteCopyId copy = objects_.Add(work.tenant, *std::move(opened), {});
  if (!cache_->adoption().AdoptRemote({work.tenant, storage::PoolKind::kPublic}, std::move(header), copy, cost)) {
    objects_.Release(copy);  // already here
  }
  return absl::OkStatus();
}

storage::Nanos RemotePrefill::Estimate(const RemoteWorker& worker, uint64_t bytes) const {
  return rates_.Estimate(worker.member->node, bytes);
}

}  // namespace ashlar::daemon
