// SPDX-License-Identifier: Apache-2.0
#include "proto/outcome.h"

#include <gtest/gtest.h>

#include <cctype>
#include <set>
#include <string>

#include "proto/key.h"
#include "proto/object.h"

namespace ashlar {
namespace {

// Every number from `first` to `last` has a distinct name, valid as a metric's label; numbers beyond have none.
template <typename Enum>
void ExpectNames(int first, int last) {
  std::set<std::string> names;
  for (int i = first; i <= last; ++i) {
    const std::string name(Name(static_cast<Enum>(i)));
    EXPECT_NE(name, "unknown") << i;
    EXPECT_EQ(name.find_first_not_of("abcdefghijklmnopqrstuvwxyz_"), std::string::npos) << name;
    EXPECT_TRUE(names.insert(name).second) << name;
  }
  EXPECT_EQ(Name(static_cast<Enum>(last + 1)), "unknown");
}

TEST(Outcome, EveryOutcomeHasItsName) {
  ExpectNames<MissReason>(0, 21);
  ExpectNames<PolicyKind>(0, 6);
  ExpectNames<TierKind>(0, 4);
  ExpectNames<ReserveOutcome>(1, 7);
  ExpectNames<PublishOutcome>(1, 5);
  ExpectNames<CommitOutcome>(1, 8);
  ExpectNames<TakeOutcome>(1, 8);
  ExpectNames<ObjectKind>(1, 4);
  ExpectNames<PartForm>(1, 20);
}

}  // namespace
}  // namespace ashlar
