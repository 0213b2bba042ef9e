// SPDX-License-Identifier: Apache-2.0
#include "tools/neighbours/victim.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/session/descriptor.h"
#include "kernels/mutex.h"
#include "tools/neighbours/http_client.h"
#include "tools/neighbours/raw_engine.h"

namespace ashlar::neighbours {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr uint64_t kSegmentBytes = 2u << 20;
constexpr milliseconds kPatience{5000};        // a landing's; ClientOptions has the same for calls
constexpr milliseconds kScrapePatience{2000};  // Prometheus times out after ten seconds
constexpr milliseconds kAfterRefusal{10};      // an engine would compute instead
constexpr std::chrono::seconds kNewcomersEvery{1};

double MillisecondsSince(steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(steady_clock::now() - start).count();
}

// Thread-safe.
class Tally {
 public:
  // Runs `work` and counts it. Returns its time in milliseconds if it was served.
  absl::StatusOr<double> Count(const std::function<absl::Status()>& work) {
    const auto start = steady_clock::now();
    const absl::Status status = work();
    const double elapsed = MillisecondsSince(start);
    MutexLock lock(mutex_);
    if (status.ok()) {
      ++served_;
      return elapsed;
    }
    if (refused_++ == 0) why_ = std::string(status.message());
    return status;
  }

  void Write(nlohmann::json& figures) const {
    MutexLock lock(mutex_);
    figures["served"] = served_;
    figures["refused"] = refused_;
    figures["why"] = why_;
  }

 private:
  mutable Mutex mutex_;
  uint64_t served_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t refused_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string why_ ABSL_GUARDED_BY(mutex_);
};

absl::Status RegisterRegion(Client& client) {
  constexpr size_t kBytes = 1u << 16;
  const absl::StatusOr<internal::Descriptor> memory = SealedMemory(kBytes);
  return memory.ok() ? client.RegisterRegion(memory->get(), kBytes).status() : memory.status();
}

// All requests of a newly started engine. Returns the longest time of any of them, in milliseconds.
double Arrive(const ClientOptions& daemon, const SegmentPrompt& prompt, Tally& tally) {
  double longest = 0;
  const auto count = [&](const char* what, const std::function<absl::Status()>& work) {
    const auto start = steady_clock::now();
    const auto took = tally.Count([&] {
      const absl::Status status = work();
      return status.ok() ? status : absl::Status(status.code(), absl::StrCat(what, ": ", status.message()));
    });
    longest = std::max(longest, MillisecondsSince(start));
    return took.ok();
  };
  std::unique_ptr<Client> client;
  Model model;
  const bool welcome = count("session", [&] {
    auto connected = Client::Connect(daemon);
    if (connected.ok()) client = *std::move(connected);
    return connected.status();
  });
  if (!welcome) return longest;
  const bool opened = count("model", [&] {
    auto answer = client->OpenModel(SmallIdentity(), SmallLayout());
    if (answer.ok()) model = *std::move(answer);
    return answer.status();
  });
  count("region", [&] { return RegisterRegion(*client); });
  if (!opened) return longest;
  count("arena", [&] {
    const Match match = model.Lookup(prompt.prompt());
    if (!match.segments()[1].hit()) return absl::NotFoundError(Name(match.segments()[1].reason));
    return match.tuples(1) != nullptr ? absl::OkStatus() : absl::UnavailableError("the tuples cannot be mapped");
  });
  return longest;
}

// Nearest rank; `none` if there are no values.
double Quantile(std::vector<double>& values, double share, double none) {
  if (values.empty()) return none;
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(std::ceil(share * static_cast<double>(values.size()))) - 1];
}

}  // namespace

absl::StatusOr<std::unique_ptr<Victim>> Victim::Open(const ClientOptions& daemon) {
  std::unique_ptr<Victim> victim(new Victim(daemon));
  auto client = Client::Connect(daemon);
  if (!client.ok()) return client.status();
  victim->client_ = *std::move(client);
  auto engine = SegmentEngine::Open(*victim->client_, kSegmentBytes);
  if (!engine.ok()) return engine.status();
  victim->engine_ = *std::move(engine);
  return victim;
}

nlohmann::json Victim::Measure(std::chrono::duration<double> span, const Newcomers& newcomers) {
  const auto end = steady_clock::now() + std::chrono::duration_cast<steady_clock::duration>(span);
  Tally tally;
  double newcomer_max_ms = 0, scrape_max_ms = 0;
  std::thread others([&] {
    if (!newcomers.any) return;
    for (auto next = steady_clock::now(); next < end; next = std::max(next + kNewcomersEvery, steady_clock::now())) {
      std::this_thread::sleep_until(next);
      newcomer_max_ms = std::max(newcomer_max_ms, Arrive(daemon_, engine_->prompt(), tally));
      if (newcomers.metrics_port == 0) continue;
      const auto start = steady_clock::now();
      (void)tally.Count([&] { return Scrape(newcomers.metrics_port, kScrapePatience); });
      scrape_max_ms = std::max(scrape_max_ms, MillisecondsSince(start));
    }
  });
  std::vector<double> rounds;
  while (steady_clock::now() < end) {
    const auto took = tally.Count([&] {
      Match match = engine_->Lookup();
      const MissReason reason = engine_->Land(match, kPatience);
      match.Release();
      return reason == MissReason::kNone ? absl::OkStatus()
                                         : absl::UnavailableError(absl::StrCat("round: ", Name(reason)));
    });
    if (took.ok()) {
      rounds.push_back(*took);
    } else {
      std::this_thread::sleep_for(kAfterRefusal);
    }
  }
  others.join();
  const double nothing = std::chrono::duration<double, std::milli>(span).count();
  nlohmann::json figures = {{"p50_ms", Quantile(rounds, 0.5, nothing)},
                            {"p99_ms", Quantile(rounds, 0.99, nothing)},
                            {"max_ms", Quantile(rounds, 1, nothing)},
                            {"newcomer_max_ms", newcomer_max_ms},
                            {"scrape_max_ms", scrape_max_ms}};
  tally.Write(figures);
  return figures;
}

}  // namespace ashlar::neighbours
