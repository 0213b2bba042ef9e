// SPDX-License-Identifier: Apache-2.0
// The page tables of an engine's call: one for all attention layers, or one per group of layers.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ashlar/engine.h"
#include "client/engine/quarantine.h"

namespace ashlar::engine {

// The groups of a cache's attention layers, and their sets of page numbers.
struct LayerGroups {
  struct Group {
    uint32_t page_tokens = 0;
    uint32_t pages = 0;
  };
  std::vector<Group> all;  // a single group of all layers unless the engine named groups
  bool named = false;
  bool common_pages = false;

  // The set of page numbers that a group's pages belong to.
  uint32_t SetOf(size_t group) const { return common_pages ? 0 : static_cast<uint32_t>(group); }
};

// The page tables of a call, in the form of the engine's structs.
struct GivenPages {
  const int32_t* page_table = nullptr;
  uint64_t page_count = 0;
  const PageTable* page_tables = nullptr;
  uint32_t page_table_count = 0;

  bool none() const { return page_table == nullptr && page_count == 0 && page_table_count == 0; }
};

template <typename Struct>
GivenPages PagesOf(const Struct& given) {
  return {given.page_table, given.page_count, given.page_tables, given.page_table_count};
}

// The groups' tables, concatenated, and the number of entries of each. Without named groups: one table and no counts.
struct GroupedPages {
  std::vector<int32_t> entries;
  std::vector<uint32_t> group_pages;

  // The tables must have been checked.
  static GroupedPages From(const GivenPages& given);
  bool empty() const { return entries.empty(); }
  void clear() { *this = {}; }
  std::vector<Quarantine::Page> InSets(const LayerGroups& groups) const;
};

// kInvalidArgument, naming the field with prefix `field`, unless there is one table per group, within the limit of
// pages.
Status CheckTables(const LayerGroups& groups, const GivenPages& given, const std::string& field);
// For such tables: likewise, unless each covers positions [first, first + tokens) with existing pages.
Status CheckReach(const LayerGroups& groups, const GivenPages& given, uint64_t first, uint64_t tokens,
                  const std::string& field);
// For such tables: likewise, if a page is in quarantine.
Status CheckNotKept(const LayerGroups& groups, const GivenPages& given, Quarantine& quarantine,
                    const std::string& field);

}  // namespace ashlar::engine
