// SPDX-License-Identifier: Apache-2.0
// ashlar-replay serve: replays traces through a real daemon.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "examples/testing/local_daemon.h"
#include "tools/neighbours/http_client.h"
#include "tools/replay/commands.h"
#include "tools/replay/models.h"
#include "tools/replay/prefill_time.h"
#include "tools/replay/replay.h"
#include "tools/replay/schedule.h"
#include "tools/replay/serving_engine.h"
#include "tools/replay/trace.h"

namespace ashlar::replay {
namespace {

constexpr std::chrono::milliseconds kMetricsPeriod{500};  // more than that in which the daemon counts tasks
constexpr std::chrono::seconds kMetricsPatience{10};
constexpr uint64_t kBuckets[] = {0, 1024, 4096, 16384};  // least tokens of a prompt
constexpr uint64_t kUnboundBytes = uint64_t{1} << 50;    // prefix_bytes that no replay reaches

struct Measured {
  uint64_t prompt_tokens = 0, cached_tokens = 0;
  double ttft_ms = 0;
};

// What the kernel has counted of a thread since its start.
struct ThreadCounts {
  double voluntary_switches = 0, involuntary_switches = 0;
  double minor_faults = 0, major_faults = 0;
};

// What the daemon reports of a replay.
struct Tally {
  double longest_turn_ms = 0, longest_turn_cpu_ms = 0;  // maxima, perhaps of different tasks
  ThreadCounts metadata_thread;
  double turns = 0, long_turns = 0;  // all, and those of more than a millisecond
  double landed_bytes = 0, evicted_bytes = 0, promoted_bytes = 0;
  double published_bytes = 0, written_bytes = 0;  // objects, and their copies on the disk
};

// Sums the samples of a metric whose labels contain `labels`.
double Sum(absl::string_view text, absl::string_view name, absl::string_view labels = "") {
  double sum = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const size_t end = line.find_first_of("{ ");
    if (line.substr(0, end) != name || line.find(labels) == absl::string_view::npos) continue;
    sum += std::strtod(std::string(line.substr(line.rfind(' ') + 1)).c_str(), nullptr);
  }
  return sum;
}

// Returns the counts of the daemon's metadata thread, without the tasks that ran on its callers' threads. Counts per
// task would cost the thread two system calls for each.
ThreadCounts ReadMetadataThread(pid_t daemon) {
  ThreadCounts counts;
  std::error_code error;
  for (const auto& task : std::filesystem::directory_iterator(absl::StrCat("/proc/", daemon, "/task"), error)) {
    std::string line;
    if (!std::getline(std::ifstream(task.path() / "comm"), line) || line != "metadata") continue;
    std::ifstream status(task.path() / "status");
    while (std::getline(status, line)) {
      const std::pair<absl::string_view, absl::string_view> field = absl::StrSplit(line, absl::MaxSplits(':', 1));
      const double value = std::strtod(std::string(field.second).c_str(), nullptr);
      if (field.first == "voluntary_ctxt_switches") counts.voluntary_switches = value;
      if (field.first == "nonvoluntary_ctxt_switches") counts.involuntary_switches = value;
    }
    std::getline(std::ifstream(task.path() / "stat"), line);
    const size_t end = line.rfind(')');  // end of the thread's name; the third field, its state, follows
    if (end == std::string::npos) continue;
    const std::vector<std::string> fields = absl::StrSplit(line.substr(end + 1), ' ', absl::SkipEmpty());
    if (fields.size() < 10) continue;
    counts.minor_faults = std::strtod(fields[7].c_str(), nullptr);
    counts.major_faults = std::strtod(fields[9].c_str(), nullptr);
  }
  return counts;
}

absl::StatusOr<Tally> ReadTally(const tools::LocalDaemon& daemon) {
  std::this_thread::sleep_for(kMetricsPeriod);
  const absl::StatusOr<std::string> text = neighbours::ReadMetrics(daemon.metrics_port(), kMetricsPatience);
  if (!text.ok()) return text.status();
  Tally tally;
  tally.longest_turn_ms = Sum(*text, "ashlar_metadata_task_longest_seconds") * 1e3;
  tally.longest_turn_cpu_ms = Sum(*text, "ashlar_metadata_task_longest_cpu_seconds") * 1e3;
  tally.metadata_thread = ReadMetadataThread(daemon.pid());
  tally.turns = Sum(*text, "ashlar_metadata_task_duration_seconds_count");
  tally.long_turns = tally.turns - Sum(*text, "ashlar_metadata_task_duration_seconds_bucket", "le=\"0.001\"");
  tally.landed_bytes = Sum(*text, "ashlar_landed_bytes_total");
  tally.evicted_bytes = Sum(*text, "ashlar_evicted_bytes_total");
  tally.promoted_bytes = Sum(*text, "ashlar_tier_copied_bytes_total", "from=\"ssd\"");
  tally.published_bytes = Sum(*text, "ashlar_published_bytes_total");
  tally.written_bytes = Sum(*text, "ashlar_tier_copied_bytes_total", "to=\"ssd\"");
  return tally;
}

// The daemon of one policy. LRU decides alone: the planner of prefixes then has no budget of its own.
tools::LocalDaemonOptions DaemonOptions(const ServeOptions& options, const std::string& policy) {
  tools::LocalDaemonOptions daemon{.binary = options.daemon,
                                   .dram_bytes = options.dram_bytes / options.scale,
                                   .ssd_bytes = options.ssd_bytes / options.scale,
                                   .admission = options.admission,
                                   .metrics = true};
  if (policy != "lru") return daemon;
  daemon.eviction = "lru";
  daemon.tenants = absl::StrCat("tenants:\n  - name: replay\n    uids: [", getuid(),
                                "]\n    dram_bytes: ", daemon.dram_bytes, "\n    prefix_bytes: ", kUnboundBytes, "\n");
  if (daemon.ssd_bytes > 0) absl::StrAppend(&daemon.tenants, "    ssd_bytes: ", daemon.ssd_bytes, "\n");
  return daemon;
}

// One policy at one rate, through a fresh daemon.
class Replayer {
 public:
  Replayer(const Trace& trace, const Model& model, const PrefillTime& prefill, const Options& options)
      : trace_(trace), model_(model), prefill_(prefill), options_(options) {
    const size_t requests = std::min(options.serve.requests, trace.requests().size());
    std::vector<int32_t> tokens;
    for (size_t i = 0; i < requests; ++i) {
      sessions_.push_back(trace.requests()[i].session);
      trace.Tokens(trace.requests()[i], tokens);
      most_tokens_ = std::max<uint64_t>(most_tokens_, tokens.size());
    }
  }

