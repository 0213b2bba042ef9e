// SPDX-License-Identifier: Apache-2.0
// SpanList: several memory spans as one sequence of bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <vector>

namespace ashlar::daemon {

// The bytes of several spans, addressed by their offset in the sequence. Does not own them.
template <class Byte>
class SpanList {
 public:
  SpanList() = default;
  explicit SpanList(std::vector<std::span<Byte>> spans) : spans_(std::move(spans)) {
    std::erase_if(spans_, [](const auto& span) { return span.empty(); });
    for (const auto& span : spans_) {
      starts_.push_back(bytes_);
      bytes_ += span.size();
    }
  }

  uint64_t bytes() const { return bytes_; }

  // Calls visit(std::span<Byte>) for the pieces of [from, from + length) in order until it returns false.
  template <class Visit>
  void ForEach(uint64_t from, uint64_t length, Visit visit) const {
    size_t i = std::upper_bound(starts_.begin(), starts_.end(), from) - starts_.begin() - 1;
    for (; length > 0; ++i) {
      const uint64_t skip = from - starts_[i];
      const uint64_t take = std::min<uint64_t>(length, spans_[i].size() - skip);
      if (!visit(spans_[i].subspan(skip, take))) return;
      from += take;
      length -= take;
    }
  }

 private:
  std::vector<std::span<Byte>> spans_;
  std::vector<uint64_t> starts_;
  uint64_t bytes_ = 0;
};

// The received byte ranges of a transfer. Pieces arrive in order, except over a connection with several lanes.
class Received {
 public:
  // Returns false without a change if some of [from, to) was received before, or if there are too many gaps.
  bool Add(uint64_t from, uint64_t to) {
    auto next = runs_.upper_bound(from);
    const bool joins_next = next != runs_.end() && next->first == to;
    if (next != runs_.end() && next->first < to) return false;
    if (next != runs_.begin()) {
      auto before = std::prev(next);
      if (before->second > from) return false;
      if (before->second == from) {
        before->second = joins_next ? next->second : to;
        if (joins_next) runs_.erase(next);
        bytes_ += to - from;
        return true;
      }
    }
    if (runs_.size() == kMaxRuns) return false;
    const uint64_t end = joins_next ? next->second : to;
    if (joins_next) runs_.erase(next);
    runs_[from] = end;
    bytes_ += to - from;
    return true;
  }
  uint64_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kMaxRuns = 64;
  std::map<uint64_t, uint64_t> runs_;  // begin -> end
  uint64_t bytes_ = 0;
};

}  // namespace ashlar::daemon
