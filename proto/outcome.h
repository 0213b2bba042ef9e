// SPDX-License-Identifier: Apache-2.0
// Outcomes of segments, reservations and publishes. Storage decides them, the daemon counts them, and the client
// reports them. The numbers are sent on the wire and name metrics: never reuse one.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"

namespace ashlar {

// Why a segment has to be computed. A cache failure is a miss.
enum class MissReason : uint8_t {
  kNone = 0,
  kNeverSeen = 1,
  kBeingPublished = 2,  // another engine has reserved the object and not published it yet
  kEvicted = 3,
  kChecksumFailed = 4,  // the copy was corrupt and was dropped
  kTooShort = 5,        // no interior remains between the seams
  kLeaseLost = 6,       // the lease is unknown, released, expired or belongs to another tenant
  kTierError = 7,
  kBusy = 8,       // a bounded queue was full, or the reply had no space for the entry
  kCancelled = 9,  // the engine cancelled before the verdict
  kTimedOut = 10,
  kDaemonUnavailable = 11,
  kAbandoned = 12,         // reserved, but the engine exited or timed out before publishing
  kInvalidRequest = 13,    // the daemon refused the call as invalid; its log names the field
  kExpired = 14,           // the time to live has passed
  kNamespaceDiffers = 15,  // never published under this identity and layout, but under another one of the same tenant
  kBudgetRefused = 16,     // reserved by an engine, but the tenant's budget had no space
  kSlowerThanRecompute = 17,  // loading and landing would take longer than recomputing
  kDeclined = 18,             // offered by an engine, but landing would take longer than recomputing
  kCovered = 19,              // not looked up, because a cached prefix covers the segment
  kPeerFailed = 20,           // another node had the object, but no node delivered it completely
  kHolderUnreachable = 21,    // other nodes have the object, but none answered in time
};
absl::string_view Name(MissReason reason);

// The policy that evicted or refused an object.
enum class PolicyKind : uint8_t {
  kNone = 0,  // no policy: an error or an exit
  kLru = 1,
  kTtl = 2,
  kAdmission = 3,
  kOperator = 4,
  kBreakEven = 5,  // loading from the cache would take longer than recomputing
  kPrice = 6,      // a new object was worth more per byte
};
absl::string_view Name(PolicyKind policy);

enum class TierKind : uint8_t { kNone = 0, kHbm = 1, kDram = 2, kSsd = 3, kRemote = 4 };
absl::string_view Name(TierKind tier);

enum class ReserveOutcome : uint8_t {
  kGranted = 1,
  kAlreadyPresent = 2,
  kBeingPublished = 3,
  kNoSpace = 4,  // leased or reserved objects fill the tenant's budget
  kTooShort = 5,
  kUnavailable = 6,  // the daemon was not reachable
  kDeclined = 7,     // landing would take longer than recomputing
};
absl::string_view Name(ReserveOutcome outcome);

enum class PublishOutcome : uint8_t {
  kPublished = 1,
  kUnknownReservation = 2,  // never granted, already used, or reclaimed after its deadline
  kBadSource = 3,           // a source lies outside its region or misses a part; the reservation is dropped
  kBusy = 4,
  kUnavailable = 5,
};
absl::string_view Name(PublishOutcome outcome);

// The outcome of one checkpoint of a text that an engine committed.
enum class CommitOutcome : uint8_t {
  kKept = 1,
  kAlreadyPresent = 2,
  kDeclined = 3,   // worth less than the objects that would have to be evicted
  kNoSpace = 4,    // leased objects, reserved objects and other pools' reserves leave no space
  kBusy = 5,       // a bounded queue was full
  kBadSource = 6,  // a part is missing or outside its region, or states called exact started from composed states
  kUnavailable = 7,
  kKeptAsSpan = 8,  // a span is kept that rebuilds these states and the states at depths inside it
};
absl::string_view Name(CommitOutcome outcome);

// The outcome of an object that another node offered.
enum class TakeOutcome : uint8_t {
  kAccepted = 1,        // this node now has a copy
  kAlreadyPresent = 2,  // this node already had a copy
  kBeingPublished = 3,  // an engine of this node computes it
  kNoSpace = 4,         // no space is free, and the objects that would have to be evicted are worth more
  kBusy = 5,            // too many transfers are in flight
  kDraining = 6,        // this node is draining
  kFailed = 7,          // the transfer from the offering node failed
  kTimedOut = 8,        // the transfer has not finished in time
};
absl::string_view Name(TakeOutcome outcome);

// The outcome of a prefill handoff of a text to another node.
enum class HandoffOutcome : uint8_t {
  kCompleted = 1,    // the node has everything
  kNoStates = 2,     // this node has no states at the end of the text
  kNoNode = 3,       // the node is unknown or not reachable
  kRefused = 4,      // the node did not take everything: no space, draining, or a failed transfer
  kTimedOut = 5,     // the deadline has passed; the rest may still arrive
  kBusy = 6,         // too many handoffs are in flight
  kUnavailable = 7,  // the daemon was not reachable, or is not in a cluster
};
absl::string_view Name(HandoffOutcome outcome);

// The state of a segment's shared pages.
enum class PageContent : uint8_t {
  kFilled = 1,  // keys and values are complete; read them in place
  kToFill = 2,  // empty; this request fills them and reports it
  // another request fills them, or no request can fill them yet; if the filling request ends early, the oldest request
  // that can fill them must do so
  kBeingFilled = 3,
};

}  // namespace ashlar
