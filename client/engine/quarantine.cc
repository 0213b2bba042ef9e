#include "client/engine/quarantine.h"

#include <algorithm>
#include <iterator>
#include <thread>
#include <utility>

namespace ashlar::engine {
namespace {

// Of several landings any may be quiet first.
constexpr std::chrono::milliseconds kAskEach{2};

}  // namespace

void Quarantine::Keep(Landing landing, std::vector<int32_t> pages) {
  const std::lock_guard lock(mutex_);
  landings_.push_back({std::move(pages), std::move(landing)});
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

void Quarantine::Sort() {
  std::erase_if(landings_, [this](Doubt& doubt) {
    if (!doubt.landing.quiet()) return false;
    quiet_.insert(quiet_.end(), doubt.pages.begin(), doubt.pages.end());
    return true;
  });
}

uint64_t Quarantine::Take(std::span<int32_t> pages, std::chrono::milliseconds timeout) {
  const auto give_up = std::chrono::steady_clock::now() + timeout;
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      Sort();
      if (!quiet_.empty() || landings_.empty() || std::chrono::steady_clock::now() >= give_up) {
        const size_t count = std::min(pages.size(), quiet_.size());
        std::ranges::copy(quiet_.end() - static_cast<ptrdiff_t>(count), quiet_.end(), pages.begin());
        quiet_.resize(quiet_.size() - count);
        return count;
      }
      // Taking the landing's events in is what makes it quiet.
      for (Doubt& doubt : landings_) doubt.landing.WaitQuiet(kAskEach);
    }
    std::this_thread::yield();
  }
}

}  // namespace ashlar::engine
