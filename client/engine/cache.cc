// SPDX-License-Identifier: Apache-2.0
// Implementation of Cache's methods.
#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "ashlar/engine.h"
#include "client/engine/boundary.h"
#include "client/engine/commit_text.h"
#include "client/engine/handles.h"
#include "client/engine/layer_run.h"
#include "client/engine/near_memory.h"
#include "client/engine/prompt_run.h"
#include "client/engine/started_call.h"
#include "client/engine/status.h"
#include "client/engine/token_rows.h"
#include "kernels/layer_shape.h"
#include "proto/outcome.h"

namespace ashlar::engine {
namespace {

Status CheckCall(const void* items, uint32_t count, const void* out, const char* name) {
  if (items == nullptr && count > 0) return Invalid(name, ": null");
  if (out == nullptr && count > 0) return Invalid("requests: null");
  return {};
}

// Prepares one prompt_run per item. Asks the daemon nothing unless all items are valid.
template <typename Item>
Status TakeAll(CacheState& cache, const Item* items, uint32_t count, const char* name,
               std::vector<std::shared_ptr<PromptRun>>& prompt_runs) {
  for (uint32_t i = 0; i < count; ++i) {
    prompt_runs.push_back(std::make_shared<PromptRun>(cache));
    if (Status status = prompt_runs.back()->Take(items[i], absl::StrCat(name, "[", i, "]")); !status.ok())
      return status;
  }
  return {};
}

void AttachAll(std::span<const std::shared_ptr<PromptRun>> prompt_runs) {
  for (const auto& prompt_run : prompt_runs) prompt_run->Attach();
}

void MissAll(std::span<const std::shared_ptr<PromptRun>> prompt_runs) {
  for (const auto& prompt_run : prompt_runs) prompt_run->Miss(MissReason::kBusy);
}

// Returns the prompt_runs, and runs `work` on all of them, here or in the background. If it throws, no prompt_run has
// been returned.
template <typename Work>
void Hand(CacheState& cache, const std::vector<std::shared_ptr<PromptRun>>& prompt_runs, Request* requests, bool wait,
          Work work) {
  std::vector<std::unique_ptr<RequestState>> begun;
  for (const auto& prompt_run : prompt_runs) {
    begun.push_back(std::make_unique<RequestState>(
        RequestState{.cache = cache.shared_from_this(), .prompt_run = prompt_run, .starting = nullptr}));
  }
  std::shared_ptr<Background::Task> task;
  for (size_t i = 0; i < prompt_runs.size(); ++i) requests[i] = Request();  // the previous requests end first
  if (wait) {
    work(prompt_runs);
  } else {
    for (const auto& prompt_run : prompt_runs) prompt_run->OwnTokens();
    const auto miss = [prompt_runs] { MissAll(prompt_runs); };
    task = cache.lookups.Start([prompt_runs, work, miss] { RunOr([&] { work(prompt_runs); }, miss); },
                               Background::Late{.patience = cache.patience, .otherwise = miss});
    if (task == nullptr) miss();
  }
  for (size_t i = 0; i < begun.size(); ++i) {
    begun[i]->starting = task;
    Access::Put(begun[i].release(), requests[i]);
  }
}

// For requests that were begun and waited for: returns whether each has its pages.
Status PlansOf(Request* requests, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    if (Status status = requests[i].PollPlan(); !status.ok()) return status;
  }
  return {};
}

Status BeginAll(CacheState& cache, const Prompt* prompts, uint32_t count, Request* requests, bool wait) {
  if (Status status = CheckCall(prompts, count, requests, "prompts"); !status.ok()) return status;
  std::vector<std::shared_ptr<PromptRun>> prompt_runs;
  if (Status status = TakeAll(cache, prompts, count, "prompts", prompt_runs); !status.ok()) return status;
  Hand(cache, prompt_runs, requests, wait,
       [&cache](std::span<const std::shared_ptr<PromptRun>> all) { PromptRun::Begin(cache, all); });
  return wait ? PlansOf(requests, count) : Status();
}

Status LandAll(CacheState& cache, const PlanToLand* plans, uint32_t count, Request* requests, bool wait) {
  if (Status status = CheckCall(plans, count, requests, "plans"); !status.ok()) return status;
  std::vector<std::shared_ptr<PromptRun>> prompt_runs;
  if (Status status = TakeAll(cache, plans, count, "plans", prompt_runs); !status.ok()) return status;
  Hand(cache, prompt_runs, requests, wait, AttachAll);
  for (uint32_t i = 0; wait && i < count; ++i) requests[i].PollPlan();
  return {};
}

std::shared_ptr<PromptRun> PromptRunOf(const Text& text) {
  return text.request == nullptr ? nullptr : Access::Shared(*text.request);
}

Status CheckTexts(CacheState& cache, const Text* texts, uint32_t count) {
  if (texts == nullptr && count > 0) return Invalid("texts: null");
  for (uint32_t i = 0; i < count; ++i) {
    const std::string field = absl::StrCat("texts[", i, "]");
    if (Status status = CheckText(cache, texts[i], field); !status.ok()) return status;
    if (texts[i].request == nullptr) continue;
    const PromptRun* const began = Access::Settled(*texts[i].request);
    if (began == nullptr || !began->plan().exact().has_value()) {
      return MakeStatus(Code::kFailedPrecondition, field + ".request: not finished");
    }
    const auto in_place = [](const Step& step) {
      return step.kind != StepKind::kCompute && step.segment != Step::kPrefix;
    };
    if (cache.shares_in_place && std::ranges::any_of(began->plan().steps(), in_place)) {
      return Invalid(
          field,
          ".request: its plan reads segments in place, so their keys have other positions; do not commit the text");
    }
    // If the salt were omitted here, the text would be shared with all users.
    const Salt salt = MakeSalt({static_cast<const char*>(texts[i].salt), texts[i].salt_bytes});
    if (began->text().begun() && began->text().salt() != salt)
      return Invalid(field, ".salt: differs from the salt of the request's prompt");
  }
  return {};
}

Status ComputeLayerAlone(const CacheState& cache, const AloneLayer& alone) {
  const auto linear = cache.LinearAt(alone.layer);
  if (!linear.ok()) return Invalid("alone.", linear.status().message());
  if (Status status = CheckAlone(**linear, alone); !status.ok()) return status;
  if (Status near = CheckNear(cache.region, alone, "alone"); !near.ok()) return near;
  const auto queue = kernels::Host().MakeQueue(cache.workers.get());
  const kernels::LinearShape shape = kernels::ShapeOf(**linear);
  const ReadyRows ready(shape, alone.inputs);
  AloneLayer computed = alone;
  computed.inputs = ready.rows();
  SetOutStride(shape, computed);
  ComputeAlone(shape, computed, *queue);
  return {};
}

}  // namespace

