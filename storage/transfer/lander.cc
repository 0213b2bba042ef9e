// SPDX-License-Identifier: Apache-2.0
#include "storage/transfer/lander.h"

#include <utility>

#include "proto/limits.h"

namespace ashlar::storage {
namespace {

uint64_t BytesOf(const ObjectHeader& object, const LandTarget::Segment& segment) {
  if (segment.tokens > 0) return object.bytes;
  uint64_t bytes = 0;
  for (const Part& part : object.parts) bytes += IsPaged(part.form) ? 0 : part.Bytes();
  return bytes;
}

// Memory of the request until the landing ends: up to 16 MiB of page table, and state per object.
uint64_t HeldBytes(const LandTarget& target) {
  constexpr uint64_t kObjectBytes = 256;
  return target.page_table.size() * sizeof(int32_t) + target.segments.size() * kObjectBytes;
}

}  // namespace

Lander::Lander(ObjectTable& table, Mover& mover, const Clock& clock, SessionTransfers& transfers, InFlight& in_flight,
               Rates& byte_rates, size_t per_session, Observer& observer)
    : table_(table),
      mover_(mover),
      clock_(clock),
      transfers_(transfers),
      in_flight_(in_flight),
      byte_rates_(byte_rates),
      per_session_(per_session),
      observer_(observer) {}

bool Lander::MayBegin(SessionId session, const ActiveLanding& landing) {
  const auto own = of_session_.find(session);
  if (per_session_ <= (own == of_session_.end() ? 0 : own->second)) return false;
  if (!in_flight_.Begin(landing.tenant, landing.held_bytes)) return false;
  uint64_t bytes = 0;
  for (const size_t segment : landing.moving) bytes += landing.bytes[segment];
  if (!byte_rates_.Take(landing.tenant, bytes)) {
    in_flight_.End(landing.tenant, landing.held_bytes);
    return false;
  }
  ++of_session_[session];
  return true;
}

void Lander::Land(SessionId session, TenantId tenant, LandingId id, std::span<const ObjectTable::Result> found,
                  std::shared_ptr<VerifiedLayers> verified, LandTarget target, LandCallbacks callbacks) {
  const Name name(session, id);
  ActiveLanding landing{.tenant = tenant, .verified = std::move(verified), .callbacks = std::move(callbacks)};
  for (const PagedRows& rows : target.rows) landing.layers.push_back(rows.layer);
  std::vector<LandSource> sources = Sort(landing, found, target);
  if (landings_.contains(name)) {
    landing.verdict.assign(target.segments.size(), MissReason::kInvalidRequest);
    return Conclude(std::move(landing));
  }
  if (sources.empty()) return Conclude(std::move(landing));
  landing.held_bytes = HeldBytes(target);
  if (!MayBegin(session, landing)) {
    for (const size_t segment : landing.moving) landing.verdict[segment] = MissReason::kBusy;
    return Conclude(std::move(landing));
  }
  landing.started = clock_.Now();
  landings_.emplace(name, std::move(landing));
  transfers_.Begin(session);
  Start(name, std::move(sources), std::move(target));
}

std::vector<LandSource> Lander::Sort(ActiveLanding& landing, std::span<const ObjectTable::Result> found,
                                     const LandTarget& target) {
  std::vector<LandSource> sources;
  for (const LandTarget::Segment& segment : target.segments) {
    ObjectTable::Reference object;
    MissReason verdict = MissReason::kInvalidRequest;
    if (segment.index < found.size()) {
      object = found[segment.index].object.Share();
      verdict = object ? object->gone : found[segment.index].reason;
      if (object && verdict == MissReason::kNone && !Fits(target, object->header, segment)) {
        verdict = MissReason::kInvalidRequest;
      }
      // The lease belongs to an engine on another GPU.
      const kernels::Gpu* const gpu = object ? object.tier().gpu() : nullptr;
      const bool far = gpu != nullptr && !target.rows.empty() && GpuOf(target) != gpu;
      if (verdict == MissReason::kNone && far) verdict = MissReason::kInvalidRequest;
    }
    if (verdict == MissReason::kNone) {
      landing.moving.push_back(landing.verdict.size());
      landing.segments.push_back(segment.index);
      sources.push_back({&object->header, &object.copy().slot, segment.first_position, segment.tokens,
                         segment.rotary_shift, &object.tier()});
    }
    landing.verdict.push_back(verdict);
    landing.bytes.push_back(object ? BytesOf(object->header, segment) : 0);
    landing.objects.push_back(std::move(object));
  }
  return sources;
}

void Lander::Start(const Name& name, std::vector<LandSource> sources, LandTarget target) {
  const ActiveLanding& landing = landings_.at(name);
  mover_.Land(
      landing.tenant, std::move(sources), std::move(target), landing.cancel,
      {.loaded = [this, name](size_t source) { return Loaded(name, source); },
       .blocked = [this, name](size_t source, uint64_t bytes,
                               std::function<void()> resume) { Blocked(name, source, bytes, std::move(resume)); },
       .progress = [this, name](uint32_t layers) { Progress(name, layers); },
       .corrupt = [this, name](size_t source) { Corrupt(name, source); },
       .done = [this, name](MissReason outcome) { Finish(name, outcome); }});
}

std::optional<uint64_t> Lander::Loaded(const Name& name, size_t source) {
  ActiveLanding& landing = landings_.at(name);
  if (const std::optional<Nanos> since = std::exchange(landing.waiting_since, std::nullopt)) {
    landing.waited += clock_.Now() - *since;
  }
  const size_t segment = landing.moving[source];
  const ObjectTable::Reference& object = landing.objects[segment];
  if (object.copy().whole()) return UINT64_MAX;  // also if it has ended: its bytes stay
  const MissReason lost = table_.Lost(object);
  if (lost == MissReason::kNone) return object.copy().loaded * limits::kExtentBytes;
  landing.verdict[segment] = lost;
  return std::nullopt;
}

void Lander::Blocked(const Name& name, size_t source, uint64_t bytes, std::function<void()> resume) {
  ActiveLanding& landing = landings_.at(name);
  landing.resume = resume;
  landing.waiting_since = clock_.Now();
  table_.WhenLoaded(landing.objects[landing.moving[source]], bytes, std::move(resume));
}

void Lander::Cancel(ActiveLanding& landing) {
  landing.cancel.Cancel();
  // A waiting landing has no writes in flight, so it ends now.
  if (const std::function<void()> resume = std::exchange(landing.resume, nullptr)) resume();
}

void Lander::Progress(const Name& name, uint32_t layers) {
  const ActiveLanding& landing = landings_.at(name);
  Verified(landing, landing.layers[layers - 1]);
  landing.callbacks.progress(layers);
}

// A landing verifies the tuples before an attention layer together with that layer.
void Lander::Verified(const ActiveLanding& landing, uint32_t below) {
  for (size_t i = 0; i < landing.moving.size(); ++i) {
    if (landing.verdict[landing.moving[i]] == MissReason::kNone) landing.verified->Raise(landing.segments[i], below);
  }
}

void Lander::Corrupt(const Name& name, size_t source) {
  ActiveLanding& landing = landings_.at(name);
  const size_t segment = landing.moving[source];
  landing.verdict[segment] = MissReason::kChecksumFailed;
  table_.Drop(landing.objects[segment], MissReason::kChecksumFailed);
}

void Lander::Finish(const Name& name, MissReason outcome) {
  ActiveLanding landing = std::move(landings_.extract(name).mapped());
  in_flight_.End(landing.tenant, landing.held_bytes);
  if (const auto own = of_session_.find(name.first); --own->second == 0) of_session_.erase(own);
  if (outcome == MissReason::kNone) {
    Verified(landing, VerifiedLayers::kAll);
    Measure(landing);
  }
  for (const size_t segment : landing.moving) {
    if (landing.verdict[segment] == MissReason::kNone) landing.verdict[segment] = outcome;
  }
  Conclude(std::move(landing));
  transfers_.End(name.first);
}

// Measures only complete landings.
void Lander::Measure(const ActiveLanding& landing) {
  uint64_t bytes = 0;
  for (const size_t segment : landing.moving) {
    if (landing.verdict[segment] != MissReason::kNone) return;
    bytes += landing.bytes[segment];
  }
  table_.Landed(landing.tenant, bytes, clock_.Now() - landing.started - landing.waited);
}

void Lander::Conclude(ActiveLanding landing) {
  uint64_t landed_bytes = 0;
  for (size_t i = 0; i < landing.verdict.size(); ++i) {
    const ObjectTable::Reference& object = landing.objects[i];
    if (landing.verdict[i] == MissReason::kNone) {
      landed_bytes += landing.bytes[i];
    } else if (object) {
      observer_.Miss(landing.tenant, object->header.kind, landing.verdict[i], object->header.tokens);
    } else {
      observer_.Miss(landing.tenant, ObjectKind::kSegment, landing.verdict[i], 0);
    }
  }
  if (landed_bytes > 0) observer_.Landed(landing.tenant, landed_bytes);
  landing.objects.clear();
  landing.callbacks.done(std::move(landing.verdict));
  for (const auto& quiet : landing.quiet) quiet();
}

void Lander::Quiesce(SessionId session, LandingId id, std::function<void()> quiet) {
  const auto found = landings_.find({session, id});
  if (found == landings_.end()) return quiet();
  found->second.quiet.push_back(std::move(quiet));
  Cancel(found->second);
}

void Lander::CloseSession(SessionId session) {
  for (auto next = landings_.lower_bound({session, 0}); next != landings_.end() && next->first.first == session;) {
    ActiveLanding& landing = (next++)->second;  // advanced first, because this one may end immediately
    Cancel(landing);
  }
}

}  // namespace ashlar::storage
