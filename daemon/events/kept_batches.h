// SPDX-License-Identifier: Apache-2.0
// KeptBatches: the most recent batches of events. Subscribers and replays read them at their own pace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>

namespace ashlar::daemon {

class KeptBatches {
 public:
  // Keeps at most `most` batches and `most_bytes` bytes. The oldest batches are dropped first.
  KeptBatches(size_t most, size_t most_bytes) : most_(most), most_bytes_(most_bytes) {}

  void Add(std::string batch) {
    bytes_ += batch.size();
    batches_.push_back(std::make_shared<const std::string>(std::move(batch)));
    ++next_;
    for (; batches_.size() > most_ || bytes_ > most_bytes_; batches_.pop_front()) bytes_ -= batches_.front()->size();
  }
  void Clear() {
    batches_.clear();
    bytes_ = 0;
  }

  uint64_t first() const { return next_ - batches_.size(); }  // number of the oldest batch
  uint64_t next() const { return next_; }                     // number of the next batch
  // first() ≤ number < next().
  const std::shared_ptr<const std::string>& at(uint64_t number) const { return batches_[number - first()]; }

 private:
  const size_t most_, most_bytes_;
  std::deque<std::shared_ptr<const std::string>> batches_;
  size_t bytes_ = 0;
  uint64_t next_ = 0;
};

}  // namespace ashlar::daemon
