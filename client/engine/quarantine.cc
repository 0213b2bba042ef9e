// SPDX-License-Identifier: Apache-2.0
#include "client/engine/quarantine.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <thread>
#include <utility>

#include "kernels/mutex.h"

namespace ashlar::engine {
namespace {

// With several landings, any of them may quiesce first.
constexpr std::chrono::milliseconds kAskEach{2};
// Limit of a poll. A call that finds nothing takes about a millisecond in gRPC, whatever its deadline.
constexpr std::chrono::milliseconds kPoll{2};

}  // namespace

class Quarantine::Doubt {
 public:
  Doubt(std::optional<Landing> landing, std::vector<Page> pages)
      : pages_(std::move(pages)), landing_(std::move(landing)) {}

  // A landing is found quiesced when its events are read. One thread at a time reads them for all; the others wait for
  // the same time.
  void Ask(std::chrono::milliseconds patience) {
    if (!mutex_.TryLock()) return std::this_thread::sleep_for(patience);
    if (!quiet_) quiet_ = !landing_.has_value() || landing_->WaitQuiet(patience);
    mutex_.Unlock();
  }
  bool quiet() const { return quiet_; }

 private:
  friend class Quarantine;
  const std::vector<Page> pages_;
  bool kept_ = true;  // not yet returned to the engine; guarded by the quarantine's mutex
  std::atomic<bool> quiet_ = false;
  Mutex mutex_;
  std::optional<Landing> landing_ ABSL_GUARDED_BY(mutex_);  // destroyed first, and waits
};

std::shared_ptr<Quarantine::Doubt> Quarantine::Keep(std::optional<Landing> landing, std::vector<Page> pages) {
  auto doubt = std::make_shared<Doubt>(std::move(landing), std::move(pages));
  MutexLock lock(mutex_);
  doubts_.push_back(doubt);
  return doubt;
}

void Quarantine::Keep(Composition composition, Staging::Held memory) {
  MutexLock lock(mutex_);
  std::vector<ComposedDoubt> doubtful;
  for (ComposedDoubt& doubt : compositions_) {
    if (!doubt.composition.quiet()) doubtful.push_back({std::move(doubt.memory), std::move(doubt.composition)});
  }
  doubtful.push_back({std::move(memory), std::move(composition)});
  compositions_.swap(doubtful);
}

Quarantine::Claimed Quarantine::Claim(Doubt& doubt) {
  doubt.Ask(std::chrono::milliseconds(0));
  MutexLock lock(mutex_);
  if (!doubt.kept_) return Claimed::kTaken;
  if (!doubt.quiet()) return Claimed::kDoubtful;
  doubt.kept_ = false;
  std::erase_if(doubts_, [&doubt](const std::shared_ptr<Doubt>& other) { return other.get() == &doubt; });
  return Claimed::kQuiet;
}

void Quarantine::Sort() {
  std::erase_if(doubts_, [this](const std::shared_ptr<Doubt>& doubt) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!doubt->quiet()) return false;
    doubt->kept_ = false;
    for (const auto& [set, page] : doubt->pages_) quiet_[set].push_back(page);
    return true;
  });
}

uint64_t Quarantine::Take(uint32_t set, std::span<int32_t> pages, std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + timeout;
  for (;;) {
    std::vector<std::shared_ptr<Doubt>> doubtful;
    {
      MutexLock lock(mutex_);
      doubtful = doubts_;
      if (!doubtful.empty()) {
        std::rotate(doubtful.begin(), doubtful.begin() + static_cast<ptrdiff_t>(next_ % doubtful.size()),
                    doubtful.end());
      }
    }
    const auto until = std::max(deadline, Clock::now() + kPoll);
    size_t asked = 0;
    for (; asked < doubtful.size() && Clock::now() < until; ++asked) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
      doubtful[asked]->Ask(std::clamp(left, std::chrono::milliseconds(0), kAskEach));
    }
    MutexLock lock(mutex_);
    next_ += asked;
    Sort();
    std::vector<int32_t>& quiet = quiet_[set];
    if (quiet.empty() && !doubts_.empty() && Clock::now() < deadline) continue;
    const size_t count = std::min(pages.size(), quiet.size());
    std::copy(quiet.end() - static_cast<ptrdiff_t>(count), quiet.end(), pages.begin());
    quiet.resize(quiet.size() - count);
    return count;
  }
}

std::optional<size_t> Quarantine::Find(uint32_t set, std::span<const int32_t> pages) {
  MutexLock lock(mutex_);
  const std::vector<int32_t>& quiet = quiet_[set];
  if (doubts_.empty() && quiet.empty()) return std::nullopt;
  std::set<int32_t> here(quiet.begin(), quiet.end());
  for (const auto& doubt : doubts_) {
    for (const auto& [of, page] : doubt->pages_) {
      if (of == set) here.insert(page);
    }
  }
  const auto found = std::ranges::find_if(pages, [&here](int32_t page) { return here.contains(page); });
  return found == pages.end() ? std::nullopt : std::optional<size_t>(found - pages.begin());
}

}  // namespace ashlar::engine
