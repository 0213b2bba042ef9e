// SPDX-License-Identifier: Apache-2.0
// Operators' calls on many objects: List, Erase, Verify.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "ashlar/v1/admin.pb.h"
#include "daemon/admin/admin_service.h"
#include "daemon/peer/cluster.h"
#include "proto/invalid.h"

namespace ashlar::daemon {
namespace {

using storage::Nanos;
using storage::Slice;
using storage::TenantId;

constexpr uint32_t kPage = 1000, kLargestPage = 10'000;
constexpr double kMostWait = 20;
constexpr std::chrono::milliseconds kUpkeepPoll{10};
constexpr std::chrono::seconds kDirectoryPatience{20};
constexpr uint64_t kVerifyRate = uint64_t{256} << 20;
constexpr size_t kLeastNsBytes = 2;
constexpr size_t kMostPendingErasures = 64;  // waiting for the disk

double InSeconds(Nanos nanos) {
  return static_cast<double>(nanos) * 1e-9;
}

std::string Raw(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.bytes.data()), digest.bytes.size()};
}

void Write(const storage::Listed& object, const std::string& tenant, v1::ListedObject* out) {
  out->set_tenant(tenant);
  out->set_ns(Raw(object.ns));
  out->set_key(Raw(object.key));
  out->set_kind(static_cast<uint32_t>(object.kind));
  out->set_tokens(object.tokens);
  out->set_bytes(object.bytes);
  for (const TierKind tier : object.tiers) out->add_tiers(static_cast<uint32_t>(tier));
  out->set_uses(object.uses);
  out->set_references(object.references);
  out->set_pinned(object.pinned);
  out->set_own(object.pool.kind == storage::PoolKind::kPrivate);
  out->set_age_seconds(InSeconds(object.age));
  out->set_idle_seconds(InSeconds(object.idle));
  out->set_shard(object.shard.rank);
  out->set_of_shards(object.shard.size);
}

void Write(const storage::Inventory::Tally& tally, v1::EraseReply* out) {
  out->set_objects(tally.objects);
  out->set_bytes(tally.bytes);
  out->set_leased_objects(tally.leased_objects);
  out->set_leased_bytes(tally.leased_bytes);
  for (size_t tier = 1; tier < tally.tier_bytes.size(); ++tier) {
    if (tally.tier_bytes[tier] == 0) continue;
    v1::TierBytes* bytes = out->add_tiers();
    bytes->set_tier(static_cast<uint32_t>(tier));
    bytes->set_bytes(tally.tier_bytes[tier]);
  }
}

void Write(const storage::Erasure::Progress& progress, v1::EraseReply* out) {
  Write(progress.erased, out);
  out->set_done(progress.done);
  out->set_on_disk(progress.on_disk);
  if (!progress.overwritten.ok()) out->set_not_overwritten(std::string(progress.overwritten.message()));
}

void Write(const storage::Scrubber& scrubber, const storage::Scrubber::Report& report,
           const std::vector<std::string>& tenants, Nanos now, v1::VerifyReply* out) {
  out->set_running(report.running);
  out->set_requested(report.asked);
  out->set_pass(report.pass);
  out->set_skipped(report.skipped);
  out->set_background_bytes_per_second(scrubber.rate());
  if (report.pass > 0) out->set_seconds(InSeconds((report.running ? now : report.ended) - report.began));
  if (report.pass > 0 && !report.running) out->set_ended_seconds_ago(InSeconds(now - report.ended));
  for (size_t tier = 1; tier < report.copies.size(); ++tier) {
    if (report.copies[tier] == 0) continue;
    v1::VerifiedTier* verified = out->add_tiers();
    verified->set_tier(static_cast<uint32_t>(tier));
    verified->set_copies(report.copies[tier]);
    verified->set_bytes(report.bytes[tier]);
    verified->set_damaged(report.damaged[tier]);
  }
  for (const storage::Scrubber::Damage& damage : report.findings) {
    v1::DamagedCopy* copy = out->add_damaged();
    copy->set_tenant(tenants.at(damage.pool.tenant));
    copy->set_ns(Raw(damage.ns));
    copy->set_key(Raw(damage.key));
    copy->set_kind(static_cast<uint32_t>(damage.kind));
    copy->set_tier(static_cast<uint32_t>(damage.tier));
    copy->set_bytes(damage.bytes);
    copy->set_reason(static_cast<uint32_t>(damage.reason));
  }
}

}  // namespace

absl::Status AdminService::InSlices(const std::function<bool(Slice&)>& work) const {
  bool done = false;
  while (!done) {
    const absl::Status ran = OnLoop([&] {
      Slice slice(parts_.clock, parts_.clock.Now() + EventLoop::kQuantum);
      done = work(slice);
    });
    if (!ran.ok()) return ran;
  }
  return absl::OkStatus();
}