  absl::Status Run(const std::string& policy, double rate);
  const std::vector<Measured>& measured() const { return measured_; }
  const std::optional<Tally>& tally() const { return tally_; }  // none: no daemon

 private:
  absl::Status Work(ServingEngine& engine, Schedule& schedule, size_t slot);

  const Trace& trace_;
  const Model& model_;
  const PrefillTime& prefill_;
  const Options& options_;
  std::vector<uint64_t> sessions_;
  uint64_t most_tokens_ = 0;
  std::vector<Measured> measured_;  // by request
  std::optional<Tally> tally_;
};

absl::Status Replayer::Run(const std::string& policy, double rate) {
  std::unique_ptr<tools::LocalDaemon> daemon;  // outlives the engine
  ServingEngine engine(model_, prefill_,
                       {.scale = options_.serve.scale,
                        .capture_tokens = options_.capture,
                        .running = options_.serve.running,
                        .most_tokens = most_tokens_});
  if (policy != "none") {
    auto started = tools::LocalDaemon::Start(DaemonOptions(options_.serve, policy));
    if (!started.ok()) return started.status();
    daemon = *std::move(started);
    if (absl::Status status = engine.Open(daemon->sockets()); !status.ok()) return status;
  }
  measured_.assign(sessions_.size(), {});
  Schedule schedule(sessions_, rate);
  std::vector<absl::Status> failed(options_.serve.running);
  {
    std::vector<std::jthread> threads;
    for (size_t slot = 0; slot < failed.size(); ++slot) {
      threads.emplace_back([&, slot] {
        failed[slot] = Work(engine, schedule, slot);
        if (!failed[slot].ok()) schedule.Stop();
      });
    }
  }
  for (const absl::Status& status : failed) {
    if (!status.ok()) return status;
  }
  tally_.reset();
  if (daemon == nullptr) return absl::OkStatus();
  const absl::StatusOr<Tally> tally = ReadTally(*daemon);
  if (tally.ok()) tally_ = *tally;
  return tally.status();
}

absl::Status Replayer::Work(ServingEngine& engine, Schedule& schedule, size_t slot) {
  std::vector<int32_t> tokens;
  while (const std::optional<Schedule::Arrival> arrival = schedule.Next()) {
    const uint64_t prompt = trace_.Tokens(trace_.requests()[arrival->request], tokens);
    const absl::StatusOr<ServingEngine::Served> served = engine.Serve(slot, tokens, prompt);
    if (!served.ok()) return served.status();
    measured_[arrival->request] = {
        prompt, served->cached_tokens,
        std::chrono::duration<double, std::milli>(served->first_token - arrival->at).count()};
    schedule.Ended(arrival->request);
  }
  return absl::OkStatus();
}

// The row of the prompts of [least, end) tokens. Null: there are none.
nlohmann::json Row(const std::vector<Measured>& measured, uint64_t least, uint64_t end) {
  std::vector<double> ttft_ms;
  uint64_t tokens = 0, cached = 0;
  for (const Measured& request : measured) {
    if (request.prompt_tokens < least || request.prompt_tokens >= end) continue;
    ttft_ms.push_back(request.ttft_ms);
    tokens += request.prompt_tokens;
    cached += request.cached_tokens;
  }
  if (ttft_ms.empty()) return {};
  return {{"requests", ttft_ms.size()},
          {"ttft_p5_ms", Quantile(ttft_ms, 0.05)},
          {"ttft_p50_ms", Quantile(ttft_ms, 0.5)},
          {"ttft_p95_ms", Quantile(ttft_ms, 0.95)},
          {"ttft_p99_ms", Quantile(ttft_ms, 0.99)},
          {"hit_rate", static_cast<double>(cached) / static_cast<double>(std::max<uint64_t>(tokens, 1))}};
}

void Print(const nlohmann::json& row) {
  const auto number = [&row](const char* name) { return row.at(name).get<double>(); };
  const nlohmann::json& turn = row.at("longest_metadata_turn_ms");
  char longest[32] = "–";
  if (!turn.is_null()) std::snprintf(longest, sizeof longest, "%.3f", turn.get<double>());
  std::printf("%-20s %-7s %7.2f %-11s %8.0f │ %8.1f %8.1f %8.1f %8.1f │ %6.3f │ %s\n",
              row.at("trace").get<std::string>().c_str(), row.at("policy").get<std::string>().c_str(),
              number("arrival_rate"), row.at("prompt_tokens_bucket").get<std::string>().c_str(), number("requests"),
              number("ttft_p5_ms"), number("ttft_p50_ms"), number("ttft_p95_ms"), number("ttft_p99_ms"),
              number("hit_rate"), longest);
  std::fflush(stdout);
}

// All prompts, then those of each length.
void Record(const Replayer& replayer, const nlohmann::json& run, nlohmann::json& runs) {
  const auto add = [&](const std::string& bucket, uint64_t least, uint64_t end) {
    nlohmann::json row = Row(replayer.measured(), least, end);
    if (row.is_null()) return;
    row.update(run);
    row["prompt_tokens_bucket"] = bucket;
    row["longest_metadata_turn_ms"] = nullptr;
    row["longest_metadata_turn_cpu_ms"] = nullptr;
    if (const std::optional<Tally>& tally = replayer.tally()) {
      row["longest_metadata_turn_ms"] = tally->longest_turn_ms;
      row["longest_metadata_turn_cpu_ms"] = tally->longest_turn_cpu_ms;
      const ThreadCounts& thread = tally->metadata_thread;
      row["metadata_thread"] = {{"voluntary_switches", thread.voluntary_switches},
                                {"involuntary_switches", thread.involuntary_switches},
                                {"minor_faults", thread.minor_faults},
                                {"major_faults", thread.major_faults}};
      row["metadata_turns"] = tally->turns;
      row["metadata_turns_over_1ms"] = tally->long_turns;
      row["landed_bytes"] = tally->landed_bytes;
      row["evicted_bytes"] = tally->evicted_bytes;
      row["promoted_bytes"] = tally->promoted_bytes;
      row["published_bytes"] = tally->published_bytes;
      row["written_bytes"] = tally->written_bytes;
    }
    Print(row);
    runs.push_back(std::move(row));
  };
  add("all", 0, UINT64_MAX);
  for (size_t i = 0; i < std::size(kBuckets); ++i) {
    const bool last = i + 1 == std::size(kBuckets);
    const uint64_t end = last ? UINT64_MAX : kBuckets[i + 1];
    add(last ? absl::StrCat(kBuckets[i], "+") : absl::StrCat(kBuckets[i], "-", end - 1), kBuckets[i], end);
  }
}

}  // namespace

