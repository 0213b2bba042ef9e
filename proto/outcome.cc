// SPDX-License-Identifier: Apache-2.0
#include "proto/outcome.h"

namespace ashlar {

absl::string_view Name(MissReason reason) {
  switch (reason) {
    case MissReason::kNone:
      return "none";
    case MissReason::kNeverSeen:
      return "never_seen";
    case MissReason::kBeingPublished:
      return "being_published";
    case MissReason::kEvicted:
      return "evicted";
    case MissReason::kChecksumFailed:
      return "checksum_failed";
    case MissReason::kTooShort:
      return "too_short";
    case MissReason::kLeaseLost:
      return "lease_lost";
    case MissReason::kTierError:
      return "tier_error";
    case MissReason::kBusy:
      return "busy";
    case MissReason::kCancelled:
      return "cancelled";
    case MissReason::kTimedOut:
      return "timed_out";
    case MissReason::kDaemonUnavailable:
      return "daemon_unavailable";
    case MissReason::kAbandoned:
      return "abandoned";
    case MissReason::kInvalidRequest:
      return "invalid_request";
    case MissReason::kExpired:
      return "expired";
    case MissReason::kNamespaceDiffers:
      return "namespace_differs";
    case MissReason::kBudgetRefused:
      return "budget_refused";
    case MissReason::kSlowerThanRecompute:
      return "slower_than_recompute";
    case MissReason::kDeclined:
      return "declined";
    case MissReason::kCovered:
      return "covered";
    case MissReason::kPeerFailed:
      return "peer_failed";
    case MissReason::kHolderUnreachable:
      return "holder_unreachable";
  }
  return "unknown";
}

absl::string_view Name(PolicyKind policy) {
  switch (policy) {
    case PolicyKind::kNone:
      return "none";
    case PolicyKind::kLru:
      return "lru";
    case PolicyKind::kTtl:
      return "ttl";
    case PolicyKind::kAdmission:
      return "admission";
    case PolicyKind::kOperator:
      return "operator";
    case PolicyKind::kBreakEven:
      return "break_even";
    case PolicyKind::kPrice:
      return "price";
  }
  return "unknown";
}

absl::string_view Name(TierKind tier) {
  switch (tier) {
    case TierKind::kNone:
      return "none";
    case TierKind::kHbm:
      return "hbm";
    case TierKind::kDram:
      return "dram";
    case TierKind::kSsd:
      return "ssd";
    case TierKind::kRemote:
      return "remote";
  }
  return "unknown";
}

absl::string_view Name(ReserveOutcome outcome) {
  switch (outcome) {
    case ReserveOutcome::kGranted:
      return "granted";
    case ReserveOutcome::kAlreadyPresent:
      return "already_present";
    case ReserveOutcome::kBeingPublished:
      return "being_published";
    case ReserveOutcome::kNoSpace:
      return "no_space";
    case ReserveOutcome::kTooShort:
      return "too_short";
    case ReserveOutcome::kUnavailable:
      return "unavailable";
    case ReserveOutcome::kDeclined:
      return "declined";
  }
  return "unknown";
}

absl::string_view Name(PublishOutcome outcome) {
  switch (outcome) {
    case PublishOutcome::kPublished:
      return "published";
    case PublishOutcome::kUnknownReservation:
      return "unknown_reservation";
    case PublishOutcome::kBadSource:
      return "bad_source";
    case PublishOutcome::kBusy:
      return "busy";
    case PublishOutcome::kUnavailable:
      return "unavailable";
  }
  return "unknown";
}

absl::string_view Name(TakeOutcome outcome) {
  switch (outcome) {
    case TakeOutcome::kAccepted:
      return "accepted";
    case TakeOutcome::kAlreadyPresent:
      return "already_present";
    case TakeOutcome::kBeingPublished:
      return "being_published";
    case TakeOutcome::kNoSpace:
      return "no_space";
    case TakeOutcome::kBusy:
      return "busy";
    case TakeOutcome::kDraining:
      return "draining";
    case TakeOutcome::kFailed:
      return "failed";
    case TakeOutcome::kTimedOut:
      return "timed_out";
  }
  return "unknown";
}

absl::string_view Name(HandoffOutcome outcome) {
  switch (outcome) {
    case HandoffOutcome::kCompleted:
      return "completed";
    case HandoffOutcome::kNoStates:
      return "no_states";
    case HandoffOutcome::kNoNode:
      return "no_node";
    case HandoffOutcome::kRefused:
      return "refused";
    case HandoffOutcome::kTimedOut:
      return "timed_out";
    case HandoffOutcome::kBusy:
      return "busy";
    case HandoffOutcome::kUnavailable:
      return "unavailable";
  }
  return "unknown";
}

absl::string_view Name(CommitOutcome outcome) {
  switch (outcome) {
    case CommitOutcome::kKept:
      return "kept";
    case CommitOutcome::kAlreadyPresent:
      return "already_present";
    case CommitOutcome::kDeclined:
      return "declined";
    case CommitOutcome::kNoSpace:
      return "no_space";
    case CommitOutcome::kBusy:
      return "busy";
    case CommitOutcome::kBadSource:
      return "bad_source";
    case CommitOutcome::kUnavailable:
      return "unavailable";
    case CommitOutcome::kKeptAsSpan:
      return "kept_as_span";
  }
  return "unknown";
}

}  // namespace ashlar
