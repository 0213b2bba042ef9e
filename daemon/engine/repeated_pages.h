// SPDX-License-Identifier: Apache-2.0
// RepeatedPages: finds page table entries that name the same page.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace ashlar::daemon {

// A page table covers a whole sequence and may be padded, so repeated pages are allowed; writing through two entries to
// one page is not. The constructor scans the table in linear time, on the thread that reads the request. Claim then
// looks only at repeated entries, which are rare.
class RepeatedPages {
 public:
  RepeatedPages() = default;
  // Negative entries name no page. The table has at most 2^32 − 1 entries.
  explicit RepeatedPages(std::span<const int32_t> page_table);

  struct Conflict {
    uint64_t entry;
    uint64_t earlier;  // the earlier claimed entry for the same page
  };
  // Claims the pages of entries [first, last) for writing, up to the first conflict. An entry may be claimed again.
  std::optional<Conflict> Claim(uint64_t first, uint64_t last);

 private:
  struct Entry {
    uint32_t index;  // index in the page table
    uint32_t page;   // index in claimed_by_
  };
  static constexpr uint32_t kUnclaimed = UINT32_MAX;

  std::vector<Entry> entries_;        // ascending by index
  std::vector<uint32_t> claimed_by_;  // the claiming entry per repeated page
};

}  // namespace ashlar::daemon
