// SPDX-License-Identifier: Apache-2.0
#include "tools/load/load.h"

#include <poll.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "examples/testing/local_daemon.h"
#include "tools/load/engine_process.h"

namespace ashlar::load {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kWarmPrompts = 32;  // prompts of each way before the measurement: by then every section has occurred
constexpr size_t kCapacityPrompts = 8;  // of each engine
// As multiples of what full recompute can serve, which is measured first.
constexpr double kRates[] = {0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32};
constexpr double kQuickRates[] = {0.5, 1};
constexpr double kKeepsUp = 0.9;  // fraction of the arrivals that must be served in time
constexpr int kAnswerMilliseconds = 60000;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Nearest rank.
double Quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(std::ceil(share * static_cast<double>(values.size()))) - 1];
}

// The results of the requests of one rate.
struct Served {
  std::vector<double> ttft_ms, service_ms;  // from the arrival; in the engine
  uint64_t tokens = 0, hits = 0, misses = 0;
  double seconds = 0;  // until the last first token
  double Rate() const { return static_cast<double>(ttft_ms.size()) / seconds; }
};

// Engines with a common queue.
class Fleet {
 public:
  absl::Status Start(const std::string& way, int engines, const tools::DaemonSockets& daemon) {
    for (int i = 0; i < engines; ++i) {
      auto engine =
          EngineProcess::Start({"ashlar-bench", "load-engine", way, daemon.rpc_socket, daemon.session_socket});
      if (!engine.ok()) return engine.status();
      engines_.push_back(*std::move(engine));
    }
    serving_.resize(engines_.size());
    return absl::OkStatus();
  }

  // Serves all arrivals, given in seconds from now; the prompts follow those of earlier calls.
  absl::StatusOr<Served> Serve(const std::vector<double>& arrivals);

 private:
  absl::Status Dispatch(const std::vector<double>& arrivals, double now);
  // Waits for an answer or the next arrival.
  absl::Status Wait(const std::vector<double>& arrivals, double now);
  bool Idle() const {
    return std::ranges::any_of(serving_, [](const auto& request) { return !request.has_value(); });
  }

  std::vector<std::unique_ptr<EngineProcess>> engines_;
  std::vector<std::optional<size_t>> serving_;  // the request that each engine serves
  std::vector<pollfd> waits_;
  size_t next_ = 0;  // request to dispatch
  uint64_t prompts_ = 0;
};