Cache::Cache(Cache&& other) noexcept : impl_(std::exchange(other.impl_, nullptr)) {}
Cache& Cache::operator=(Cache&& other) noexcept {
  std::swap(impl_, other.impl_);
  return *this;
}
Cache::~Cache() {
  if (impl_ == nullptr || impl_->creator.InChild()) return;
  const std::shared_ptr<CacheState> last = std::move(impl_->open);
}

namespace {

Status OpenOn(std::shared_ptr<Client> client, Region region, const OpenOptions& options, Cache* out) {
  const absl::StatusOr<DescribedModel> model = Describe(options.model);
  if (!model.ok()) return ToStatus(model.status());
  absl::StatusOr<std::shared_ptr<CacheState>> opened =
      CacheState::Open(std::move(client), std::move(region), *model, options);
  if (!opened.ok()) return ToStatus(opened.status());
  Cache made;
  (*opened)->open = *opened;
  Access::Put(opened->get(), made);
  *out = std::move(made);
  return {};
}

Status OpenFor(const OpenOptions& options, const CacheState* share_with, Cache* out) {
  if (options.memory.kind == MemoryKind::kShared) {
    if (share_with == nullptr) return Invalid("memory.kind: kShared requires OpenOptions::share_with");
    return OpenOn(share_with->client, share_with->region, options, out);
  }
  if (options.memory.kind > MemoryKind::kGpu)
    return Invalid("memory.kind: ", static_cast<int>(options.memory.kind), " is unknown; expected 0 to ",
                   static_cast<int>(MemoryKind::kGpu));
  if (share_with != nullptr) return OpenOn(share_with->client, {}, options, out);
  if (options.rpc_socket == nullptr) return Invalid("rpc_socket: null");
  if (options.session_socket == nullptr) return Invalid("session_socket: null");
  auto client = Client::Connect({.rpc_socket = options.rpc_socket,
                                 .session_socket = options.session_socket,
                                 .timeout = std::chrono::milliseconds(options.timeout_ms),
                                 .name = options.name == nullptr ? "engine" : options.name});
  if (!client.ok()) return ToStatus(client.status());
  return OpenOn(*std::move(client), {}, options, out);
}

}  // namespace

