// SPDX-License-Identifier: Apache-2.0
// Model::PlanPrefill, AwaitPrefill, EndPrefill and ServePrefill: engines that compute segments for one another.
#include "client/session/prefill.h"

#include <algorithm>
#include <utility>

#include "ashlar/v1/cache.pb.h"
#include "client/session/model.h"
#include "client/session/rpc.h"
#include "proto/prefill_limits.h"
#include "proto/tokens.h"

namespace ashlar {
namespace {

using internal::Deadline;
using internal::ModelBinding;

// A daemon that needs longer counts as absent.
constexpr std::chrono::seconds kAnswerPatience{5};

int64_t WaitNanos(std::chrono::milliseconds wait) {
  const int64_t nanos = std::chrono::nanoseconds(std::min(wait, std::chrono::milliseconds(60'000))).count();
  return std::clamp<int64_t>(nanos, 0, limits::kMaxPrefillWaitNanos);
}

bool GoesElsewhere(const ObjectRun& run) {
  return run.media.empty() && run.salt == Salt{} && !run.tokens.empty() &&
         run.tokens.size() <= limits::kMaxPrefillTokens;
}

PrefillState ToPrefillState(uint32_t wire) {
  const bool known =
      wire == static_cast<uint32_t>(PrefillState::kPending) || wire == static_cast<uint32_t>(PrefillState::kHere);
  return known ? static_cast<PrefillState>(wire) : PrefillState::kOwn;
}

}  // namespace

PrefillPlan Model::PlanPrefill(std::span<const ObjectRun> runs, bool warm) {
  PrefillPlan plan{.states = std::vector<PrefillState>(runs.size(), PrefillState::kOwn)};
  const absl::StatusOr<ModelBinding> binding = Bind();
  if (!binding.ok()) return plan;
  v1::PlanPrefillRequest request;
  request.set_session(binding->connection->session());
  request.set_model(binding->model->id());
  request.set_warm(warm);
  // The longest runs if there are too many: a call has a limit, and short runs are computed quickly.
  std::vector<size_t> asked;
  for (size_t i = 0; i < runs.size(); ++i) {
    if (GoesElsewhere(runs[i])) asked.push_back(i);
  }
  std::ranges::stable_sort(asked, std::ranges::greater{}, [&](size_t i) { return runs[i].tokens.size(); });
  if (asked.size() > limits::kMaxObjectsPerCall) asked.resize(limits::kMaxObjectsPerCall);
  std::ranges::sort(asked);
  if (asked.empty()) return plan;
  for (const size_t i : asked) {
    v1::ObjectName* name = request.add_objects();
    name->set_kind(static_cast<uint32_t>(runs[i].kind));
    name->set_tokens(PackTokens(runs[i].tokens));
  }
  v1::PlanPrefillReply reply;
  const Deadline deadline = reconnector_->CallDeadline();
  const absl::Status status = binding->connection->rpc().PlanPrefill(request, reply, deadline);
  if (!status.ok() || static_cast<size_t>(reply.computed_elsewhere_size()) != asked.size()) return plan;
  plan.id = reply.plan();
  plan.generation = binding->connection->generation();
  plan.expected = std::chrono::nanoseconds(reply.expected_ns());
  plan.asked = std::move(asked);
  for (size_t i = 0; i < plan.asked.size(); ++i) {
    if (reply.computed_elsewhere(static_cast<int>(i))) plan.states[plan.asked[i]] = PrefillState::kPending;
  }
  return plan;
}

bool Model::AwaitPrefill(PrefillPlan& plan, std::chrono::milliseconds wait) {
  const auto is_pending = [&] { return std::ranges::count(plan.states, PrefillState::kPending) > 0; };
  const absl::StatusOr<ModelBinding> binding = Bind();
  const bool known = plan.id != 0 && binding.ok() && binding->connection->generation() == plan.generation;
  absl::Status status = absl::NotFoundError("plan: unknown or ended");
  v1::AwaitPrefillReply reply;
  if (known && is_pending()) {
    v1::AwaitPrefillRequest request;
    request.set_session(binding->connection->session());
    request.set_plan(plan.id);
    request.set_wait_ns(WaitNanos(wait));
    const Deadline deadline =
        std::chrono::steady_clock::now() + std::chrono::nanoseconds(request.wait_ns()) + kAnswerPatience;
    status = binding->connection->rpc().AwaitPrefill(request, reply, deadline);
  }
  const bool answered = status.ok() && static_cast<size_t>(reply.states_size()) == plan.asked.size();
  for (size_t i = 0; i < plan.asked.size(); ++i) {
    PrefillState& state = plan.states[plan.asked[i]];
    if (state != PrefillState::kPending) continue;
    // Without an answer, this engine computes the missing segments itself.
    state = answered ? ToPrefillState(reply.states(static_cast<int>(i))) : PrefillState::kOwn;
  }
  return is_pending();
}

void Model::EndPrefill(const PrefillPlan& plan) {
  const absl::StatusOr<ModelBinding> binding = Bind();
  if (plan.id == 0 || !binding.ok() || binding->connection->generation() != plan.generation) return;
  v1::EndPrefillRequest request;
  request.set_session(binding->connection->session());
  request.set_plan(plan.id);
  v1::EndPrefillReply reply;
  // If it fails, the daemon erases the plan at its own deadline.
  binding->connection->rpc().EndPrefill(request, reply, reconnector_->CallDeadline()).IgnoreError();
}

absl::StatusOr<std::optional<PrefillWork>> Model::ServePrefill(std::span<const PrefillResult> results,
                                                               std::chrono::milliseconds wait) {
  const absl::StatusOr<ModelBinding> binding = Bind();
  if (!binding.ok()) return binding.status();
  v1::ServePrefillRequest request;
  request.set_session(binding->connection->session());
  request.set_model(binding->model->id());
  request.set_wait_ns(WaitNanos(wait));
  for (const PrefillResult& result : results) {
    if (result.generation != binding->connection->generation()) continue;  // no engine waits for it any longer
    if (request.results_size() == static_cast<int>(limits::kMaxPrefillResults)) break;
    v1::PrefillResult* one = request.add_results();
    one->set_assignment(result.assignment);
    one->set_published(result.published);
    one->set_refused(result.refused);
  }
  v1::ServePrefillReply reply;
  const Deadline deadline =
      std::chrono::steady_clock::now() + std::chrono::nanoseconds(request.wait_ns()) + kAnswerPatience;
  const absl::Status status = binding->connection->rpc().ServePrefill(request, reply, deadline);
  if (!status.ok()) return status;
  if (reply.assignment() == 0) return std::nullopt;
  absl::StatusOr<std::vector<int32_t>> tokens = UnpackTokens(reply.object().tokens());
  const auto kind = static_cast<ObjectKind>(reply.object().kind());
  if (!tokens.ok() || tokens->empty() || (kind != ObjectKind::kSegment && kind != ObjectKind::kCheckpoint)) {
    return absl::InternalError("the daemon's assignment is not a segment");
  }
  return PrefillWork{.assignment = reply.assignment(),
                     .generation = binding->connection->generation(),
                     .kind = kind,
                     .tokens = *std::move(tokens),
                     .due_in = std::chrono::nanoseconds(reply.due_in_ns())};
}

}  // namespace ashlar
