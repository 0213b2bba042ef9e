// The handles: Request and Job.
#include <algorithm>
#include <utility>

#include "ashlar/engine.h"
#include "client/engine/expert.h"
#include "client/engine/setting.h"
#include "client/engine/status.h"

namespace ashlar::engine {
namespace {

Status Pending() {
  return {.code = Code::kPending};
}

// Returns kOk if this thread may use the setting: not while it is being started.
Status Ready(const RequestState* request) {
  if (request == nullptr) return MakeStatus(Code::kFailedPrecondition, "the request was not begun");
  return request->starting != nullptr && !request->starting->done() ? Pending() : Status();
}

uint8_t ToNumber(PublishOutcome outcome) {
  return static_cast<uint8_t>(outcome);
}

}  // namespace

void Access::Put(RequestState* impl, Request& request) {
  Request made;
  made.impl_ = impl;
  request = std::move(made);
}
void Access::Put(std::shared_ptr<Background::Task> task, Job& job) {
  Job made;
  made.impl_ = new JobState{std::move(task)};
  job = std::move(made);
}

Job::Job(Job&& other) noexcept : impl_(std::exchange(other.impl_, nullptr)) {}
Job& Job::operator=(Job&& other) noexcept {
  std::swap(impl_, other.impl_);
  return *this;
}
Job::~Job() {
  Wait();
  delete impl_;
}
Status Job::Wait() {
  if (impl_ != nullptr && impl_->task != nullptr) impl_->task->Wait();
  return {};
}
Status Job::Poll() {
  return impl_ == nullptr || impl_->task == nullptr || impl_->task->done() ? Status() : Pending();
}

Request::Request(Request&& other) noexcept : impl_(std::exchange(other.impl_, nullptr)) {}
Request& Request::operator=(Request&& other) noexcept {
  std::swap(impl_, other.impl_);
  return *this;
}
Request::~Request() {
  if (impl_ != nullptr) impl_->setting->MarkCancelled();
  delete impl_;
}

Status Request::WaitPlan() {
  if (impl_ != nullptr && impl_->starting != nullptr) impl_->starting->Wait();
  return PollPlan();
}
Status Request::PollPlan() {
  if (Status ready = Ready(impl_); !ready.ok()) return ready;
  impl_->starting.reset();
  if (!impl_->setting->pages_kept()) return {};
  return MakeStatus(Code::kOtherPages, "the daemon may still write into the request's pages");
}

const Plan& Request::plan() const {
  static const Plan none;
  return Ready(impl_).ok() ? impl_->setting->plan() : none;
}

const Run* Request::missing(uint32_t* count) const {
  *count = 0;
  if (!Ready(impl_).ok()) return nullptr;
  const std::span<const Run> missing = impl_->setting->missing();
  *count = static_cast<uint32_t>(missing.size());
  return missing.data();
}

Status Request::Publish(uint32_t missing, const ComputedRun& computed, uint8_t* outcome) {
  if (Status ready = Ready(impl_); !ready.ok()) return ready;
  if (Status status = impl_->setting->Check(missing, computed); !status.ok()) return status;
  const PublishOutcome published = PublishRun(impl_->setting->cache(), impl_->setting->TakeOut(missing), computed);
  if (outcome != nullptr) *outcome = ToNumber(published);
  return {};
}

Status Request::StartPublish(uint32_t missing, const ComputedRun& computed, uint8_t* outcome, Job* job) {
  if (Status ready = Ready(impl_); !ready.ok()) return ready;
  if (job == nullptr) return Invalid("job: null");
  if (Status status = impl_->setting->Check(missing, computed); !status.ok()) return status;
  const Setting::Taken taken = impl_->setting->TakeOut(missing);
  CacheState& cache = impl_->setting->cache();
  // The tensors stay the caller's; what names them is copied.
  std::vector<LinearTensors> linear(computed.linear, computed.linear + computed.linear_count);
  std::vector<int32_t> pages(computed.page_table, computed.page_table + computed.page_count);
  auto task = cache.background.Start(
      [&cache, taken, linear = std::move(linear), pages = std::move(pages), run = computed, outcome]() mutable {
        run.linear = linear.data();
        run.page_table = pages.data();
        const PublishOutcome published = PublishRun(cache, taken, run);
        if (outcome != nullptr) *outcome = ToNumber(published);
      });
  if (task == nullptr) {
    cache.model.Abandon(taken.reservation);
    if (outcome != nullptr) *outcome = ToNumber(PublishOutcome::kBusy);
  }
  Access::Put(std::move(task), *job);
  return {};
}

void Request::Abandon(uint32_t missing) {
  if (Ready(impl_).ok()) impl_->setting->Abandon(missing);
}

Status Request::LookAgain(const int32_t* page_table, uint64_t page_count) {
  if (Status ready = Ready(impl_); !ready.ok()) return ready;
  if (Status status = impl_->setting->TakeOtherPages(page_table, page_count); !status.ok()) return status;
  impl_->setting->LookAgain();
  return PollPlan();
}

Status Request::StartLookAgain(const int32_t* page_table, uint64_t page_count) {
  if (Status ready = Ready(impl_); !ready.ok()) return ready;
  if (Status status = impl_->setting->TakeOtherPages(page_table, page_count); !status.ok()) return status;
  Background& background = impl_->setting->cache().background;
  impl_->starting = background.Start([setting = impl_->setting] { setting->LookAgain(); });
  if (impl_->starting == nullptr) impl_->setting->Miss(MissReason::kBusy);
  return {};
}

Status Request::WaitLayer(uint32_t layer) {
  if (Status ready = Ready(impl_); !ready.ok()) return ready;
  return impl_->setting->ReachLayer(layer, true);
}
Status Request::PollLayer(uint32_t layer) {
  if (Status ready = Ready(impl_); !ready.ok()) return ready;
  return impl_->setting->ReachLayer(layer, false);
}
Status Request::StepTuple(uint32_t step, uint32_t layer, Tuple* out) {
  if (Status ready = Ready(impl_); !ready.ok()) return ready;
  return impl_->setting->GetTuple(step, layer, out);
}
Status Request::Advance(const LayerAdvance& advance) {
  if (Status ready = Ready(impl_); !ready.ok()) return ready;
  return impl_->setting->Advance(advance);
}
Status Request::Finish() {
  if (Status ready = Ready(impl_); !ready.ok()) return ready;
  return impl_->setting->Finish(true);
}
Status Request::PollFinish() {
  if (Status ready = Ready(impl_); !ready.ok()) return ready;
  return impl_->setting->Finish(false);
}
Status Request::Move(const int32_t* page_table, uint64_t page_count) {
  if (Status ready = Ready(impl_); !ready.ok()) return ready;
  return impl_->setting->Move(page_table, page_count);
}
Status Request::Lose(const uint32_t* segments, uint32_t count) {
  if (Status ready = Ready(impl_); !ready.ok()) return ready;
  if (segments == nullptr && count > 0) return Invalid("segments: null");
  return impl_->setting->Lose({segments, count});
}
bool Request::pages_kept() const {
  return Ready(impl_).ok() && impl_->setting->pages_kept();
}
void Request::Cancel() {
  if (impl_ == nullptr) return;
  impl_->setting->MarkCancelled();
  if (Ready(impl_).ok()) impl_->setting->Cancel();
}
Status Request::PollQuiet() {
  if (Status ready = Ready(impl_); !ready.ok()) return ready;
  return impl_->setting->Quiet();
}
void Request::Release() {
  if (Ready(impl_).ok()) impl_->setting->Release();
}

uint64_t Request::PlanBytes(uint8_t* out, uint64_t capacity) const {
  if (!Ready(impl_).ok()) return 0;
  const std::string bytes = impl_->setting->PlanBytes();
  if (bytes.size() <= capacity) std::ranges::copy(bytes, out);
  return bytes.size();
}

const ashlar::Match* MatchOf(const Request& request) {
  return Access::Of(request)->match();
}

Status ViewOf(const Request& request, uint32_t step, uint32_t layer, kernels::TupleView* tuple,
              const void** conv_tail) {
  Setting::StepView view;
  if (Status status = Access::Of(request)->View(step, layer, &view); !status.ok()) return status;
  *tuple = view.tuple;
  *conv_tail = view.conv_tail;
  return {};
}

}  // namespace ashlar::engine