Status Cache::Open(const OpenOptions& options, Cache* out) noexcept {
  return Guarded([&]() -> Status {
    if (out == nullptr) return Invalid("out: null");
    if (options.share_with == nullptr) return OpenFor(options, nullptr, out);
    const CacheState* const share_with = options.share_with->impl_;
    if (share_with == nullptr) return Invalid("share_with: not open");
    if (Status status = CheckProcess(share_with->creator); !status.ok()) return status;
    return OpenFor(options, share_with, out);
  });
}

Status Cache::StartOpen(const OpenOptions& options, Cache* out, Job* job) noexcept {
  return Guarded([&]() -> Status {
    if (out == nullptr) return Invalid("out: null");
    if (job == nullptr) return Invalid("job: null");
    auto made = std::make_unique<JobState>();
    made->own = std::make_unique<Background>();
    Background& threads = *made->own;
    const Status busy = MakeStatus(Code::kResourceExhausted, "no thread is left in this process");
    const auto open = [&options, out] { return Open(options, out); };
    StartCall(std::move(made), threads, busy, std::chrono::hours(1), open, *job);
    return {};
  });
}

uint8_t* Cache::data() const noexcept {
  return impl_ == nullptr ? nullptr : reinterpret_cast<uint8_t*>(impl_->region.data());
}
uint64_t Cache::bytes() const noexcept {
  return impl_ == nullptr ? 0 : impl_->region.size();
}
const PagePlace* Cache::places(uint32_t* count) const noexcept {
  if (count != nullptr) *count = impl_ == nullptr ? 0 : static_cast<uint32_t>(impl_->places.size());
  return impl_ == nullptr ? nullptr : impl_->places.data();
}
bool Cache::connected() const noexcept {
  return impl_ != nullptr && impl_->client->connected();
}
const char* Cache::warning() const noexcept {
  return impl_ == nullptr ? "" : impl_->warning.c_str();
}

Status Cache::Begin(const Prompt* prompts, uint32_t count, Request* requests) noexcept {
  return OnOpen(impl_, [&](CacheState& cache) { return BeginAll(cache, prompts, count, requests, true); });
}
Status Cache::StartBegin(const Prompt* prompts, uint32_t count, Request* requests) noexcept {
  return OnOpen(impl_, [&](CacheState& cache) { return BeginAll(cache, prompts, count, requests, false); });
}
Status Cache::Land(const PlanToLand* plans, uint32_t count, Request* requests) noexcept {
  return OnOpen(impl_, [&](CacheState& cache) { return LandAll(cache, plans, count, requests, true); });
}
Status Cache::StartLand(const PlanToLand* plans, uint32_t count, Request* requests) noexcept {
  return OnOpen(impl_, [&](CacheState& cache) { return LandAll(cache, plans, count, requests, false); });
}

Status Cache::ComputeAlone(const AloneLayer& alone) noexcept {
  return OnOpen(impl_, [&](CacheState& cache) { return ComputeLayerAlone(cache, alone); });
}

Status Cache::Commit(const Text* texts, uint32_t count) noexcept {
  return OnOpen(impl_, [&](CacheState& cache) -> Status {
    if (Status status = CheckTexts(cache, texts, count); !status.ok()) return status;
    for (uint32_t i = 0; i < count; ++i) CommitText(cache, CommittedText(texts[i], PromptRunOf(texts[i])));
    return {};
  });
}

