// SPDX-License-Identifier: Apache-2.0
#include "daemon/router/prefill_workers.h"

#include <algorithm>
#include <utility>

namespace ashlar::daemon {
namespace {

constexpr double kKeptRate = 0.5;  // weight of earlier measurements at each new one
constexpr double kSecondNanos = 1e9;

}  // namespace

void PrefillWorkers::Serve(const Engine& engine, std::span<const Result> results, storage::Nanos wait, Answer answer) {
  if (stopped_) return answer(absl::UnavailableError("the daemon is stopping"));
  auto found = std::ranges::find_if(workers_, [&](const auto& entry) {
    return entry.second.engine.session == engine.session && entry.second.engine.model == engine.model;
  });
  if (found == workers_.end()) {
    if (!MakeSpace(engine.tenant))
      return answer(absl::ResourceExhaustedError("too many engines of this tenant offer prefill"));
    found = workers_.emplace(next_worker_++, Worker{.engine = engine}).first;
  }
  const uint64_t number = found->first;
  Ended ended;
  Answer former;
  {
    Worker& worker = found->second;
    worker.asked_at = clock_.Now();
    worker.stalled = false;
    TakeResults(worker, results, ended);
    former = std::exchange(worker.waiting, std::move(answer));
    worker.waits_until = worker.asked_at + wait;
  }
  if (former) former(Given());
  // Callbacks may start more work immediately.
  for (auto& [done, status] : ended) done(status);
  if (const auto still = workers_.find(number); still != workers_.end()) Give(still->second);
}

bool PrefillWorkers::MakeSpace(storage::TenantId tenant) {
  size_t count = 0;
  auto oldest = workers_.end();
  for (auto entry = workers_.begin(); entry != workers_.end(); ++entry) {
    const Worker& worker = entry->second;
    if (worker.engine.tenant != tenant) continue;
    ++count;
    if (!worker.idle() || (oldest != workers_.end() && worker.asked_at >= oldest->second.asked_at)) continue;
    oldest = entry;
  }
  if (count < most_of_a_tenant_) return true;
  if (oldest == workers_.end()) return false;
  workers_.erase(oldest);
  return true;
}

void PrefillWorkers::TakeResults(Worker& worker, std::span<const Result> results, Ended& ended) {
  for (const Result& result : results) {
    if (!worker.running.has_value() || worker.running->number != result.assignment) {
      ++stats_.late;
      continue;
    }
    Assignment assignment = *std::exchange(worker.running, std::nullopt);
    if (!result.published) {
      ++stats_.failed;
      ended.emplace_back(std::move(assignment.done),
                         result.refused ? absl::OutOfRangeError("the worker can never compute the segment")
                                        : absl::AbortedError("the worker did not publish the segment"));
      continue;
    }
    const double seconds = static_cast<double>(std::max<storage::Nanos>(1, clock_.Now() - worker.began)) / kSecondNanos;
    const double rate = static_cast<double>(assignment.work.tokens) / seconds;
    worker.measured = worker.measured > 0 ? kKeptRate * worker.measured + (1 - kKeptRate) * rate : rate;
    ++stats_.done;
    ended.emplace_back(std::move(assignment.done), absl::OkStatus());
  }
  // It requests more without a report on the last one.
  if (worker.running.has_value()) {
    ++stats_.failed;
    ended.emplace_back(std::exchange(worker.running, std::nullopt)->done,
                       absl::AbortedError("the worker abandoned the segment"));
  }
}

void PrefillWorkers::Give(Worker& worker) {
  if (!worker.waiting || worker.queue.empty()) return;
  worker.running = std::move(worker.queue.front());
  worker.queue.pop_front();
  worker.began = clock_.Now();
  const Given given{.assignment = worker.running->number,
                    .work = worker.running->work,
                    .due_in = worker.running->deadline - worker.began};
  std::exchange(worker.waiting, nullptr)(given);
}

bool PrefillWorkers::Offering(const Worker& worker, storage::Nanos now) const {
  if (worker.stalled) return false;
  return worker.waiting || worker.running.has_value() || now - worker.asked_at <= kPause;
}

std::vector<PrefillWorkers::Offer> PrefillWorkers::Offers(storage::TenantId tenant, const NamespaceId& ns) const {
  std::vector<Offer> offers;
  const storage::Nanos now = clock_.Now();
  for (const auto& [number, worker] : workers_) {
    if (worker.engine.tenant != tenant || worker.engine.ns != ns || !Offering(worker, now)) continue;
    const size_t given = worker.queue.size() + (worker.running.has_value() ? 1 : 0);
    if (given >= kMostGiven) continue;
    uint64_t tokens = 0;
    for (const Assignment& queued : worker.queue) tokens += queued.work.tokens;
    if (worker.running.has_value()) {
      const double ran = static_cast<double>(now - worker.began) / kSecondNanos * worker.rate();
      const auto all = static_cast<double>(worker.running->work.tokens);
      tokens += static_cast<uint64_t>(std::max(0.0, all - ran));
    }
    offers.push_back({.worker = number,
                      .session = worker.engine.session,
                      .tokens_per_second = worker.rate(),
                      .queued_tokens = tokens,
                      .capacity = kMostGiven - given});
  }
  return offers;
}

uint64_t PrefillWorkers::Assign(uint64_t number, PrefillWork work, storage::Nanos deadline, Done done) {
  const auto found = workers_.find(number);
  if (stopped_ || found == workers_.end()) return 0;
  Worker& worker = found->second;
  const bool fits = worker.engine.tenant == work.tenant && worker.engine.ns == work.ns && !worker.stalled;
  if (!fits || worker.queue.size() + (worker.running.has_value() ? 1 : 0) >= kMostGiven) return 0;
  const uint64_t assignment = next_assignment_++;
  worker.queue.push_back({assignment, std::move(work), deadline, std::move(done)});
  Give(worker);
  return assignment;
}

PrefillWorkers::Done PrefillWorkers::TakeOut(uint64_t assignment) {
  for (auto& [number, worker] : workers_) {
    if (worker.running.has_value() && worker.running->number == assignment) {
      return std::exchange(worker.running, std::nullopt)->done;
    }
    const auto queued = std::ranges::find(worker.queue, assignment, &Assignment::number);
    if (queued == worker.queue.end()) continue;
    Done done = std::move(queued->done);
    worker.queue.erase(queued);
    return done;
  }
  return nullptr;
}

void PrefillWorkers::Withdraw(uint64_t assignment) {
  TakeOut(assignment);
}

void PrefillWorkers::Cancel(uint64_t assignment, const absl::Status& why) {
  if (const Done done = TakeOut(assignment)) done(why);
}

void PrefillWorkers::Fail(Worker& worker, const absl::Status& why, Ended& ended) {
  if (worker.running.has_value()) worker.queue.push_front(*std::exchange(worker.running, std::nullopt));
  for (Assignment& assignment : std::exchange(worker.queue, {})) {
    ++stats_.failed;
    ended.emplace_back(std::move(assignment.done), why);
  }
}

void PrefillWorkers::ModelClosed(storage::SessionId session, uint64_t model) {
  Remove([&](const Engine& engine) { return engine.session == session && engine.model == model; });
}

void PrefillWorkers::SessionEnded(storage::SessionId session) {
  Remove([&](const Engine& engine) { return engine.session == session; });
}

void PrefillWorkers::Remove(const std::function<bool(const Engine&)>& gone) {
  Ended ended;
  std::vector<Answer> waiting;
  for (auto entry = workers_.begin(); entry != workers_.end();) {
    Worker& worker = entry->second;
    if (!gone(worker.engine)) {
      ++entry;
      continue;
    }
    Fail(worker, absl::UnavailableError("the worker has disconnected"), ended);
    if (worker.waiting) waiting.push_back(std::move(worker.waiting));
    entry = workers_.erase(entry);
  }
  for (const Answer& answer : waiting) answer(Given());
  for (auto& [done, status] : ended) done(status);
}

void PrefillWorkers::Tick() {
  const storage::Nanos now = clock_.Now();
  Ended ended;
  std::vector<Answer> waiting;
  for (auto entry = workers_.begin(); entry != workers_.end();) {
    Worker& worker = entry->second;
    if (worker.running.has_value() && worker.running->deadline <= now) {
      ++stats_.overdue;
      worker.stalled = true;  // its queued segments would time out as well
      Fail(worker, absl::DeadlineExceededError("the worker did not finish in time"), ended);
    }
    for (auto queued = worker.queue.begin(); queued != worker.queue.end();) {
      if (queued->deadline > now) {
        ++queued;
        continue;
      }
      ++stats_.overdue;
      ended.emplace_back(std::move(queued->done), absl::DeadlineExceededError("the worker did not start in time"));
      queued = worker.queue.erase(queued);
    }
    if (worker.waiting && worker.waits_until <= now) waiting.push_back(std::exchange(worker.waiting, nullptr));
    entry = worker.idle() && now - worker.asked_at > kDropAfter ? workers_.erase(entry) : std::next(entry);
  }
  for (const Answer& answer : waiting) answer(Given());
  for (auto& [done, status] : ended) done(status);
}

void PrefillWorkers::Stop() {
  stopped_ = true;
  Ended ended;
  for (auto& [number, worker] : std::exchange(workers_, {})) {
    Fail(worker, absl::UnavailableError("the daemon is stopping"), ended);
    if (worker.waiting) worker.waiting(absl::UnavailableError("the daemon is stopping"));
  }
  for (auto& [done, status] : ended) done(status);
}

PrefillWorkers::Stats PrefillWorkers::stats() const {
  Stats stats = stats_;
  const storage::Nanos now = clock_.Now();
  for (const auto& [number, worker] : workers_) {
    stats.workers += Offering(worker, now) ? 1 : 0;
    stats.given += worker.queue.size() + (worker.running.has_value() ? 1 : 0);
  }
  return stats;
}

}  // namespace ashlar::daemon