absl::StatusOr<storage::Selection> AdminService::Select(const std::string& tenant, const std::string& ns) const {
  storage::Selection selection;
  if (!tenant.empty()) {
    const absl::StatusOr<TenantId> found = FindTenant(tenant);
    if (!found.ok()) return found.status();
    selection.tenant = *found;
  }
  if (ns.empty()) return selection;
  NamespaceId whole;
  if (ns.size() > whole.bytes.size() || ns.size() < kLeastNsBytes) {
    return Invalid("ns: wrong length; expected ", kLeastNsBytes, " to ", whole.bytes.size(), " bytes");
  }
  size_t known = 0;
  const std::optional<TenantId> only = selection.tenant;
  for (TenantId each = 0; each < parts_.tenants.size(); ++each) {
    if (only && each != *only) continue;
    for (const std::shared_ptr<const Model>& model : parts_.models.List(each, ns)) {
      ++known;
      selection.ns = model->ns;
      selection.tenant = each;
    }
  }
  const std::string hex = absl::BytesToHexString(ns);
  if (known > 1) return Invalid("ns: ambiguous; ", known, " models begin with ", hex, "; give more digits");
  if (known == 1) return selection;
  if (ns.size() < whole.bytes.size()) return absl::NotFoundError(absl::StrCat("ns: no model begins with ", hex));
  std::memcpy(whole.bytes.data(), ns.data(), ns.size());
  selection.ns = whole;
  return selection;
}

absl::Status AdminService::List(const v1::ListRequest& request, v1::ListReply* reply) const {
  absl::StatusOr<storage::Selection> selection = Select(request.tenant(), request.ns());
  if (!selection.ok()) return selection.status();
  constexpr auto kLastKind = static_cast<uint32_t>(ObjectKind::kSpan),
                 kLastTier = static_cast<uint32_t>(TierKind::kSsd);
  if (request.kind() > kLastKind) return Invalid("kind: ", request.kind(), " is unknown; expected 0 to ", kLastKind);
  if (request.tier() > kLastTier) return Invalid("tier: ", request.tier(), " is unknown; expected 0 to ", kLastTier);
  if (request.most() > kLargestPage) return Invalid("most: too many; expected at most ", kLargestPage);
  if (request.kind() != 0) selection->kind = static_cast<ObjectKind>(request.kind());
  selection->tier = static_cast<TierKind>(request.tier());
  const size_t most = request.most() == 0 ? kPage : request.most();
  storage::ObjectId after = request.after();
  std::vector<storage::Listed> page;
  bool ended = false;
  const absl::Status listed = InSlices([&](Slice& slice) {
    ended = parts_.cache.upkeep().inventory().List(*selection, most, after, page, slice);
    return ended || page.size() >= most;
  });
  if (!listed.ok()) return listed;
  for (const storage::Listed& object : page) Write(object, parts_.tenants.at(object.pool.tenant), reply->add_objects());
  reply->set_next(after);
  reply->set_more(!ended);
  return absl::OkStatus();
}

absl::Status AdminService::Erase(const v1::EraseRequest& request, v1::EraseReply* reply) const {
  if (request.tenant().empty() && request.ns().empty()) return Invalid("tenant: tenant or ns is required");
  const absl::StatusOr<storage::Selection> selection = Select(request.tenant(), request.ns());
  if (!selection.ok()) return selection.status();
  if (!selection->tenant) return Invalid("tenant: required, because no engine has opened a model with this namespace");
  const double wait = request.wait_seconds() == 0 ? kMostWait : request.wait_seconds();
  if (!std::isfinite(wait) || wait < 0 || wait > kMostWait)
    return Invalid("wait_seconds: out of range; expected 0 to ", kMostWait);
  if (request.dry_run()) {
    storage::ObjectId after = 0;
    storage::Inventory::Tally tally;
    const absl::Status counted = InSlices(
        [&](Slice& slice) { return parts_.cache.upkeep().inventory().Count(*selection, after, tally, slice); });
    if (counted.ok()) Write(tally, reply);
    return counted;
  }
  const bool everywhere = parts_.cluster != nullptr && !request.this_node();
  return everywhere ? EraseEverywhere(request, *selection, wait, reply) : EraseHere(request, *selection, wait, reply);
}

