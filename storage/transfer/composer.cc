// SPDX-License-Identifier: Apache-2.0
#include "storage/transfer/composer.h"

#include <algorithm>
#include <utility>

#include "storage/transfer/tuple_table.h"

namespace ashlar::storage {
namespace {

bool HasTuples(const ObjectHeader& object, const Composition& composition) {
  return std::ranges::all_of(
      composition.layers, [&](const Composition::Layer& layer) { return HasTuple(object, layer.layer, layer.shape); });
}

// Memory of the request until the composition ends.
uint64_t HeldBytes(const Composition& composition) {
  uint64_t bytes = composition.interiors.size() * (sizeof(Composition::Interior) + sizeof(ComposeSource));
  for (const Composition::Layer& layer : composition.layers) {
    bytes += sizeof layer + layer.steps.size() * sizeof(Composition::Step);
  }
  return bytes;
}

}  // namespace

Composer::Composer(ObjectTable& table, Mover& mover, SessionTransfers& transfers, const Clock& clock,
                   InFlight& in_flight, size_t per_session, Observer& observer)
    : table_(table),
      mover_(mover),
      transfers_(transfers),
      clock_(clock),
      in_flight_(in_flight),
      per_session_(per_session),
      observer_(observer) {}

void Composer::Compose(SessionId session, TenantId tenant, LandingId id, std::span<const FoundObject> found,
                       const VerifiedLayers& verified, Composition composition, Done done) {
  const Name name(session, id);
  Call call{.tenant = tenant, .begin = clock_.Now(), .done = std::move(done)};
  Collect(call, found, composition);
  MissReason& outcome = call.verdict.outcome;
  if (compositions_.contains(name)) outcome = MissReason::kInvalidRequest;
  if (outcome == MissReason::kNone && CountOf(session) >= per_session_) outcome = MissReason::kBusy;
  call.held_bytes = HeldBytes(composition);
  if (outcome == MissReason::kNone && !in_flight_.Begin(tenant, call.held_bytes)) outcome = MissReason::kBusy;
  if (outcome != MissReason::kNone) return Conclude(std::move(call));

  for (size_t i = 0; i < composition.interiors.size(); ++i) {
    const ObjectReference& object = call.objects[i];
    ComposeSource& source =
        call.sources.emplace_back(ComposeSource{&object->header, &object.copy().slot, {}, &object.tier()});
    for (const Composition::Layer& layer : composition.layers) {
      source.verified.push_back(verified.Contains(composition.interiors[i].segment, layer.layer));
    }
  }
  call.composition = std::move(composition);
  compositions_.emplace(name, std::move(call));
  transfers_.Begin(session);
  Continue(name);
}

void Composer::Continue(const Name& name) {
  const auto found = compositions_.find(name);
  if (found == compositions_.end() || found->second.started) return;
  Call& call = found->second;
  CompositionVerdict& verdict = call.verdict;
  if (call.cancel.cancelled()) verdict.outcome = MissReason::kCancelled;
  for (size_t i = 0; i < call.objects.size() && verdict.outcome == MissReason::kNone; ++i) {
    // Its last byte is reported before it counts as whole.
    if (call.objects[i].copy().loaded >= call.objects[i]->header.Extents()) continue;
    verdict.interiors[i] = verdict.outcome = call.objects[i].Lost();
    if (verdict.outcome != MissReason::kNone) break;
    return call.objects[i].WhenLoaded(call.objects[i]->header.bytes, [this, name] { Continue(name); });
  }
  if (verdict.outcome != MissReason::kNone) return End(name);
  Start(name, call);
}

void Composer::Start(const Name& name, Call& call) {
  call.started = true;
  const bool queued = mover_.Compose(
      call.tenant, std::move(call.sources), std::move(call.composition), call.cancel,
      [this, name](const std::vector<bool>& corrupt, MissReason outcome) { Finish(name, corrupt, outcome); });
  if (queued) return;
  call.verdict.outcome = MissReason::kBusy;
  End(name);
}

void Composer::Collect(Call& call, std::span<const FoundObject> found, const Composition& composition) {
  for (const Composition::Interior& interior : composition.interiors) {
    ObjectReference object;
    MissReason reason = MissReason::kInvalidRequest;
    if (interior.segment < found.size()) {
      object = found[interior.segment].object.Share();
      reason = object ? object->gone : found[interior.segment].reason;
      const kernels::Gpu* const gpu = object ? object.tier().gpu() : nullptr;
      const bool reached =
          gpu == nullptr || gpu == composition.gpu;  // otherwise the lease belongs to an engine on another GPU
      if (reason == MissReason::kNone && (!reached || !HasTuples(object->header, composition))) {
        reason = MissReason::kInvalidRequest;
      }
    }
    call.objects.push_back(std::move(object));
    call.verdict.interiors.push_back(reason);
    if (call.verdict.outcome == MissReason::kNone) call.verdict.outcome = reason;
  }
}

size_t Composer::CountOf(SessionId session) const {
  const auto begin = compositions_.lower_bound({session, 0}), end = compositions_.lower_bound({session + 1, 0});
  return static_cast<size_t>(std::distance(begin, end));
}

void Composer::Finish(const Name& name, const std::vector<bool>& corrupt, MissReason outcome) {
  Call& call = compositions_.at(name);
  call.verdict.outcome = outcome;
  for (size_t i = 0; i < corrupt.size(); ++i) {
    if (!corrupt[i]) continue;
    call.verdict.outcome = call.verdict.interiors[i] = MissReason::kChecksumFailed;
    table_.Drop(call.objects[i], MissReason::kChecksumFailed);
  }
  End(name);
}

void Composer::End(const Name& name) {
  const SessionId session = name.first;  // copied, because the name may belong to an object that ends here
  Call call = std::move(compositions_.extract(name).mapped());
  in_flight_.End(call.tenant, call.held_bytes);
  table_.placement().scheduler().PumpCopies();  // compositions may have filled the tenant's queue
  Conclude(std::move(call));
  transfers_.End(session);
}

void Composer::Conclude(Call call) {
  observer_.Composed(call.tenant, call.verdict.outcome, clock_.Now() - call.begin);
  call.objects.clear();
  call.done(std::move(call.verdict));
  for (const auto& quiesced : call.quiesced) quiesced();
}

void Composer::Quiesce(SessionId session, LandingId id, std::function<void()> quiesced) {
  const auto found = compositions_.find({session, id});
  if (found == compositions_.end()) return quiesced();
  found->second.quiesced.push_back(std::move(quiesced));
  Cancel(Name(found->first), found->second);
}

void Composer::Cancel(const Name& name, Call& call) {
  call.cancel.Cancel();
  Continue(name);  // a waiting composition ends now
}

void Composer::CloseSession(SessionId session) {
  for (auto next = compositions_.lower_bound({session, 0});
       next != compositions_.end() && next->first.first == session;) {
    const auto found = next++;  // advanced first, because this one may end immediately
    Cancel(Name(found->first), found->second);
  }
}

}  // namespace ashlar::storage
