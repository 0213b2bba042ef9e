// SPDX-License-Identifier: Apache-2.0
// Implementation of the methods of Request and Job.
#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/engine.h"
#include "client/engine/boundary.h"
#include "client/engine/handles.h"
#include "client/engine/prompt_run.h"
#include "client/engine/publish_runs.h"
#include "client/engine/started_call.h"
#include "client/engine/status.h"

namespace ashlar::engine {
namespace {

// Returns kOk if this thread may use the prompt_run: not while it is being started.
Status Ready(const RequestState* request) {
  if (request == nullptr) return MakeStatus(Code::kFailedPrecondition, "the request was not begun");
  if (Status status = CheckProcess(request->creator); !status.ok()) return status;
  return request->starting != nullptr && !request->starting->done() ? Pending() : Status();
}

// Runs a call on the prompt_run, if this thread may use it.
template <typename Call>
Status OnReady(const RequestState* request, Call call) noexcept {
  return Guarded([&]() -> Status {
    if (Status ready = Ready(request); !ready.ok()) return ready;
    return call(*request->prompt_run);
  });
}

// Runs that one call publishes.
struct Publishing {
  CacheState& cache;
  std::vector<TakenRun> taken;
  std::vector<ComputedRun> computed;
  uint8_t* outcomes;  // may be null
  // Copies of the structs that point to tensors, for a call that outlives the caller's.
  std::vector<std::vector<LinearTensors>> linear;
  std::vector<GroupedPages> pages;
  std::vector<std::vector<PageTable>> tables;
  // If the request ends earlier, the daemon gives its pages to another one only after they have been read.
  std::shared_ptr<const void> allocated;

