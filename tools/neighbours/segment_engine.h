// SPDX-License-Identifier: Apache-2.0
// The engine code that victim and attackers share: one small model, and one segment that was published once.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/session/client.h"

namespace ashlar::neighbours {

// One linear and one attention layer; a token's keys and values take 4 KiB, contiguous in a page.
inline constexpr uint64_t kTokenBytes = 4096;
inline constexpr uint32_t kPageTokens = 16;
Identity SmallIdentity();
Layout SmallLayout();
PagedCache SmallPages(uint32_t pages);  // consecutive pages at the start of a region
inline constexpr uint64_t kPageBytes = kPageTokens * kTokenBytes;

// A first segment of one page that was never published, and after it a segment with `bytes` bytes of keys and values.
class SegmentPrompt {
 public:
  explicit SegmentPrompt(uint64_t bytes);

  Prompt prompt() const { return {.tokens = tokens_, .segment_lengths = lengths_}; }
  std::span<const int32_t> segment() const { return std::span(tokens_).subspan(kPageTokens); }
  uint64_t position() const { return kPageTokens; }  // position of the segment
  // The segment's pages are the region's from `first`; nothing lands in the page before them.
  std::vector<int32_t> PageTable(int32_t first) const;
  uint32_t pages() const { return static_cast<uint32_t>(lengths_[1] / kPageTokens); }

 private:
  std::vector<int32_t> tokens_;
  std::vector<uint64_t> lengths_;
};

// Has its source pages and its target pages in one hosted region.
class SegmentEngine {
 public:
  // Opens the model, declares pages and publishes the segment, unless it is there already.
  static absl::StatusOr<std::unique_ptr<SegmentEngine>> Open(Client& client, uint64_t bytes);

  Match Lookup() { return model_.Lookup(prompt_.prompt()); }
  // Lands the hit. Returns kNone, or the reason of the miss.
  MissReason Land(const Match& match, std::chrono::milliseconds patience);
  const SegmentPrompt& prompt() const { return prompt_; }

 private:
  explicit SegmentEngine(uint64_t bytes) : prompt_(bytes) {}
  absl::Status Publish();

  const SegmentPrompt prompt_;
  Model model_;
  Region region_;  // sources, targets, then the linear layer's tensors
  std::vector<int32_t> targets_;
};

}  // namespace ashlar::neighbours
