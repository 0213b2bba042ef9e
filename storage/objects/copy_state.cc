// SPDX-License-Identifier: Apache-2.0
#include "storage/objects/copy_state.h"

#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_cat.h"

namespace ashlar::storage {
namespace {

constexpr const char* kPhaseNames[kCopyPhases] = {"none", "copying", "committing", "whole", "draining", "broken"};
constexpr const char* kCopyEventNames[kCopyEvents] = {
    "allocate", "reserve", "adopt",  "load",    "write",      "commit",        "fail",     "abandon",
    "cancel",   "drain",   "refill", "release", "add reader", "remove reader", "add user", "remove user"};

// The first row of an event in a phase; kCopyTransitions.size() if there is none.
constexpr auto kFirstRows = [] {
  std::array<std::array<uint8_t, kCopyPhases>, kCopyEvents> rows{};
  for (auto& row : rows) row.fill(static_cast<uint8_t>(kCopyTransitions.size()));
  for (size_t i = kCopyTransitions.size(); i-- > 0;) {
    rows[static_cast<size_t>(kCopyTransitions[i].event)][static_cast<size_t>(kCopyTransitions[i].from)] =
        static_cast<uint8_t>(i);
  }
  return rows;
}();

bool Holds(uint8_t guard, const CopyState& copy, bool gone) {
  const bool unwanted = copy.users() == 0 || gone;
  return ((guard & kLive) == 0 || !gone) && ((guard & kGone) == 0 || gone) &&
         ((guard & kHasUsers) == 0 || copy.users() > 0) && ((guard & kUnwanted) == 0 || unwanted) &&
         ((guard & kIdle) == 0 || !copy.busy());
}

[[noreturn]] void Refuse(const CopyState& copy, CopyEvent event, bool gone) {
  std::fprintf(stderr, "copy of an object: event \"%s\" is not allowed: phase %s, %u readers, %u users, object %s\n",
               kCopyEventNames[static_cast<size_t>(event)], kPhaseNames[static_cast<size_t>(copy.phase())],
               copy.readers(), copy.users(), gone ? "gone" : "live");
  std::abort();
}

}  // namespace

void CopyStates::Apply(CopyState& copy, CopyEvent event, bool gone) const {
  size_t row = kFirstRows[static_cast<size_t>(event)][static_cast<size_t>(copy.phase_)];
  const auto applies = [&] {
    return row < kCopyTransitions.size() && kCopyTransitions[row].event == event &&
           kCopyTransitions[row].from == copy.phase_;
  };
  while (applies() && !Holds(kCopyTransitions[row].guard, copy, gone)) ++row;
  const bool counted =
      (event != CopyEvent::kRemoveReader || copy.readers_ > 0) && (event != CopyEvent::kRemoveUser || copy.users_ > 0);
  if (!applies() || !counted) Refuse(copy, event, gone);
  copy.phase_ = kCopyTransitions[row].to;
  switch (event) {
    case CopyEvent::kAddReader:
      ++copy.readers_;
      break;
    case CopyEvent::kRemoveReader:
      --copy.readers_;
      break;
    case CopyEvent::kAddUser:
      ++copy.users_;
      break;
    case CopyEvent::kRemoveUser:
      --copy.users_;
      break;
    default:
      break;
  }
  if (transition_counts_ != nullptr) ++(*transition_counts_)[row];
}

std::string Describe(const CopyTransition& transition) {
  static constexpr const char* kGuardNames[] = {"live", "gone", "has users", "unwanted", "idle"};
  std::string text = absl::StrCat(kCopyEventNames[static_cast<size_t>(transition.event)], " in ",
                                  kPhaseNames[static_cast<size_t>(transition.from)]);
  for (size_t bit = 0; bit < std::size(kGuardNames); ++bit) {
    if ((transition.guard >> bit & 1) != 0) absl::StrAppend(&text, ", ", kGuardNames[bit]);
  }
  return text;
}

}  // namespace ashlar::storage
