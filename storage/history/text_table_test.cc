// SPDX-License-Identifier: Apache-2.0
#include "storage/history/text_table.h"

#include <gtest/gtest.h>

namespace ashlar::storage {
namespace {

NamespaceId Ns(uint8_t number) {
  NamespaceId ns;
  ns.bytes.fill(number);
  return ns;
}

constexpr TextDigest kText{1, 2}, kOtherText{1, 3};

TEST(TextTable, FindsATextUnderAnotherNamespaceOfTheSameTenant) {
  TextTable table;
  EXPECT_EQ(table.Elsewhere(1, kText, Ns(1)), nullptr);
  table.Remember(1, kText, Ns(1));
  EXPECT_EQ(table.Elsewhere(1, kText, Ns(1)), nullptr) << "under this one";
  EXPECT_EQ(table.Elsewhere(1, kOtherText, Ns(2)), nullptr);
  EXPECT_EQ(table.Elsewhere(2, kText, Ns(2)), nullptr) << "another tenant's";
  ASSERT_NE(table.Elsewhere(1, kText, Ns(2)), nullptr);
  EXPECT_EQ(*table.Elsewhere(1, kText, Ns(2)), Ns(1));
}

TEST(TextTable, FindsAnotherNamespace) {
  TextTable table;
  for (const uint8_t ns : {1, 2, 2, 3, 3}) table.Remember(1, kText, Ns(ns));
  EXPECT_EQ(*table.Elsewhere(1, kText, Ns(1)), Ns(3)) << "the last one";
  EXPECT_EQ(*table.Elsewhere(1, kText, Ns(2)), Ns(3));
  EXPECT_EQ(*table.Elsewhere(1, kText, Ns(3)), Ns(2)) << "the one before";
}

TEST(TextTable, ErasesTheTextThatWasPublishedLongestAgo) {
  TextTable table(2);
  table.Remember(1, kText, Ns(1));
  table.Remember(1, kOtherText, Ns(1));
  table.Remember(1, kText, Ns(1));
  table.Remember(1, {3, 4}, Ns(1));
  EXPECT_NE(table.Elsewhere(1, kText, Ns(2)), nullptr);
  EXPECT_EQ(table.Elsewhere(1, kOtherText, Ns(2)), nullptr);
}

}  // namespace
}  // namespace ashlar::storage
