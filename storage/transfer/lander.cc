// SPDX-License-Identifier: Apache-2.0
#include "storage/transfer/lander.h"

#include <optional>
#include <utility>

#include "proto/limits.h"
#include "storage/transfer/cancel_flag.h"

namespace ashlar::storage {
namespace {

uint64_t BytesOf(const ObjectHeader& object, const LandTarget::Segment& segment) {
  if (segment.tokens > 0) return object.bytes;
  uint64_t bytes = 0;
  for (const Part& part : object.parts) bytes += IsPaged(part.form) ? 0 : part.Bytes();
  return bytes;
}

// The memory that the request holds until the landing ends: up to 16 MiB of page table, and a record for each object.
uint64_t HeldBytes(const LandTarget& target) {
  constexpr uint64_t kObjectBytes = 256;
  return target.page_table.size() * sizeof(int32_t) + target.segments.size() * kObjectBytes;
}

}  // namespace

class Lander::Landing final : public LandingOwner {
 public:
  Landing(Lander& lander, Name name, TenantId tenant, std::shared_ptr<VerifiedLayers> verified, LandCallbacks callbacks)
      : lander_(lander),
        name_(std::move(name)),
        tenant_(tenant),
        verified_(std::move(verified)),
        callbacks_(std::move(callbacks)) {}

  // Decides which segments can land; returns the mover's sources for them.
  std::vector<LandSource> Sort(std::span<const FoundObject> found, const LandTarget& target);
  void Refuse(MissReason why);  // all segments that could land
  void Start(std::vector<LandSource> sources, LandTarget target);
  void Cancel();
  void Finish(MissReason outcome);

  std::optional<uint64_t> Loaded(size_t source) override;
  void WhenLoaded(size_t source, uint64_t bytes, std::function<void()> resume) override;
  void Landed(uint32_t layers) override;
  void Corrupt(size_t source) override;
  void Ended(MissReason outcome) override { lander_.End(name_, outcome); }

 private:
  friend class Lander;
  void RaiseVerified(uint32_t below);
  void Measure() const;

