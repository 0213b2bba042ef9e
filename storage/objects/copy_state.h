// SPDX-License-Identifier: Apache-2.0
// CopyState: the life of an object's copy in one tier, as a table of transitions.
//
// A copy is in one phase. It also counts its readers and its users. Every change of the three goes through
// CopyStates::Apply, which looks the event up in kCopyTransitions. An event that the table does not list for the
// copy's phase is a programming error: the process ends, because the bytes of one object would be taken for another's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace ashlar::storage {

enum class CopyPhase : uint8_t {
  kNone,        // no space is allocated
  kCopying,     // space is allocated; the first `loaded` extents are there
  kCommitting,  // on a disk: written, but not yet acknowledged
  kWhole,       // complete; until Entry::ready is set, a reservation that a publisher writes
  kDraining,    // cancelled, while pieces of it are still being written
  kBroken,      // the bytes are invalid; the space stays until its last reader and user are gone
};
inline constexpr size_t kCopyPhases = 6;

enum class CopyEvent : uint8_t {
  kAllocate,   // space was allocated
  kReserve,    // the space is for a publisher, which writes it
  kAdopt,      // the bytes exist: a restart found them, or another node has them
  kLoad,       // all bytes arrived in memory
  kWrite,      // all bytes are written to the disk
  kCommit,     // the disk acknowledged the copy
  kFail,       // a read, write or commit failed
  kAbandon,    // unwanted before any byte moved
  kCancel,     // unwanted while bytes move
  kDrain,      // the last piece of a cancelled copy ended
  kRefill,     // the last piece of a cancelled copy ended, but a user arrived: the space is filled again
  kRelease,    // the space is given back
  kAddReader,  // another copy or a check reads the bytes
  kRemoveReader,
  kAddUser,  // a reference keeps the copy in place, or waits for it
  kRemoveUser,
};
inline constexpr size_t kCopyEvents = 16;

// Conditions besides the phase. Bits; all of them must hold.
enum CopyGuard : uint8_t {
  kAlways = 0,
  kLive = 1,      // lookups find the object
  kGone = 2,      // lookups no longer find it
  kHasUsers = 4,  // the copy has users
  kUnwanted = 8,  // the copy has no users, or the object is gone
  kIdle = 16,     // the copy has neither readers nor users
};

struct CopyTransition {
  CopyEvent event;
  CopyPhase from;
  uint8_t guard;  // bits of CopyGuard
  CopyPhase to;
};

// Rows of one event are adjacent, and so are those of one phase. At most one of them matches.
inline constexpr auto kCopyTransitions = [] {
  using enum CopyEvent;
  using enum CopyPhase;
  return std::to_array<CopyTransition>({
      {kAllocate, kNone, kLive, kCopying},
      {kReserve, kCopying, kLive, kWhole},
      {kAdopt, kNone, kLive, kWhole},
      {kLoad, kCopying, kAlways, kWhole},
      {kWrite, kCopying, kAlways, kCommitting},
      {kCommit, kCommitting, kLive, kWhole},
      {kCommit, kCommitting, kGone, kWhole},
      {kFail, kCopying, kAlways, kBroken},
      {kFail, kCommitting, kLive, kBroken},
      {kFail, kCommitting, kGone, kBroken},
      {kAbandon, kCopying, kAlways, kBroken},
      {kCancel, kCopying, kLive, kDraining},
      {kCancel, kCopying, kGone, kDraining},
      {kDrain, kDraining, kLive | kUnwanted, kBroken},
      {kDrain, kDraining, kGone, kBroken},
      {kRefill, kDraining, kLive | kHasUsers, kCopying},
      {kRelease, kWhole, kLive | kIdle, kNone},
      {kRelease, kWhole, kGone | kIdle, kNone},
      {kRelease, kBroken, kLive | kIdle, kNone},
      {kRelease, kBroken, kGone | kIdle, kNone},
      {kAddReader, kCopying, kLive, kCopying},
      {kAddReader, kCommitting, kLive, kCommitting},
      {kAddReader, kWhole, kLive, kWhole},
      {kRemoveReader, kCopying, kAlways, kCopying},
      {kRemoveReader, kCommitting, kAlways, kCommitting},
      {kRemoveReader, kWhole, kAlways, kWhole},
      {kRemoveReader, kDraining, kAlways, kDraining},
      {kRemoveReader, kBroken, kAlways, kBroken},
      {kAddUser, kNone, kAlways, kNone},
      {kAddUser, kCopying, kAlways, kCopying},
      {kAddUser, kWhole, kAlways, kWhole},
      {kAddUser, kDraining, kAlways, kDraining},
      {kAddUser, kBroken, kAlways, kBroken},
      {kRemoveUser, kNone, kAlways, kNone},
      {kRemoveUser, kCopying, kAlways, kCopying},
      {kRemoveUser, kWhole, kAlways, kWhole},
      {kRemoveUser, kDraining, kAlways, kDraining},
      {kRemoveUser, kBroken, kAlways, kBroken},
  });
}();

// How often each row was taken.
using CopyTransitionCounts = std::array<uint64_t, kCopyTransitions.size()>;

class CopyState {
 public:
  CopyPhase phase() const { return phase_; }
  uint32_t readers() const { return readers_; }
  uint32_t users() const { return users_; }
  bool busy() const { return readers_ > 0 || users_ > 0; }
  // Also true for a reservation, whose bytes are there only when Entry::ready is set.
  bool whole() const { return phase_ == CopyPhase::kWhole; }
  // A copy on a disk can be read before the disk has acknowledged it.
  bool readable() const { return whole() || phase_ == CopyPhase::kCommitting; }

 private:
  friend class CopyStates;
  uint32_t readers_ = 0;
  uint32_t users_ = 0;
  CopyPhase phase_ = CopyPhase::kNone;
};

// Applies events.
class CopyStates {
 public:
  // `transition_counts` counts the transitions; null: they are not counted.
  explicit CopyStates(CopyTransitionCounts* transition_counts = nullptr) : transition_counts_(transition_counts) {}

  void Apply(CopyState& copy, CopyEvent event, bool gone) const;

 private:
  CopyTransitionCounts* const transition_counts_;
};

// Describes a row in words: "cancel in copying, gone".
std::string Describe(const CopyTransition& transition);

}  // namespace ashlar::storage
