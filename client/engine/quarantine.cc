#include "client/engine/quarantine.h"

#include <algorithm>
#include <set>
#include <utility>

namespace ashlar::engine {
namespace {

// Of several landings any may be quiet first.
constexpr std::chrono::milliseconds kAskEach{2};
// A landing whose question was not answered is asked about again only by those who wait.
constexpr std::chrono::milliseconds kAskAgain{1};

}  // namespace

// Guarded by the quarantine's mutex, but for what waits for the landing.
class Quarantine::Doubt {
 public:
  bool quiet(std::chrono::milliseconds patience) {
    const std::lock_guard lock(mutex_);
    return !landing_.has_value() || landing_->WaitQuiet(patience);
  }

 private:
  friend class Quarantine;
  std::vector<Page> pages_;
  bool kept_ = true;  // not yet the engine's again
  std::mutex mutex_;
  std::optional<Landing> landing_;  // guarded by mutex_; goes first, and waits
};

std::shared_ptr<Quarantine::Doubt> Quarantine::Keep(std::optional<Landing> landing, std::vector<Page> pages) {
  auto doubt = std::make_shared<Doubt>();
  doubt->landing_ = std::move(landing);
  doubt->pages_ = std::move(pages);
  const std::lock_guard lock(mutex_);
  doubts_.push_back(doubt);
  return doubt;
}

void Quarantine::Keep(Composition composition, Staging::Held memory) {
  const std::lock_guard lock(mutex_);
  std::vector<ComposedDoubt> doubtful;
  for (ComposedDoubt& doubt : compositions_) {
    if (!doubt.composition.quiet()) doubtful.push_back({std::move(doubt.memory), std::move(doubt.composition)});
  }
  doubtful.push_back({std::move(memory), std::move(composition)});
  compositions_.swap(doubtful);
}

Quarantine::Claimed Quarantine::Claim(Doubt& doubt) {
  const bool quiet = doubt.quiet(kAskAgain);
  const std::lock_guard lock(mutex_);
  if (!doubt.kept_) return Claimed::kTaken;
  if (!quiet) return Claimed::kDoubtful;
  doubt.kept_ = false;
  std::erase_if(doubts_, [&doubt](const std::shared_ptr<Doubt>& other) { return other.get() == &doubt; });
  return Claimed::kQuiet;
}

void Quarantine::Sort() {
  std::erase_if(doubts_, [this](const std::shared_ptr<Doubt>& doubt) {
    if (!doubt->quiet(kAskAgain)) return false;
    doubt->kept_ = false;
    for (const auto& [set, page] : doubt->pages_) quiet_[set].push_back(page);
    return true;
  });
}

uint64_t Quarantine::Take(uint32_t set, std::span<int32_t> pages, std::chrono::milliseconds timeout) {
  const auto give_up = std::chrono::steady_clock::now() + timeout;
  for (;;) {
    std::vector<std::shared_ptr<Doubt>> doubtful;
    {
      const std::lock_guard lock(mutex_);
      Sort();
      std::vector<int32_t>& quiet = quiet_[set];
      if (!quiet.empty() || doubts_.empty() || std::chrono::steady_clock::now() >= give_up) {
        const size_t count = std::min(pages.size(), quiet.size());
        std::copy(quiet.end() - static_cast<ptrdiff_t>(count), quiet.end(), pages.begin());
        quiet.resize(quiet.size() - count);
        return count;
      }
      doubtful = doubts_;
    }
    // Taking a landing's events in is what makes it quiet.
    for (const auto& doubt : doubtful) doubt->quiet(kAskEach);
  }
}

std::optional<size_t> Quarantine::Find(uint32_t set, std::span<const int32_t> pages) {
  const std::lock_guard lock(mutex_);
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
