// SPDX-License-Identifier: Apache-2.0
#include "client/session/landing.h"

#include <utility>

#include "client/session/rpc.h"

namespace ashlar {

Landing::Landing(Landing&&) noexcept = default;
Landing& Landing::operator=(Landing&&) noexcept = default;
Landing::~Landing() = default;

bool Landing::WaitLayers(uint32_t layers, std::chrono::milliseconds timeout) {
  if (state_->creator.InChild() || state_->call == nullptr) return false;
  if (!state_->call->WaitLayers(state_->attention_layers.CountFor(layers), internal::After(timeout))) return false;
  state_->Arrived(layers);
  return true;
}

std::vector<MissReason> Landing::Wait(std::chrono::milliseconds timeout) {
  State& landing = *state_;
  if (landing.creator.InChild()) {
    return std::vector<MissReason>(landing.tuples.size(), MissReason::kDaemonUnavailable);
  }
  {
    MutexLock lock(landing.mutex);
    if (landing.decided) return landing.reasons;
  }
  const absl::StatusOr<std::vector<uint32_t>> verdict = landing.call->WaitVerdict(internal::After(timeout));
  MutexLock lock(landing.mutex);
  if (landing.decided) return landing.reasons;
  landing.decided = true;
  for (size_t i = 0; i < landing.asked.size(); ++i) {
    MissReason& reason = landing.reasons[landing.asked[i]];
    if (reason != MissReason::kNone) continue;  // of several objects, the first missing one counts
    if (!verdict.ok()) {
      reason = internal::ToMissReason(verdict.status());
    } else if (verdict->size() == landing.asked.size()) {
      reason = internal::ToMissReason((*verdict)[i]);
    } else {
      reason = MissReason::kDaemonUnavailable;  // the daemon answered for other segments
    }
  }
  // The tuples of a missed segment may not have arrived. They are not marked as arrived, so a later landing can bring
  // them.
  for (size_t i = 0; i < landing.reasons.size(); ++i) {
    if (landing.reasons[i] == MissReason::kNone && landing.tuples[i] != nullptr) landing.tuples[i]->Arrived(UINT32_MAX);
  }
  return landing.reasons;
}

bool Landing::quiesced() const {
  if (state_->creator.InChild()) return false;
  return state_->call == nullptr || state_->call->WaitQuiesced(internal::Deadline());
}

bool Landing::WaitQuiesced(std::chrono::milliseconds timeout) {
  if (state_->creator.InChild()) return false;
  return state_->call == nullptr || state_->call->WaitQuiesced(internal::After(timeout));
}

}  // namespace ashlar
