// SPDX-License-Identifier: Apache-2.0
// PromptHandoff: sends the states and pages of a text to the node whose engine continues it (prefill handoff).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "daemon/peer/directory/directory.h"
#include "daemon/peer/offers/offerer.h"
#include "storage/cache.h"

namespace ashlar::daemon {

// The objects are offered in the order in which a prompt needs them, and the node fetches them like other remote
// objects: leased here, verified there. After a failure the engine there misses and
// computes. The metadata thread only.
class PromptHandoff {
 public:
  struct Options {
    std::string self;  // name of this node
    // Handoffs in flight. A tenant may use at most as many as it leaves free; a single tenant may use half.
    size_t most = 64;
    size_t offers = 4;  // unanswered offers per text
    uint64_t bytes_of_an_offer = uint64_t{32} << 20;
    storage::Nanos pause = 20'000'000;  // before a busy node is asked again
  };
  struct Result {
    HandoffOutcome outcome = HandoffOutcome::kUnavailable;
    uint64_t bytes = 0;  // bytes that the node has now, including those it had before
  };
  using Done = std::function<void(const Result&)>;

  // All must outlive the object.
  PromptHandoff(const storage::Clock& clock, const Directory& directory, Offerer& offerer, storage::Cache& cache,
                const Options& options)
      : clock_(clock), directory_(directory), offerer_(offerer), cache_(cache), options_(options) {}

  // `done` is called once, within the patience plus the time of a call.
  void Start(storage::TenantId tenant, const storage::PrefixText& text, const std::string& node, uint32_t patience_ms,
             Done done);
  // Call it many times per second.
  void Tick();
  // Returns whether handoffs are in flight.
  bool busy() const { return std::ranges::any_of(texts_, &PromptHandoff::Waits); }
  // Answers all pending handoffs.
  void Stop();

 private:
  struct Text {
    storage::TenantId tenant = 0;
    std::shared_ptr<const Member> to;
    std::deque<storage::Offering> waiting;
    size_t offers = 0;  // unanswered offers
    storage::Nanos until = 0, not_before = 0;
    Result result{.outcome = HandoffOutcome::kCompleted};
    Done done;  // empty once answered
  };
  // Answered ones stay in the list until the next Tick.
  static bool Waits(const std::shared_ptr<Text>& text) { return text->done != nullptr; }
  bool MayStart(storage::TenantId tenant) const;
  void GoOn(const std::shared_ptr<Text>& text);
  void Answered(const std::shared_ptr<Text>& text, const std::vector<storage::Offering>& some,
                const absl::StatusOr<std::vector<TakeOutcome>>& reply);
  void End(Text& text, HandoffOutcome outcome);

  const storage::Clock& clock_;
  const Directory& directory_;
  Offerer& offerer_;
  storage::Cache& cache_;
  const Options options_;
  std::list<std::shared_ptr<Text>> texts_;
  bool stopped_ = false;
};

}  // namespace ashlar::daemon