absl::Status ServeTraces(const Options& options, Figures& figures) {
  const absl::StatusOr<Model> model = FindModel(options.model);
  if (!model.ok()) return model.status();
  absl::StatusOr<PrefillTime> prefill = PrefillTime(*model);
  if (!options.serve.prefill_rates.empty()) prefill = PrefillTime::Parse(options.serve.prefill_rates);
  if (!prefill.ok()) return prefill.status();
  figures.json = {{"model", model->name},
                  {"scale", options.serve.scale},
                  {"dram_bytes", options.serve.dram_bytes},
                  {"ssd_bytes", options.serve.ssd_bytes},
                  {"admission", options.serve.admission},
                  {"prefill_rates", options.serve.prefill_rates},
                  {"running", options.serve.running},
                  {"capture", options.capture},
                  {"runs", nlohmann::json::array()}};
  std::printf("%-20s %-7s %7s %-11s %8s │ %8s %8s %8s %8s │ %6s │ %s\n", "trace", "policy", "rate/s", "tokens",
              "requests", "TTFT p5", "p50", "p95", "p99, ms", "hits", "longest turn, ms");
  for (const std::string& path : options.traces) {
    const absl::StatusOr<Trace> trace = ReadTrace(options.format, path);
    if (!trace.ok()) return trace.status();
    Replayer replayer(*trace, *model, *prefill, options);
    for (const double rate : options.serve.arrival_rates) {
      for (const std::string& policy : options.policies) {
        if (absl::Status status = replayer.Run(policy, rate); !status.ok()) {
          return absl::Status(status.code(), absl::StrCat(policy, ": ", status.message()));
        }
        Record(replayer, {{"trace", trace->name()}, {"policy", policy}, {"arrival_rate", rate}}, figures.json["runs"]);
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace ashlar::replay