  Lander& lander_;
  const Name name_;
  const TenantId tenant_;
  std::vector<ObjectReference> objects_;  // one per requested segment; empty for a miss
  std::vector<MissReason> verdict_;       // by segment
  std::vector<uint64_t> bytes_;           // by segment: bytes to move or to verify
  std::vector<size_t> moving_;            // segments that the mover lands, as indices into `objects_`
  std::vector<uint32_t> matched_;         // those segments' indices in the match
  std::vector<uint32_t> layers_;          // attention layers, in the order in which they land
  const std::shared_ptr<VerifiedLayers> verified_;
  const CancelFlag cancel_;
  std::function<void()> resume_;  // while it waits for bytes on their way up
  Nanos started_ = 0;
  Nanos waited_ = 0;                    // time spent waiting for such bytes
  std::optional<Nanos> waiting_since_;  // while it does
  const LandCallbacks callbacks_;
  std::vector<std::function<void()>> quiesced_;
  uint64_t held_bytes_ = 0;
};

std::vector<LandSource> Lander::Landing::Sort(std::span<const FoundObject> found, const LandTarget& target) {
  std::vector<LandSource> sources;
  for (const PagedRows& rows : target.rows) layers_.push_back(rows.layer);
  for (const LandTarget::Segment& segment : target.segments) {
    ObjectReference object;
    MissReason verdict = MissReason::kInvalidRequest;
    if (segment.index < found.size()) {
      object = found[segment.index].object.Share();
      verdict = object ? object->gone : found[segment.index].reason;
      if (object && verdict == MissReason::kNone && !Fits(target, object->header, segment)) {
        verdict = MissReason::kInvalidRequest;
      }
      // The lease is of an engine on another GPU.
      const kernels::Gpu* const gpu = object ? object.tier().gpu() : nullptr;
      const bool far = gpu != nullptr && !target.rows.empty() && GpuOf(target) != gpu;
      if (verdict == MissReason::kNone && far) verdict = MissReason::kInvalidRequest;
    }
    if (verdict == MissReason::kNone) {
      moving_.push_back(verdict_.size());
      matched_.push_back(segment.index);
      sources.push_back({&object->header, &object.copy().slot, segment.first_position, segment.tokens,
                         segment.rotary_shift, &object.tier()});
    }
    verdict_.push_back(verdict);
    bytes_.push_back(object ? BytesOf(object->header, segment) : 0);
    objects_.push_back(std::move(object));
  }
  held_bytes_ = HeldBytes(target);
  return sources;
}

void Lander::Landing::Refuse(MissReason why) {
  for (const size_t segment : moving_) verdict_[segment] = why;
}

void Lander::Landing::Start(std::vector<LandSource> sources, LandTarget target) {
  started_ = lander_.clock_.Now();
  lander_.mover_.Land(tenant_, std::move(sources), std::move(target), cancel_, *this);
}

void Lander::Landing::Cancel() {
  cancel_.Cancel();
  // Nothing is being written for a waiting landing, so it ends now.
  if (const std::function<void()> resume = std::exchange(resume_, nullptr)) resume();
}

std::optional<uint64_t> Lander::Landing::Loaded(size_t source) {
  if (const std::optional<Nanos> since = std::exchange(waiting_since_, std::nullopt)) {
    waited_ += lander_.clock_.Now() - *since;
  }
  const size_t segment = moving_[source];
  const ObjectReference& object = objects_[segment];
  if (object.copy().whole()) return UINT64_MAX;  // also for an object that is gone: its bytes stay
  const MissReason lost = object.Lost();
  if (lost == MissReason::kNone) return object.copy().loaded * limits::kExtentBytes;
  verdict_[segment] = lost;
  return std::nullopt;
}

void Lander::Landing::WhenLoaded(size_t source, uint64_t bytes, std::function<void()> resume) {
  resume_ = resume;
  waiting_since_ = lander_.clock_.Now();
  objects_[moving_[source]].WhenLoaded(bytes, std::move(resume));
}

void Lander::Landing::Landed(uint32_t layers) {
  RaiseVerified(layers_[layers - 1]);
  callbacks_.progress(layers);
}

// A landing verifies the tuples before an attention layer together with it.
void Lander::Landing::RaiseVerified(uint32_t below) {
  for (size_t i = 0; i < moving_.size(); ++i) {
    if (verdict_[moving_[i]] == MissReason::kNone) verified_->Raise(matched_[i], below);
  }
}

void Lander::Landing::Corrupt(size_t source) {
  const size_t segment = moving_[source];
  verdict_[segment] = MissReason::kChecksumFailed;
  lander_.table_.Drop(objects_[segment], MissReason::kChecksumFailed);
}

void Lander::Landing::Finish(MissReason outcome) {
  if (outcome == MissReason::kNone) {
    RaiseVerified(VerifiedLayers::kAll);
    Measure();
  }
  for (const size_t segment : moving_) {
    if (verdict_[segment] == MissReason::kNone) verdict_[segment] = outcome;
  }
}

// Only measures landings of all requested segments.
void Lander::Landing::Measure() const {
  uint64_t bytes = 0;
  for (const size_t segment : moving_) {
    if (verdict_[segment] != MissReason::kNone) return;
    bytes += bytes_[segment];
  }
  lander_.table_.costs()[tenant_].Landed(bytes, lander_.clock_.Now() - started_ - waited_);
}

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

Lander::~Lander() = default;

bool Lander::MayBegin(SessionId session, const Landing& landing) {
  const auto own = of_session_.find(session);
  if (per_session_ <= (own == of_session_.end() ? 0 : own->second)) return false;
  if (!in_flight_.Begin(landing.tenant_, landing.held_bytes_)) return false;
  uint64_t bytes = 0;
  for (const size_t segment : landing.moving_) bytes += landing.bytes_[segment];
  if (!byte_rates_.Take(landing.tenant_, bytes)) {
    in_flight_.End(landing.tenant_, landing.held_bytes_);
    return false;
  }
  ++of_session_[session];
  return true;
}

void Lander::Land(SessionId session, TenantId tenant, LandingId id, std::span<const FoundObject> found,
                  std::shared_ptr<VerifiedLayers> verified, LandTarget target, LandCallbacks callbacks) {
  const Name name(session, id);
  auto landing = std::make_unique<Landing>(*this, name, tenant, std::move(verified), std::move(callbacks));
  std::vector<LandSource> sources = landing->Sort(found, target);
  if (landings_.contains(name)) {
    landing->verdict_.assign(target.segments.size(), MissReason::kInvalidRequest);
    return Conclude(*landing);
  }
  if (sources.empty()) return Conclude(*landing);
  if (!MayBegin(session, *landing)) {
    landing->Refuse(MissReason::kBusy);
    return Conclude(*landing);
  }
  Landing& started = *landings_.emplace(name, std::move(landing)).first->second;
  transfers_.Begin(session);
  started.Start(std::move(sources), std::move(target));
}

void Lander::End(const Name& name, MissReason outcome) {
  const std::unique_ptr<Landing> landing = std::move(landings_.extract(name).mapped());
  const SessionId session = landing->name_.first;
  in_flight_.End(landing->tenant_, landing->held_bytes_);
  if (const auto own = of_session_.find(session); --own->second == 0) of_session_.erase(own);
  landing->Finish(outcome);
  table_.placement().scheduler().PumpCopies();  // landings may have filled the tenant's queue
  Conclude(*landing);
  transfers_.End(session);
}

void Lander::Conclude(Landing& landing) {
  uint64_t landed_bytes = 0;
  for (size_t i = 0; i < landing.verdict_.size(); ++i) {
    const ObjectReference& object = landing.objects_[i];
    if (landing.verdict_[i] == MissReason::kNone) {
      landed_bytes += landing.bytes_[i];
    } else if (object) {
      observer_.Miss(landing.tenant_, object->header.kind, landing.verdict_[i], object->header.tokens);
    } else {
      observer_.Miss(landing.tenant_, ObjectKind::kSegment, landing.verdict_[i], 0);
    }
  }
  if (landed_bytes > 0) observer_.Landed(landing.tenant_, landed_bytes);
  landing.objects_.clear();
  landing.callbacks_.done(std::move(landing.verdict_));
  for (const auto& quiesced : landing.quiesced_) quiesced();
}

void Lander::Quiesce(SessionId session, LandingId id, std::function<void()> quiesced) {
  const auto found = landings_.find({session, id});
  if (found == landings_.end()) return quiesced();
  found->second->quiesced_.push_back(std::move(quiesced));
  found->second->Cancel();
}

void Lander::CloseSession(SessionId session) {
  for (auto next = landings_.lower_bound({session, 0}); next != landings_.end() && next->first.first == session;) {
    Landing& landing = *(next++)->second;  // it may end immediately
    landing.Cancel();
  }
}

}  // namespace ashlar::storage
