#include "storage/composer.h"

#include <algorithm>
#include <utility>

#include "storage/tuple_table.h"

namespace ashlar::storage {
namespace {

bool HasTuples(const ObjectHeader& object, const Composition& composition) {
  return std::ranges::all_of(
      composition.layers, [&](const Composition::Layer& layer) { return HasTuple(object, layer.layer, layer.shape); });
}

}  // namespace

Composer::Composer(Pool& pool, Mover& mover, Drain& drain, const Clock& clock, size_t per_session, Observer& observer)
    : pool_(pool), mover_(mover), drain_(drain), clock_(clock), per_session_(per_session), observer_(observer) {}

void Composer::Compose(SessionId session, TenantId tenant, LandingId id, std::span<const Pool::Result> found,
                       const VerifiedLayers& verified, Composition composition, Done done) {
  const Name name(session, id);
  InFlight call{.tenant = tenant, .begin = clock_.Now(), .done = std::move(done)};
  Collect(call, found, composition);
  MissReason& outcome = call.verdict.outcome;
  if (compositions_.contains(name)) outcome = MissReason::kInvalidRequest;
  if (outcome == MissReason::kNone && CountOf(session) >= per_session_) outcome = MissReason::kBusy;
  if (outcome != MissReason::kNone) return Conclude(std::move(call));

  std::vector<ComposeSource> sources;
  for (size_t i = 0; i < composition.interiors.size(); ++i) {
    const Pool::Reference& object = call.objects[i];
    ComposeSource& source = sources.emplace_back(ComposeSource{&object->header, &object->slot, {}});
    for (const Composition::Layer& layer : composition.layers) {
      source.verified.push_back(verified.Contains(composition.interiors[i].segment, layer.layer));
    }
  }
  const CancelFlag cancel = call.cancel;
  compositions_.emplace(name, std::move(call));
  drain_.Begin(session);
  const bool queued = mover_.Compose(
      std::move(sources), std::move(composition), cancel,
      [this, name](const std::vector<bool>& corrupt, bool cancelled) { Finish(name, corrupt, cancelled); });
  if (queued) return;
  InFlight refused = std::move(compositions_.extract(name).mapped());
  refused.verdict.outcome = MissReason::kBusy;
  Conclude(std::move(refused));
  drain_.End(session);
}

void Composer::Collect(InFlight& call, std::span<const Pool::Result> found, const Composition& composition) {
  for (const Composition::Interior& interior : composition.interiors) {
    Pool::Reference object;
    MissReason reason = MissReason::kInvalidRequest;
    if (interior.segment < found.size()) {
      object = found[interior.segment].object.Share();
      reason = object ? object->gone : found[interior.segment].reason;
      if (reason == MissReason::kNone && !HasTuples(object->header, composition)) reason = MissReason::kInvalidRequest;
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

void Composer::Finish(const Name& name, const std::vector<bool>& corrupt, bool cancelled) {
  InFlight call = std::move(compositions_.extract(name).mapped());
  if (cancelled) call.verdict.outcome = MissReason::kCancelled;
  for (size_t i = 0; i < corrupt.size(); ++i) {
    if (!corrupt[i]) continue;
    call.verdict.outcome = call.verdict.interiors[i] = MissReason::kChecksumFailed;
    pool_.Drop(call.objects[i], MissReason::kChecksumFailed);
  }
  Conclude(std::move(call));
  drain_.End(name.first);
}

void Composer::Conclude(InFlight call) {
  observer_.Composed(call.tenant, call.verdict.outcome, clock_.Now() - call.begin);
  call.objects.clear();
  call.done(std::move(call.verdict));
  for (const auto& quiet : call.quiet) quiet();
}

void Composer::Quiesce(SessionId session, LandingId id, std::function<void()> quiet) {
  const auto found = compositions_.find({session, id});
  if (found == compositions_.end()) return quiet();
  found->second.cancel.Cancel();
  found->second.quiet.push_back(std::move(quiet));
}

void Composer::CloseSession(SessionId session) {
  for (auto found = compositions_.lower_bound({session, 0});
       found != compositions_.end() && found->first.first == session; ++found) {
    found->second.cancel.Cancel();
  }
}

}  // namespace ashlar::storage