absl::Status AdminService::EraseHere(const v1::EraseRequest& request, const storage::Selection& selection, double wait,
                                     v1::EraseReply* reply) const {
  absl::StatusOr<Pending> pending = absl::InternalError("the erasure has not started");
  absl::Status ran = OnLoop([&] { pending = ErasureOf(request.erasure(), selection); });
  if (!ran.ok()) return ran;
  if (!pending.ok()) return pending.status();
  storage::Erasure::Progress progress;
  const auto go_on = [&](Slice& slice) {
    pending->erasure->Run(slice);
    progress = pending->erasure->progress();
    if (progress.done) std::erase_if(erasures_, [&](const Pending& each) { return each.token == pending->token; });
    return progress.found_gone;
  };
  ran = InSlices(go_on);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(wait);
  while (ran.ok() && !progress.done && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(kUpkeepPoll);
    ran = OnLoop([&] {
      Slice slice(parts_.clock, parts_.clock.Now() + EventLoop::kQuantum);
      go_on(slice);
    });
  }
  if (!ran.ok()) return ran;
  Write(progress, reply);
  if (!progress.done) reply->set_erasure(pending->token);
  return absl::OkStatus();
}

absl::Status AdminService::EraseEverywhere(const v1::EraseRequest& request, const storage::Selection& selection,
                                           double wait, v1::EraseReply* reply) const {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(wait);
  ClusterErasure::Id id{};
  if (request.erasure().empty()) {
    const auto told = std::make_shared<std::promise<absl::Status>>();
    std::future<absl::Status> answer = told->get_future();
    id = parts_.cluster->Erase(parts_.tenants.at(*selection.tenant), selection.ns,
                               [told](const absl::Status& status) { told->set_value(status); });
    if (answer.wait_for(kDirectoryPatience) != std::future_status::ready) {
      return absl::UnavailableError(
          "the directory does not answer, so the erasure may or may not be recorded; call again");
    }
    if (const absl::Status status = answer.get(); !status.ok()) return status;
  } else if (request.erasure().size() == id.size()) {
    std::ranges::copy(request.erasure(), id.begin());
  } else {
    return Invalid("erasure: wrong length; expected ", id.size(), " bytes");
  }
  std::optional<Cluster::ErasureState> state;
  bool done = false;
  for (bool first = true; first || (!done && std::chrono::steady_clock::now() < deadline); first = false) {
    if (!first) std::this_thread::sleep_for(kUpkeepPoll);
    if (const absl::Status ran = OnLoop([&] { state = parts_.cluster->erasure(id); }); !ran.ok()) return ran;
    if (!state.has_value()) return absl::NotFoundError("erasure: the directory has no erasure with this id");
    done = std::ranges::all_of(state->nodes, [](const auto& node) { return node.second; });
  }
  if (state->here.has_value()) Write(*state->here, reply);
  reply->set_done(done);
  reply->set_erasure(id.data(), id.size());
  for (const auto& [name, has] : state->nodes) {
    v1::EraseNode* node = reply->add_nodes();
    node->set_node(name);
    node->set_done(has);
  }
  return absl::OkStatus();
}

absl::StatusOr<AdminService::Pending> AdminService::ErasureOf(const std::string& token,
                                                              const storage::Selection& selection) const {
  if (!token.empty()) {
    const auto found = std::ranges::find(erasures_, token, &Pending::token);
    if (found != erasures_.end() && found->tenant == *selection.tenant && found->ns == selection.ns) return *found;
    return absl::NotFoundError("erasure: this daemon has no erasure with this id for this tenant; start a new one");
  }
  auto erasure = parts_.cache.upkeep().Erase(*selection.tenant, parts_.tenants.at(*selection.tenant), selection.ns);
  if (!erasure.ok()) return erasure.status();
  parts_.erase_texts_and_pages(*selection.tenant, selection.ns);
  // The command of the oldest one was abandoned or will start again. The disk continues the erasure.
  if (erasures_.size() == kMostPendingErasures) erasures_.pop_front();
  erasures_.push_back({.token = absl::StrCat(absl::Hex(started_, absl::kZeroPad16), "-", ++erasures_begun_),
                       .tenant = *selection.tenant,
                       .ns = selection.ns,
                       .erasure = *std::move(erasure)});
  return erasures_.back();
}

absl::Status AdminService::Verify(const v1::VerifyRequest& request, v1::VerifyReply* reply) const {
  return OnLoop([&] {
    storage::Scrubber& scrubber = parts_.cache.upkeep().scrubber();
    const uint64_t own = scrubber.rate() == 0 ? kVerifyRate : scrubber.rate();
    scrubber.Start(request.bytes_per_second() == 0 ? own : request.bytes_per_second());
    Write(scrubber, scrubber.report(), parts_.tenants, parts_.clock.Now(), reply);
  });
}

absl::Status AdminService::GetVerify(const v1::GetVerifyRequest& request, v1::VerifyReply* reply) const {
  return OnLoop([&] {
    const storage::Scrubber& scrubber = parts_.cache.upkeep().scrubber();
    const bool ended = request.pass() != 0 && scrubber.last_asked().pass == request.pass();
    Write(scrubber, ended ? scrubber.last_asked() : scrubber.report(), parts_.tenants, parts_.clock.Now(), reply);
  });
}

}  // namespace ashlar::daemon
