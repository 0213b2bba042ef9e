// SPDX-License-Identifier: Apache-2.0
// Memory in pieces that tests and tools grant, and a record of requests.
#pragma once

#include <cstring>
#include <functional>
#include <future>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "daemon/peer/transport/transport.h"
#include "kernels/mutex.h"

namespace ashlar::daemon {

// Cuts memory into spans of random lengths from 1 byte to `longest`.
template <class Byte>
std::vector<std::span<Byte>> Scatter(std::span<Byte> memory, size_t longest, std::mt19937_64& random) {
  std::vector<std::span<Byte>> spans;
  while (!memory.empty()) {
    const size_t take = std::min<size_t>(memory.size(), 1 + random() % longest);
    spans.push_back(memory.first(take));
    memory = memory.subspan(take);
  }
  return spans;
}

// Answers immediately, with an error, or when Answer is called.
class HeldBytes final : public GrantedBytes {
 public:
  enum class How { kAtOnce, kWithError, kLater };
  explicit HeldBytes(Spans spans, How how = How::kAtOnce) : spans_(std::move(spans)), how_(how) {}

  void Resolve(uint64_t offset, uint64_t length, std::function<void(absl::StatusOr<Spans>)> answer) override {
    {
      MutexLock lock(mutex_);
      ++asked_;
      changed_.NotifyAll();
      if (how_ == How::kLater) {
        later_.push_back([this, offset, length, answer] { answer(Cut(offset, length)); });
        return;
      }
    }
    if (how_ == How::kWithError) {
      answer(absl::DataLossError("the copy is damaged"));
    } else {
      answer(Cut(offset, length));
    }
  }

  void WaitUntilAsked(size_t times) {
    MutexLock lock(mutex_);
    while (asked_ < times) changed_.Wait(mutex_);
  }
  void Answer() {
    std::vector<std::function<void()>> all;
    {
      MutexLock lock(mutex_);
      all.swap(later_);
    }
    for (auto& each : all) each();
  }
  size_t asked() {
    MutexLock lock(mutex_);
    return asked_;
  }

 private:
  Spans Cut(uint64_t offset, uint64_t length) const {
    Spans cut;
    for (const auto& span : spans_) {
      if (length == 0) break;
      if (offset >= span.size()) {
        offset -= span.size();
        continue;
      }
      const size_t take = std::min<uint64_t>(length, span.size() - offset);
      cut.push_back(span.subspan(offset, take));
      length -= take;
      offset = 0;
    }
    return cut;
  }

  const Spans spans_;
  const How how_;
  Mutex mutex_;
  CondVar changed_;
  size_t asked_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::function<void()>> later_ ABSL_GUARDED_BY(mutex_);
};

// The outcome of one request.
class Outcome {
 public:
  Transport::Done done() {
    return [promise = promise_](const absl::Status& status) { promise->set_value(status); };
  }
  absl::Status Wait() { return future_.get(); }
  bool IsThere() const { return future_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }

 private:
  std::shared_ptr<std::promise<absl::Status>> promise_ = std::make_shared<std::promise<absl::Status>>();
  std::shared_future<absl::Status> future_ = promise_->get_future().share();
};

}  // namespace ashlar::daemon
