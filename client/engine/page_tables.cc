// SPDX-License-Identifier: Apache-2.0
#include "client/engine/page_tables.h"

#include <set>

#include "client/engine/status.h"
#include "proto/limits.h"

namespace ashlar::engine {
namespace {

std::span<const PageTable> TablesOf(const GivenPages& given) {
  return {given.page_tables, given.page_table_count};
}

// Calls `check` with each group's table, the names of its fields, and the group. Returns the first error.
template <typename Check>
Status OfEach(const LayerGroups& groups, const GivenPages& given, const std::string& field, Check check) {
  if (!groups.named) {
    return check(PageTable{given.page_table, given.page_count}, field + ".page_table", field + ".page_count",
                 size_t{0});
  }
  for (size_t g = 0; g < given.page_table_count; ++g) {
    const std::string table = absl::StrCat(field, ".page_tables[", g, "]");
    if (Status status = check(given.page_tables[g], table + ".pages", table + ".count", g); !status.ok()) return status;
  }
  return {};
}

// Checks entries [begin, end); other entries may be padding. `existing`: the number of pages; 0 without memory.
Status CheckExist(const PageTable& table, uint64_t begin, uint64_t end, uint32_t existing, const std::string& pages) {
  for (uint64_t i = begin; existing > 0 && i < end; ++i) {
    if (table.pages[i] < 0 || static_cast<uint32_t>(table.pages[i]) >= existing) {
      return Invalid(pages, "[", i, "]: page ", table.pages[i], " is out of range; the cache has ", existing, " pages");
    }
  }
  return {};
}

}  // namespace

GroupedPages GroupedPages::From(const GivenPages& given) {
  GroupedPages pages;
  if (given.page_table_count == 0) {
    pages.entries.assign(given.page_table, given.page_table + given.page_count);
    return pages;
  }
  for (const PageTable& table : TablesOf(given)) {
    pages.entries.insert(pages.entries.end(), table.pages, table.pages + table.count);
    pages.group_pages.push_back(static_cast<uint32_t>(table.count));
  }
  return pages;
}

std::vector<Quarantine::Page> GroupedPages::InSets(const LayerGroups& groups) const {
  std::vector<Quarantine::Page> pages;
  pages.reserve(entries.size());
  size_t group = 0, end = group_pages.empty() ? entries.size() : group_pages[0];
  std::set<Quarantine::Page> found;
  for (size_t i = 0; i < entries.size(); ++i) {
    while (i == end) end += group_pages[++group];
    const uint32_t existing = groups.all[group].pages;
    const bool exists = entries[i] >= 0 && (existing == 0 || static_cast<uint32_t>(entries[i]) < existing);
    const Quarantine::Page page{groups.SetOf(group), entries[i]};
    if (exists && found.insert(page).second) pages.push_back(page);
  }
  return pages;
}

Status CheckTables(const LayerGroups& groups, const GivenPages& given, const std::string& field) {
  if (!groups.named && given.page_table_count > 0) {
    return Invalid(field, ".page_tables: the cache has no groups of layers; use page_table");
  }
  if (groups.named && (given.page_table != nullptr || given.page_count > 0)) {
    return Invalid(field, ".page_table: the cache has groups of layers; use page_tables");
  }
  if (groups.named && !given.none()) {
    if (given.page_table_count != groups.all.size()) {
      return Invalid(field, ".page_table_count: ", given.page_table_count, " tables; the cache has ", groups.all.size(),
                     " groups of layers");
    }
    if (given.page_tables == nullptr) return Invalid(field, ".page_tables: null");
  }
  uint64_t total = 0;
  return OfEach(groups, given, field,
                [&total](const PageTable& table, const std::string& pages, const std::string& count, size_t) {
                  if (table.pages == nullptr && table.count > 0) return Invalid(pages, ": null");
                  if (table.count > limits::kMaxPromptTokens - total) return Invalid(count, ": too many");
                  total += table.count;
                  return Status();
                });
}

Status CheckReach(const LayerGroups& groups, const GivenPages& given, uint64_t first, uint64_t tokens,
                  const std::string& field) {
  if (groups.named && given.none() && tokens > 0) return Invalid(field, ".page_tables: null");
  return OfEach(groups, given, field,
                [&](const PageTable& table, const std::string& pages, const std::string& count, size_t g) {
                  const uint64_t page_tokens = groups.all[g].page_tokens, capacity = table.count * page_tokens;
                  if (first <= capacity && tokens <= capacity - first) {
                    return CheckExist(table, first / page_tokens, (first + tokens + page_tokens - 1) / page_tokens,
                                      groups.all[g].pages, pages);
                  }
                  return Invalid(count, ": ", table.count, " pages of ", page_tokens, " tokens cannot hold ", tokens,
                                 " tokens", first > 0 ? absl::StrCat(" after position ", first) : "");
                });
}

Status CheckNotKept(const LayerGroups& groups, const GivenPages& given, Quarantine& quarantine,
                    const std::string& field) {
  return OfEach(groups, given, field,
                [&](const PageTable& table, const std::string& pages, const std::string&, size_t g) {
                  const auto kept = quarantine.Find(groups.SetOf(g), {table.pages, table.count});
                  if (!kept.has_value()) return Status();
                  return Invalid(pages, "[", *kept, "]: page ", table.pages[*kept],
                                 " may still be written to by the daemon; wait until the cache returns it");
                });
}

}  // namespace ashlar::engine
