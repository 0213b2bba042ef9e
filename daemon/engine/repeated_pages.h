// SPDX-License-Identifier: Apache-2.0
// RepeatedPages: finds the entries of a page table that name a page that another entry names too.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace ashlar::daemon {

// A table is that of a whole sequence and may be padded, so repetitions in it are no error. Writing through two entries
// into one page is. The constructor looks through the table, in time proportional to its length; it is meant for the
// thread that reads the request. Claim then looks only at entries that are repeated, of which there are hardly any.
class RepeatedPages {
 public:
  RepeatedPages() = default;
  // Negative entries name no page. At most 2^32 − 1 entries.
  explicit RepeatedPages(std::span<const int32_t> page_table);

  struct Conflict {
    uint64_t entry;
    uint64_t earlier;  // claimed, of the same page
  };
  // Claims the pages of entries [first, last) for writing, up to the first conflict. Entries may be claimed repeatedly.
  std::optional<Conflict> Claim(uint64_t first, uint64_t last);

 private:
  struct Entry {
    uint32_t index;  // in the table
    uint32_t page;   // in claimed_by_
  };
  static constexpr uint32_t kNobody = UINT32_MAX;

  std::vector<Entry> entries_;        // ascending
  std::vector<uint32_t> claimed_by_;  // entry of each page that is repeated
};

}  // namespace ashlar::daemon