  // Afterwards no other call publishes or abandons them.
  void Take(PromptRun& prompt_run, std::span<const uint32_t> missing) {
    allocated = prompt_run.landing().allocated();
    taken.reserve(missing.size());
    for (const uint32_t run : missing) taken.push_back(prompt_run.missing().TakeOut(run));
  }
  void OwnNames() {
    for (ComputedRun& run : computed) {
      linear.emplace_back(run.linear, run.linear + run.linear_count);
      pages.push_back(GroupedPages::From(PagesOf(run)));
      tables.emplace_back();
      const int32_t* begin = pages.back().entries.data();
      for (const uint32_t count : pages.back().group_pages) {
        tables.back().push_back({begin, count});
        begin += count;
      }
    }
    for (size_t i = 0; i < computed.size(); ++i) {
      computed[i].linear = linear[i].data();
      if (tables[i].empty()) computed[i].page_table = pages[i].entries.data();
      computed[i].page_tables = tables[i].empty() ? nullptr : tables[i].data();
    }
  }
  void Publish() {
    const std::vector<PublishOutcome> published = PublishRuns(cache, taken, computed);
    for (size_t i = 0; outcomes != nullptr && i < published.size(); ++i) {
      outcomes[i] = static_cast<uint8_t>(published[i]);
    }
  }
  void Abandon() {
    AbandonRuns(cache, taken);
    SayBusy();
  }
  void SayBusy() {
    if (outcomes != nullptr) std::fill_n(outcomes, taken.size(), static_cast<uint8_t>(PublishOutcome::kBusy));
  }
};

// `one`: errors name it without an index.
Status CheckRuns(PromptRun& prompt_run, std::span<const uint32_t> missing, std::span<const ComputedRun> computed,
                 bool one) {
  std::vector<bool> named(prompt_run.missing().runs().size());
  for (size_t i = 0; i < missing.size(); ++i) {
    const std::string index = one ? "" : absl::StrCat("[", i, "]");
    if (Status status = prompt_run.missing().Check(missing[i], computed[i], index); !status.ok()) return status;
    if (named[missing[i]]) return Invalid("missing", index, ": ", missing[i], " is given twice");
    named[missing[i]] = true;
  }
  return {};
}

Status PublishNow(PromptRun& prompt_run, std::span<const uint32_t> missing, std::span<const ComputedRun> computed,
                  bool one, uint8_t* outcomes) {
  if (Status status = CheckRuns(prompt_run, missing, computed, one); !status.ok()) return status;
  Publishing publishing{.cache = prompt_run.cache(), .outcomes = outcomes};
  publishing.computed.assign(computed.begin(), computed.end());
  publishing.Take(prompt_run, missing);
  publishing.Publish();
  return {};
}

Status PublishLater(PromptRun& prompt_run, std::span<const uint32_t> missing, std::span<const ComputedRun> computed,
                    bool one, uint8_t* outcomes, Job* job) {
  if (job == nullptr) return Invalid("job: null");
  if (Status status = CheckRuns(prompt_run, missing, computed, one); !status.ok()) return status;
  auto publishing = std::make_shared<Publishing>(Publishing{.cache = prompt_run.cache(), .outcomes = outcomes});
  publishing->computed.assign(computed.begin(), computed.end());
  publishing->OwnNames();
  auto made = std::make_unique<JobState>(JobState{.cache = publishing->cache.shared_from_this(), .task = nullptr});
  publishing->Take(prompt_run, missing);
  made->task = publishing->cache.background.Start(
      [publishing] { RunOr([&] { publishing->Publish(); }, [&] { publishing->Abandon(); }); });
  // Nothing here waits for the daemon: it ends the reservations at their deadline.
  if (made->task == nullptr) publishing->SayBusy();
  Access::Put(std::move(made), *job);
  return {};
}

Status CheckArrays(const uint32_t* missing, const ComputedRun* computed, uint32_t count) {
  if (missing == nullptr && count > 0) return Invalid("missing: null");
  return computed == nullptr && count > 0 ? Invalid("computed: null") : Status();
}

}  // namespace

void Access::Put(RequestState* impl, Request& request) {
  Request made;
  made.impl_ = impl;
  request = std::move(made);
}
void Access::Put(std::unique_ptr<JobState> impl, Job& job) {
  Job made;
  made.impl_ = impl.release();
  job = std::move(made);
}

Job::Job(Job&& other) noexcept : impl_(std::exchange(other.impl_, nullptr)) {}
Job& Job::operator=(Job&& other) noexcept {
  std::swap(impl_, other.impl_);
  return *this;
}
Job::~Job() {
  if (impl_ == nullptr || impl_->creator.InChild()) return;
  Wait();
  delete impl_;
}
Status Job::Wait() noexcept {
  if (impl_ == nullptr) return {};
  if (Status status = CheckProcess(impl_->creator); !status.ok()) return status;
  if (impl_->task != nullptr) impl_->task->Wait();
  return {};
}
Status Job::Poll() noexcept {
  if (impl_ == nullptr) return {};
  if (Status status = CheckProcess(impl_->creator); !status.ok()) return status;
  return impl_->task == nullptr || impl_->task->done() ? Status() : Pending();
}

Status Job::Result() const noexcept {
  if (impl_ == nullptr) return {};
  if (Status status = CheckProcess(impl_->creator); !status.ok()) return status;
  return impl_->task == nullptr || impl_->task->done() ? impl_->result : Pending();
}

Request::Request(Request&& other) noexcept : impl_(std::exchange(other.impl_, nullptr)) {}
Request& Request::operator=(Request&& other) noexcept {
  std::swap(impl_, other.impl_);
  return *this;
}
Request::~Request() {
  if (impl_ == nullptr || impl_->creator.InChild()) return;
  impl_->prompt_run->MarkCancelled();
  delete impl_;
}

Status Request::WaitPlan() noexcept {
  const bool waits = impl_ != nullptr && impl_->starting != nullptr && !impl_->creator.InChild();
  if (waits) impl_->starting->Wait();
  return PollPlan();
}
Status Request::PollPlan() noexcept {
  if (Status ready = Ready(impl_); !ready.ok()) return ready;
  impl_->starting.reset();
  impl_->prompt_run->PlanIsKnown();
  if (!impl_->prompt_run->pages().kept()) return {};
  return MakeStatus(Code::kOtherPages, "the daemon may still write into the request's pages");
}

const Plan& Request::plan() const noexcept {
  static const Plan none;
  return Ready(impl_).ok() ? impl_->prompt_run->plan().view() : none;
}

const Run* Request::missing(uint32_t* count) const noexcept {
  if (count == nullptr) return nullptr;
  *count = 0;
  if (!Ready(impl_).ok()) return nullptr;
  const std::span<const Run> missing = impl_->prompt_run->missing().runs();
  *count = static_cast<uint32_t>(missing.size());
  return missing.data();
}

Status Request::Publish(uint32_t missing, const ComputedRun& computed, uint8_t* outcome) noexcept {
  return OnReady(impl_, [&](PromptRun& prompt_run) {
    return PublishNow(prompt_run, {&missing, 1}, {&computed, 1}, true, outcome);
  });
}
Status Request::StartPublish(uint32_t missing, const ComputedRun& computed, uint8_t* outcome, Job* job) noexcept {
  return OnReady(impl_, [&](PromptRun& prompt_run) {
    return PublishLater(prompt_run, {&missing, 1}, {&computed, 1}, true, outcome, job);
  });
}
Status Request::Publish(const uint32_t* missing, const ComputedRun* computed, uint32_t count,
                        uint8_t* outcomes) noexcept {
  return OnReady(impl_, [&](PromptRun& prompt_run) {
    const Status status = CheckArrays(missing, computed, count);
    return status.ok() ? PublishNow(prompt_run, {missing, count}, {computed, count}, false, outcomes) : status;
  });
}
Status Request::StartPublish(const uint32_t* missing, const ComputedRun* computed, uint32_t count, uint8_t* outcomes,
                             Job* job) noexcept {
  return OnReady(impl_, [&](PromptRun& prompt_run) {
    const Status status = CheckArrays(missing, computed, count);
    return status.ok() ? PublishLater(prompt_run, {missing, count}, {computed, count}, false, outcomes, job) : status;
  });
}

void Request::Abandon(uint32_t missing) noexcept {
  OnReady(impl_, [&](PromptRun& prompt_run) {
    prompt_run.missing().Abandon(missing);
    return Status();
  });
}

Status Request::MarkPublished(uint32_t missing) noexcept {
  return OnReady(impl_, [&](PromptRun& prompt_run) { return prompt_run.missing().MarkPublished(missing); });
}

uint32_t Request::segments_computed_elsewhere() const noexcept {
  return Ready(impl_).ok() ? impl_->prompt_run->missing().computed_elsewhere() : 0;
}
Status Request::WaitCold(uint32_t timeout_ms) noexcept {
  return OnReady(impl_, [&](PromptRun& prompt_run) {
    return prompt_run.missing().WaitCold(std::chrono::milliseconds(timeout_ms));
  });
}
Status Request::StartWaitCold(uint32_t timeout_ms, Job* job) noexcept {
  return OnReady(impl_, [&](PromptRun& prompt_run) -> Status {
    if (job == nullptr) return Invalid("job: null");
    CacheState& cache = prompt_run.cache();
    const std::chrono::milliseconds timeout(timeout_ms);
    auto made = std::make_unique<JobState>(JobState{.cache = cache.shared_from_this(), .task = nullptr});
    prompt_run.OwnTokens();
    const auto wait = [prompt_run = impl_->prompt_run, until = std::chrono::steady_clock::now() + timeout] {
      return prompt_run->missing().WaitColdUntil(until);
    };
    impl_->starting = StartCall(std::move(made), cache.cold_waits, Pending(), timeout + cache.patience, wait, *job);
    return {};
  });
}

namespace {

Status LookAgainNow(Request& request, RequestState* state, const GivenPages& given) {
  return OnReady(state, [&](PromptRun& prompt_run) -> Status {
    if (Status status = prompt_run.TakeOtherPages(given); !status.ok()) return status;
    prompt_run.LookAgain();
    return request.PollPlan();
  });
}

Status LookAgainLater(RequestState* state, const GivenPages& given) {
  return OnReady(state, [&](PromptRun& prompt_run) -> Status {
    if (Status status = prompt_run.TakeOtherPages(given); !status.ok()) return status;
    prompt_run.OwnTokens();
    const auto miss = [prompt_run = state->prompt_run] { prompt_run->Miss(MissReason::kBusy); };
    state->starting = prompt_run.cache().lookups.Start(
        [prompt_run = state->prompt_run, miss] { RunOr([&] { prompt_run->LookAgain(); }, miss); },
        Background::Late{.patience = prompt_run.cache().patience, .otherwise = miss});
    if (state->starting == nullptr) miss();
    return {};
  });
}

}  // namespace

Status Request::LookAgain(const int32_t* page_table, uint64_t page_count) noexcept {
  return LookAgainNow(*this, impl_, {.page_table = page_table, .page_count = page_count});
}
Status Request::LookAgain(const PageTable* page_tables, uint32_t count) noexcept {
  return LookAgainNow(*this, impl_, {.page_tables = page_tables, .page_table_count = count});
}
Status Request::StartLookAgain(const int32_t* page_table, uint64_t page_count) noexcept {
  return LookAgainLater(impl_, {.page_table = page_table, .page_count = page_count});
}
Status Request::StartLookAgain(const PageTable* page_tables, uint32_t count) noexcept {
  return LookAgainLater(impl_, {.page_tables = page_tables, .page_table_count = count});
}

Status Request::Admit(uint32_t own_pages, PageShortage* shortage) noexcept {
  return OnReady(impl_, [&](PromptRun& prompt_run) { return prompt_run.landing().Admit(own_pages, shortage); });
}
const AdmittedPages& Request::admitted() const noexcept {
  static const AdmittedPages none;
  return Ready(impl_).ok() ? impl_->prompt_run->landing().admitted() : none;
}

Status Request::WaitLayer(uint32_t layer) noexcept {
  return OnReady(impl_, [&](PromptRun& prompt_run) { return prompt_run.landing().ReachLayer(layer, true); });
}
Status Request::PollLayer(uint32_t layer) noexcept {
  return OnReady(impl_, [&](PromptRun& prompt_run) { return prompt_run.landing().ReachLayer(layer, false); });
}
Status Request::StepTuple(uint32_t step, uint32_t layer, Tuple* out) noexcept {
  return OnReady(impl_, [&](PromptRun& prompt_run) { return prompt_run.advance().GetTuple(step, layer, out); });
}
Status Request::Advance(const LayerAdvance& advance) noexcept {
  return OnReady(impl_, [&](PromptRun& prompt_run) { return prompt_run.advance().AdvanceLayer(advance); });
}
Status Request::Finish() noexcept {
  return OnReady(impl_, [&](PromptRun& prompt_run) { return prompt_run.landing().Finish(true); });
}
Status Request::PollFinish() noexcept {
  return OnReady(impl_, [&](PromptRun& prompt_run) { return prompt_run.landing().Finish(false); });
}
Status Request::Move(const int32_t* page_table, uint64_t page_count) noexcept {
  const GivenPages given{.page_table = page_table, .page_count = page_count};
  return OnReady(impl_, [&](PromptRun& prompt_run) { return prompt_run.Move(given); });
}
Status Request::Move(const PageTable* page_tables, uint32_t count) noexcept {
  const GivenPages given{.page_tables = page_tables, .page_table_count = count};
  return OnReady(impl_, [&](PromptRun& prompt_run) { return prompt_run.Move(given); });
}
Status Request::DropSegments(const uint32_t* segments, uint32_t count) noexcept {
  return OnReady(impl_, [&](PromptRun& prompt_run) {
    return segments == nullptr && count > 0 ? Invalid("segments: null") : prompt_run.DropSegments({segments, count});
  });
}
bool Request::pages_kept() const noexcept {
  return Ready(impl_).ok() && impl_->prompt_run->pages().kept();
}
void Request::Cancel() noexcept {
  if (impl_ == nullptr || impl_->creator.InChild()) return;
  impl_->prompt_run->MarkCancelled();
  OnReady(impl_, [](PromptRun& prompt_run) {
    prompt_run.Cancel();
    return Status();
  });
}
Status Request::PollQuiesced() noexcept {
  return OnReady(impl_, [](PromptRun& prompt_run) { return prompt_run.Quiesced(); });
}
void Request::Release() noexcept {
  OnReady(impl_, [](PromptRun& prompt_run) {
    prompt_run.match().Release();
    return Status();
  });
}

uint64_t Request::PlanBytes(uint8_t* out, uint64_t capacity) const noexcept {
  return GuardedOr(uint64_t{0}, [&]() -> uint64_t {
    if (!Ready(impl_).ok()) return 0;
    const std::string bytes = impl_->prompt_run->plan().Encode();
    if (bytes.size() <= capacity) std::ranges::copy(bytes, out);
    return bytes.size();
  });
}

}  // namespace ashlar::engine
