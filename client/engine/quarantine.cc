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

class Quarantine::Unresolved {
 public:
  Unresolved(std::optional<Landing> landing, std::vector<Page> pages)
      : pages_(std::move(pages)), landing_(std::move(landing)) {}

  // A landing is found quiesced when its events are read. One thread at a time reads them for all; the others wait for
  // the same time.
  void Ask(std::chrono::milliseconds patience) {
    if (!mutex_.TryLock()) return std::this_thread::sleep_for(patience);
    if (!quiesced_) quiesced_ = !landing_.has_value() || landing_->WaitQuiesced(patience);
    mutex_.Unlock();
  }
  bool quiesced() const { return quiesced_; }

 private:
  friend class Quarantine;
  const std::vector<Page> pages_;
  bool kept_ = true;  // not yet returned to the engine; guarded by the quarantine's mutex
  std::atomic<bool> quiesced_ = false;
  Mutex mutex_;
  std::optional<Landing> landing_ ABSL_GUARDED_BY(mutex_);  // destroyed first, and waits
};

void Quarantine::KeepLanding(std::optional<Landing> landing, std::shared_ptr<const void> held) {
  MutexLock lock(mutex_);
  landings_.push_back({std::move(held), std::move(landing)});
}

// Asks the daemon only about the oldest landing, because every question takes long if the daemon hangs.
void Quarantine::EndLandings() {
  MutexLock lock(mutex_);
  const auto quiesced = [](const std::optional<Landing>& landing) { return !landing || landing->quiesced(); };
  while (!landings_.empty() && quiesced(landings_.front().landing)) landings_.pop_front();
}

std::shared_ptr<Quarantine::Unresolved> Quarantine::Keep(std::optional<Landing> landing, std::vector<Page> pages) {
  auto unresolved = std::make_shared<Unresolved>(std::move(landing), std::move(pages));
  MutexLock lock(mutex_);
  unresolved_.push_back(unresolved);
  return unresolved;
}

void Quarantine::Keep(Composition composition, Staging::Held memory) {
  MutexLock lock(mutex_);
  std::vector<UnresolvedComposition> unresolved;
  for (UnresolvedComposition& held : compositions_) {
    if (!held.composition.quiesced()) unresolved.push_back({std::move(held.memory), std::move(held.composition)});
  }
  unresolved.push_back({std::move(memory), std::move(composition)});
  compositions_.swap(unresolved);
}

Quarantine::Claimed Quarantine::Claim(Unresolved& unresolved) {
  unresolved.Ask(std::chrono::milliseconds(0));
  MutexLock lock(mutex_);
  if (!unresolved.kept_) return Claimed::kTaken;
  if (!unresolved.quiesced()) return Claimed::kUnresolved;
  unresolved.kept_ = false;
  std::erase_if(unresolved_,
                [&unresolved](const std::shared_ptr<Unresolved>& other) { return other.get() == &unresolved; });
  return Claimed::kQuiesced;
}

void Quarantine::Sort() {
  std::erase_if(unresolved_,
                [this](const std::shared_ptr<Unresolved>& unresolved) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                  if (!unresolved->quiesced()) return false;
                  unresolved->kept_ = false;
                  for (const auto& [set, page] : unresolved->pages_) quiesced_[set].push_back(page);
                  return true;
                });
}

uint64_t Quarantine::Take(uint32_t set, std::span<int32_t> pages, std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + timeout;
  for (;;) {
    std::vector<std::shared_ptr<Unresolved>> unresolved;
    {
      MutexLock lock(mutex_);
      unresolved = unresolved_;
      if (!unresolved.empty()) {
        std::rotate(unresolved.begin(), unresolved.begin() + static_cast<ptrdiff_t>(next_ % unresolved.size()),
                    unresolved.end());
      }
    }
    const auto until = std::max(deadline, Clock::now() + kPoll);
    size_t asked = 0;
    for (; asked < unresolved.size() && Clock::now() < until; ++asked) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
      unresolved[asked]->Ask(std::clamp(left, std::chrono::milliseconds(0), kAskEach));
    }
    MutexLock lock(mutex_);
    next_ += asked;
    Sort();
    std::vector<int32_t>& quiesced = quiesced_[set];
    if (quiesced.empty() && !unresolved_.empty() && Clock::now() < deadline) continue;
    const size_t count = std::min(pages.size(), quiesced.size());
    std::copy(quiesced.end() - static_cast<ptrdiff_t>(count), quiesced.end(), pages.begin());
    quiesced.resize(quiesced.size() - count);
    return count;
  }
}

std::optional<size_t> Quarantine::Find(uint32_t set, std::span<const int32_t> pages) {
  MutexLock lock(mutex_);
  const std::vector<int32_t>& quiesced = quiesced_[set];
  if (unresolved_.empty() && quiesced.empty()) return std::nullopt;
  std::set<int32_t> here(quiesced.begin(), quiesced.end());
  for (const auto& unresolved : unresolved_) {
    for (const auto& [of, page] : unresolved->pages_) {
      if (of == set) here.insert(page);
    }
  }
  const auto found = std::ranges::find_if(pages, [&here](int32_t page) { return here.contains(page); });
  return found == pages.end() ? std::nullopt : std::optional<size_t>(found - pages.begin());
}

}  // namespace ashlar::engine
