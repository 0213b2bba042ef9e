// SPDX-License-Identifier: Apache-2.0
// Outcomes of one segment, one reservation, one publish, as storage decides, the daemon counts and the client reports
// them. Numbers travel on the wire and name metrics: never reuse one.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"

namespace ashlar {

// Why a segment has to be computed. A cache failure is a miss; every miss says why.
enum class MissReason : uint8_t {
  kNone = 0,
  kNeverSeen = 1,
  kBeingPublished = 2,  // another engine has reserved it and not yet published
  kEvicted = 3,
  kChecksumFailed = 4,  // the copy was found corrupt and dropped
  kTooShort = 5,        // no interior remains between the seams
  kLeaseLost = 6,       // the lease is unknown, released, expired or another tenant's
  kTierError = 7,
  kBusy = 8,       // a bounded queue, or the reply that would have listed it, was full
  kCancelled = 9,  // the engine gave up before the verdict
  kTimedOut = 10,
  kDaemonUnavailable = 11,
  kAbandoned = 12,            // reserved, but its engine died or ran out of time before publishing
  kInvalidRequest = 13,       // the call made no sense to the daemon, whose log names the field
  kExpired = 14,              // its time to live was over
  kNamespaceDiffers = 15,     // never seen under this identity and layout, but under another one of the same tenant
  kBudgetRefused = 16,        // reserved by an engine, but the tenant's budget had no room for it
  kSlowerThanRecompute = 17,  // bringing it up and landing it would take longer than computing it again
  kDeclined = 18,             // offered by an engine, but landing it would take longer than computing it again
  kCovered = 19,              // none: a cached prefix reaches behind its head, and it was not looked up
  kPeerFailed = 20,           // another node had it, and no node has delivered it whole
  kHolderUnreachable = 21,    // other nodes are known to have it, and none of them answered in time
};
absl::string_view Name(MissReason reason);

// The policy by which an object leaves, or is not taken.
enum class PolicyKind : uint8_t {
  kNone = 0,  // nobody: an error, a death
  kLru = 1,
  kTtl = 2,
  kAdmission = 3,
  kOperator = 4,
  kBreakEven = 5,  // to have it from the cache would take longer than to compute it
  kPrice = 6,      // a new object was worth more a byte
};
absl::string_view Name(PolicyKind policy);

enum class TierKind : uint8_t { kNone = 0, kHbm = 1, kDram = 2, kSsd = 3, kRemote = 4 };
absl::string_view Name(TierKind tier);

enum class ReserveOutcome : uint8_t {
  kGranted = 1,
  kAlreadyPresent = 2,
  kBeingPublished = 3,
  kNoSpace = 4,  // the tenant's budget is full of leased or reserved data
  kTooShort = 5,
  kUnavailable = 6,  // the daemon could not be asked
  kDeclined = 7,     // to land it would take longer than to compute it again
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
  kDeclined = 3,   // worth less than the objects that would have to leave for it
  kNoSpace = 4,    // leased and reserved objects, and other pools' own, leave no room
  kBusy = 5,       // a bounded queue was full
  kBadSource = 6,  // a part is missing or lies outside its region, or what is called exact began with composed state
  kUnavailable = 7,
  kKeptAsSpan = 8,  // no states, but the span that rebuilds them, and those at each depth inside it
};
absl::string_view Name(CommitOutcome outcome);

// What became of an object that another node offered.
enum class TakeOutcome : uint8_t {
  kTaken = 1,           // this node has a copy now
  kAlreadyPresent = 2,  // it had one
  kBeingPublished = 3,  // an engine here computes it
  kNoRoom = 4,          // nothing is free, or what would have to leave is worth more
  kBusy = 5,            // as much is being taken as may be at a time
  kDraining = 6,        // this node stops soon itself
  kFailed = 7,          // the object could not be had from the node that offered it
  kLate = 8,            // it is still on its way
};
absl::string_view Name(TakeOutcome outcome);

// The end that the handing of a text to another node came to.
enum class HandOffOutcome : uint8_t {
  kHanded = 1,       // the node has all of it
  kNothing = 2,      // this node has no states at the text's end
  kNoNode = 3,       // there is no such node, or it cannot be reached
  kRefused = 4,      // the node has not taken all of it: no room, it stops, or the bytes did not come
  kLate = 5,         // the time was over; more of it may still come
  kBusy = 6,         // as many are under way as may be
  kUnavailable = 7,  // the daemon could not be asked, or is in no cluster
};
absl::string_view Name(HandOffOutcome outcome);

// The content of a segment's shared pages.
enum class PageContent : uint8_t {
  kFilled = 1,  // its keys and values: read them in place
  kToFill = 2,  // nothing yet: this request fills them, and says so
  // another request fills them. If it ends without, the duty passes to the oldest request that holds them
  kBeingFilled = 3,
};

}  // namespace ashlar