Status Cache::StartCommit(const Text* texts, uint32_t count, Job* job) noexcept {
  return OnOpen(impl_, [&](CacheState& cache) -> Status {
    if (job == nullptr) return Invalid("job: null");
    if (Status status = CheckTexts(cache, texts, count); !status.ok()) return status;
    auto all = std::make_shared<std::vector<CommittedText>>();
    all->reserve(count);
    for (uint32_t i = 0; i < count; ++i) all->emplace_back(texts[i], PromptRunOf(texts[i]));
    auto made = std::make_unique<JobState>(JobState{.cache = cache.shared_from_this(), .task = nullptr});
    made->task = cache.background.Start([&cache, all] {
      for (const CommittedText& text : *all) {
        RunOr([&] { CommitText(cache, text); }, [&] { SetOutcomes(text.text, CommitOutcome::kBusy); });
      }
    });
    if (made->task == nullptr) {
      for (const CommittedText& text : *all) SetOutcomes(text.text, CommitOutcome::kBusy);
    }
    Access::Put(std::move(made), *job);
    return {};
  });
}

Status Cache::Handoff(const Text& text, const char* node, uint32_t wait_ms) noexcept {
  return OnOpen(impl_, [&](CacheState& cache) -> Status {
    if (Status status = CheckHandoff(cache, text, node); !status.ok()) return status;
    const HandoffOutcome outcome = HandTextOff(cache, HandedText(text, node), std::chrono::milliseconds(wait_ms));
    if (outcome == HandoffOutcome::kCompleted) return {};
    if (outcome == HandoffOutcome::kTimedOut) return {.code = Code::kPending};
    return MakeStatus(Code::kUnavailable, std::string(Name(outcome)));
  });
}

Status Cache::StartHandoff(const Text& text, const char* node, uint32_t wait_ms, uint8_t* outcome, Job* job) noexcept {
  return OnOpen(impl_, [&](CacheState& cache) -> Status {
    if (job == nullptr) return Invalid("job: null");
    if (outcome == nullptr) return Invalid("outcome: null");
    if (Status status = CheckHandoff(cache, text, node); !status.ok()) return status;
    auto made = std::make_unique<JobState>(JobState{.cache = cache.shared_from_this(), .task = nullptr});
    const auto busy = [outcome] { *outcome = static_cast<uint8_t>(HandoffOutcome::kBusy); };
    made->task =
        cache.handoffs.Start([&cache, handed = std::make_shared<HandedText>(text, node), wait_ms, outcome, busy] {
          const auto hand = [&] {
            *outcome = static_cast<uint8_t>(HandTextOff(cache, *handed, std::chrono::milliseconds(wait_ms)));
          };
          RunOr(hand, busy);
        });
    if (made->task == nullptr) busy();
    Access::Put(std::move(made), *job);
    return {};
  });
}

void Cache::StoredSegments(engine::StoredSegments* out) const noexcept {
  if (out == nullptr) return;
  *out = {};
  OnOpen(impl_, [&](CacheState& cache) {
    MutexLock lock(cache.stored_mutex);
    *out = cache.stored;
    return Status();
  });
}

uint64_t Cache::TakeQuiescedPages(int32_t* pages, uint64_t capacity, uint32_t timeout_ms, uint32_t group) noexcept {
  uint64_t taken = 0;
  if (pages == nullptr) return taken;
  OnOpen(impl_, [&](CacheState& cache) {
    if (group < cache.groups.all.size()) {
      const uint32_t set = cache.groups.SetOf(group);
      taken = cache.quarantine.Take(set, {pages, capacity}, std::chrono::milliseconds(timeout_ms));
    }
    return Status();
  });
  return taken;
}

const char* MissName(uint8_t reason) noexcept {
  return Name(static_cast<MissReason>(reason)).data();
}
const char* TierName(uint8_t tier) noexcept {
  return Name(static_cast<TierKind>(tier)).data();
}
const char* PublishName(uint8_t outcome) noexcept {
  return Name(static_cast<PublishOutcome>(outcome)).data();
}
const char* CommitName(uint8_t outcome) noexcept {
  return Name(static_cast<CommitOutcome>(outcome)).data();
}
const char* HandoffName(uint8_t outcome) noexcept {
  return Name(static_cast<HandoffOutcome>(outcome)).data();
}

}  // namespace ashlar::engine