absl::Status Fleet::Dispatch(const std::vector<double>& arrivals, double now) {
  for (size_t i = 0; i < engines_.size() && next_ < arrivals.size() && arrivals[next_] <= now; ++i) {
    if (serving_[i].has_value()) continue;
    serving_[i] = next_++;
    if (absl::Status status = engines_[i]->Ask(prompts_++); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Fleet::Wait(const std::vector<double>& arrivals, double now) {
  waits_.clear();
  for (size_t i = 0; i < engines_.size(); ++i) {
    waits_.push_back({.fd = serving_[i].has_value() ? engines_[i]->descriptor() : -1, .events = POLLIN});
  }
  const bool next = Idle() && next_ < arrivals.size();
  const double wait = next ? std::max(arrivals[next_] - now, 0.0) : kAnswerMilliseconds * 1e-3;
  const timespec timeout = {.tv_sec = static_cast<time_t>(wait),
                            .tv_nsec = static_cast<long>((wait - std::floor(wait)) * 1e9)};
  if (ppoll(waits_.data(), waits_.size(), &timeout, nullptr) == 0 && !next) {
    return absl::DeadlineExceededError("an engine does not answer");
  }
  return absl::OkStatus();
}

absl::StatusOr<Served> Fleet::Serve(const std::vector<double>& arrivals) {
  Served served;
  next_ = 0;
  const Clock::time_point start = Clock::now();
  while (served.ttft_ms.size() < arrivals.size()) {
    if (absl::Status status = Dispatch(arrivals, SecondsSince(start)); !status.ok()) return status;
    if (absl::Status status = Wait(arrivals, SecondsSince(start)); !status.ok()) return status;
    for (size_t i = 0; i < engines_.size(); ++i) {
      if (!serving_[i].has_value() || waits_[i].revents == 0) continue;
      const absl::StatusOr<EngineProcess::Answer> answer = engines_[i]->Read();
      if (!answer.ok()) return answer.status();
      served.seconds = SecondsSince(start);
      served.ttft_ms.push_back((served.seconds - arrivals[*serving_[i]]) * 1e3);
      served.service_ms.push_back(answer->service_ms);
      served.tokens += answer->tokens;
      served.hits += answer->hits;
      served.misses += answer->misses;
      serving_[i].reset();
    }
  }
  return served;
}

class Sweep {
 public:
  Sweep(const LoadOptions& options, nlohmann::json& points)
      : options_(options),
        engines_(options.engines > 0 ? options.engines : static_cast<int>(std::thread::hardware_concurrency())),
        points_(points) {}

  // Full recompute comes first: its capacity is the unit of rates.
  absl::Status Measure(const std::string& way);
  double capacity() const { return capacity_; }
  int engines() const { return engines_; }

 private:
  double seconds() const { return options_.quick ? 1 : options_.seconds; }
  std::vector<double> Arrivals(double rate) const;
  void Record(const std::string& way, double rate, const Served& served);

  const LoadOptions& options_;
  const int engines_;
  nlohmann::json& points_;
  double capacity_ = 0;
};

// The same for every way.
std::vector<double> Sweep::Arrivals(double rate) const {
  std::mt19937_64 random(options_.seed);
  std::exponential_distribution<double> gap(rate);
  std::vector<double> arrivals;
  for (double at = gap(random); at < seconds() || arrivals.empty(); at += gap(random)) arrivals.push_back(at);
  return arrivals;
}

void Sweep::Record(const std::string& way, double rate, const Served& served) {
  const double all = static_cast<double>(served.hits + served.misses);
  points_.push_back({{"way", way},
                     {"rate_per_s", rate},
                     {"rate_of_full_capacity", rate / capacity_},
                     {"requests", served.ttft_ms.size()},
                     {"ttft_p50_ms", Quantile(served.ttft_ms, 0.5)},
                     {"ttft_p99_ms", Quantile(served.ttft_ms, 0.99)},
                     {"service_p50_ms", Quantile(served.service_ms, 0.5)},
                     {"throughput_per_s", served.Rate()},
                     {"tokens_per_s", static_cast<double>(served.tokens) / served.seconds},
                     {"hit_share", all > 0 ? static_cast<double>(served.hits) / all : 0}});
  const nlohmann::json& point = points_.back();
  std::printf("%-8s %8.2f %8zu %12.0f %12.0f %12.0f %10.2f %10.0f %6.2f\n", way.c_str(), rate, served.ttft_ms.size(),
              point["ttft_p50_ms"].get<double>(), point["ttft_p99_ms"].get<double>(),
              point["service_p50_ms"].get<double>(), served.Rate(), point["tokens_per_s"].get<double>(),
              point["hit_share"].get<double>());
  std::fflush(stdout);
}

absl::Status Sweep::Measure(const std::string& way) {
  std::unique_ptr<tools::LocalDaemon> daemon;
  if (way == "ashlar") {
    auto started = tools::LocalDaemon::Start({});
    if (!started.ok()) return started.status();
    daemon = *std::move(started);
  }
  Fleet fleet;
  const tools::DaemonSockets sockets = daemon == nullptr ? tools::DaemonSockets{} : daemon->sockets();
  if (absl::Status status = fleet.Start(way, engines_, sockets); !status.ok()) return status;
  if (auto warm = fleet.Serve(std::vector<double>(kWarmPrompts)); !warm.ok()) return warm.status();
  if (way == "full") {
    const auto whole = fleet.Serve(std::vector<double>(kCapacityPrompts * static_cast<size_t>(engines_)));
    if (!whole.ok()) return whole.status();
    capacity_ = whole->Rate();
  }
  for (double factor : options_.quick ? std::span<const double>(kQuickRates) : std::span<const double>(kRates)) {
    const double rate = factor * capacity_;
    const std::vector<double> arrivals = Arrivals(rate);
    const auto served = fleet.Serve(arrivals);
    if (!served.ok()) return served.status();
    Record(way, static_cast<double>(arrivals.size()) / seconds(), *served);  // the rate that resulted
    if (served->seconds > arrivals.back() / kKeepsUp && served->Rate() < kKeepsUp * rate) break;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Run(const LoadOptions& options, nlohmann::json& figures) {
  signal(SIGPIPE, SIG_IGN);  // a dead engine is reported as an error
  nlohmann::json& points = figures["points"] = nlohmann::json::array();
  Sweep sweep(options, points);
  std::printf("%-8s %8s %8s %12s %12s %12s %10s %10s %6s\n", "way", "rate/s", "requests", "TTFT p50 ms", "TTFT p99 ms",
              "service ms", "served/s", "tokens/s", "hits");
  for (const char* way : {"full", "prefix", "ashlar"}) {
    if (absl::Status status = sweep.Measure(way); !status.ok()) {
      return absl::Status(status.code(), absl::StrCat(way, ": ", status.message()));
    }
  }
  figures["engines"] = sweep.engines();
  figures["threads_per_engine"] = 1;
  figures["full_capacity_per_s"] = sweep.capacity();
  return absl::OkStatus();
}

}  // namespace ashlar::load
