// SPDX-License-Identifier: Apache-2.0
// Events for operators and their tools.
#include <algorithm>
#include <string>
#include <vector>

#include "ashlar/v1/events.pb.h"
#include "daemon/admin/admin_service.h"
#include "proto/invalid.h"

namespace ashlar::daemon {
namespace {

constexpr size_t kMostInAnAnswer = 1024;
constexpr storage::Nanos kLookAround = 100'000'000;  // interval of checks whether the caller is still connected

template <size_t kSize>
std::string BytesOf(const std::array<uint8_t, kSize>& bytes) {
  return {bytes.begin(), bytes.end()};
}

void WriteEvent(const CacheEvent& event, const std::vector<std::string>& tenants, v1::CacheEvent* out) {
  out->set_kind(static_cast<v1::CacheEvent::Kind>(event.kind));
  out->set_sequence(event.sequence);
  out->set_lost(event.lost);
  if (event.kind == CacheEvent::Kind::kGap) return;
  out->set_tenant(tenants.at(event.pool.tenant));
  out->set_namespace_(BytesOf(event.ns.bytes));
  out->set_key(BytesOf(event.key.bytes));
  out->set_object(static_cast<uint32_t>(event.object));
  out->set_own(event.pool.kind == storage::PoolKind::kPrivate);
  out->set_shard_rank(event.shard.rank);
  out->set_shard_size(event.shard.size);
  out->set_tier(static_cast<uint32_t>(event.tier));
  out->set_tokens(event.tokens);
  out->set_bytes(event.bytes);
}

}  // namespace

absl::Status AdminService::Follow(const v1::EventsRequest& request,
                                  const std::function<bool(const v1::EventBatch&)>& send,
                                  const std::function<bool()>& ended) const {
  EventHub::Filter filter;
  if (!request.tenant().empty()) {
    const auto tenant = FindTenant(request.tenant());
    if (!tenant.ok()) return tenant.status();
    filter.tenant = *tenant;
  }
  if (!request.namespace_().empty()) {
    NamespaceId ns;
    if (request.namespace_().size() != ns.bytes.size()) return Invalid("namespace: wrong length; expected 32 bytes");
    std::ranges::copy(request.namespace_(), ns.bytes.begin());
    filter.ns = ns;
  }
  const std::shared_ptr<EventHub::Subscription> subscription = parts_.events.Subscribe(filter);
  if (subscription == nullptr) return absl::ResourceExhaustedError("events: too many subscribers; try again later");
  if (!send({})) return absl::OkStatus();
  while (!ended()) {
    v1::EventBatch batch;
    for (const CacheEvent& event : subscription->Take(kMostInAnAnswer, kLookAround)) {
      WriteEvent(event, parts_.tenants, batch.add_events());
    }
    if (batch.events_size() > 0 && !send(batch)) break;
  }
  return absl::OkStatus();
}

}  // namespace ashlar::daemon
