// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/engine_doctor.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace ashlar::ctl {
namespace {

constexpr std::chrono::seconds kTimeout{5};
constexpr const char* kState = "vllm:ashlar_state";
constexpr const char* kLookups = "vllm:ashlar_lookups_total";
constexpr const char* kHits = "vllm:ashlar_hits_total";
constexpr const char* kStores = "vllm:ashlar_stores_total";
constexpr const char* kFailures = "vllm:ashlar_load_failures_total";
constexpr const char* kRequests = "vllm:request_success_total";

using Counts = std::map<std::string, double>;  // by the label `outcome`; hits by `kind`

// The samples of one engine: a server with data parallelism exports several.
struct EngineSamples {
  std::map<std::string, Counts> counters;  // by name
  std::string state, reason;

  double Count(const std::string& name, std::initializer_list<const char*> outcomes) const {
    double sum = 0;
    const auto found = counters.find(name);
    for (const char* outcome : outcomes) {
      if (found != counters.end() && found->second.contains(outcome)) sum += found->second.at(outcome);
    }
    return sum;
  }
  double Sum(const std::string& name) const {
    double sum = 0;
    if (const auto found = counters.find(name); found != counters.end()) {
      for (const auto& [outcome, count] : found->second) sum += count;
    }
    return sum;
  }
  // "hit 3, miss 1".
  std::string Outcomes(const std::string& name) const {
    const auto found = counters.find(name);
    if (found == counters.end()) return "none";
    return absl::StrJoin(found->second, ", ", [](std::string* out, const Counts::value_type& each) {
      absl::StrAppendFormat(out, "%s %.0f", each.first, each.second);
    });
  }
};

std::string LabelOf(const Sample& sample, const std::string& label) {
  const auto found = sample.labels.find(label);
  return found == sample.labels.end() ? "" : found->second;
}

std::map<std::string, EngineSamples> ByEngine(const EngineMetrics& metrics) {
  std::map<std::string, EngineSamples> engines;
  for (const Sample& sample : metrics.samples) {
    if (!absl::StartsWith(sample.name, "vllm:ashlar_") && sample.name != kRequests) continue;
    EngineSamples& engine = engines[LabelOf(sample, "engine")];
    if (sample.name == kState && sample.value == 1) {
      engine.state = LabelOf(sample, "state");
      engine.reason = LabelOf(sample, "reason");
    } else if (sample.name != kState) {
      engine.counters[sample.name][LabelOf(sample, sample.name == kHits ? "kind" : "outcome")] += sample.value;
    }
  }
  return engines;
}

Finding OfState(const EngineSamples& engine) {
  if (engine.state.empty()) {
    return {Verdict::kBad, "state", "not reported yet; expected serving",
            "send a prompt of 32 tokens or more, then run this command again"};
  }
  const auto& reasons = EngineReasons();
  const auto known =
      std::ranges::find_if(reasons, [&](const EngineReason& each) { return engine.reason == each.reason; });
  const std::string found = absl::StrCat(engine.state, " (", engine.reason, ")");
  if (known == reasons.end()) {
    return {Verdict::kBad, "state", absl::StrCat(found, "; expected serving"),
            "use the ashlarctl of the engine's release, which knows this reason"};
  }
  if (known->remedy[0] == '\0') return {Verdict::kFine, "state", found, ""};
  return {Verdict::kBad, "state", absl::StrCat(found, "; expected serving"), known->remedy};
}

Finding OfLookups(const EngineSamples& engine) {
  const double all = engine.Sum(kLookups), late = engine.Count(kLookups, {"timed_out", "paused"});
  // `lookups` has no outcome for a prompt that hits segments.
  const double composed = engine.Count(kHits, {"composed"});
  std::string found = engine.Outcomes(kLookups);
  if (composed > 0) absl::StrAppendFormat(&found, "; %.0f prompts hit segments", composed);
  if (all + composed == 0 && engine.Sum(kRequests) == 0) {
    return {Verdict::kNote, "lookups", "none; the engine has answered no request", "send a request"};
  }
  if (all + composed == 0) {
    return {Verdict::kBad, "lookups", absl::StrFormat("none of %.0f requests", engine.Sum(kRequests)),
            "send prompts of 32 tokens or more that vLLM's own prefix cache does not hold"};
  }
  if (late > 0 && 2 * late >= all + composed) {
    return {Verdict::kBad, "lookups", absl::StrCat(found, "; expected answers within lookup_ms"),
            "raise lookup_ms, or find the cause of the load with ashlarctl top"};
  }
  if (engine.Count(kLookups, {"hit"}) + composed == 0) {
    return {Verdict::kBad, "lookups", absl::StrCat(found, "; expected hits"),
            "the first use of a text misses; for later ones run ashlarctl explain --last 5"};
  }
  if (late > 0) {
    return {Verdict::kNote, "lookups", found, "raise lookup_ms, or find the cause of the load with ashlarctl top"};
  }
  return {Verdict::kFine, "lookups", found, ""};
}

bool IsKept(const std::string& outcome) {
  return outcome == "kept" || outcome == "already_present" || outcome == "kept_as_span";
}

// Returns the remedy for the most frequent reason why texts are not stored.
const char* StoreRemedy(const Counts& stores) {
  std::string worst;
  double most = 0;
  for (const auto& [outcome, count] : stores) {
    if (IsKept(outcome) || count <= most) continue;
    worst = outcome;
    most = count;
  }
  const auto& outcomes = StoreOutcomes();
  const auto known = std::ranges::find(outcomes, worst, &StoreOutcome::outcome);
  return known == outcomes.end() ? "use the ashlarctl of the engine's release, which knows this outcome"
                                 : known->remedy;
}

Finding OfStores(const EngineSamples& engine) {
  const double all = engine.Sum(kStores);
  if (all == 0) {
    return {Verdict::kNote, "stores", "none",
            "send prompts of 32 tokens or more; an engine with kv_role kv_consumer stores nothing"};
  }
  const Counts& stores = engine.counters.at(kStores);
  double kept = 0;
  for (const auto& [outcome, count] : stores) kept += IsKept(outcome) ? count : 0;
  const std::string found = engine.Outcomes(kStores);
  if (kept == 0) return {Verdict::kBad, "stores", absl::StrCat(found, "; expected kept"), StoreRemedy(stores)};
  if (2 * kept < all) return {Verdict::kNote, "stores", found, StoreRemedy(stores)};
  return {Verdict::kFine, "stores", found, ""};
}

std::vector<Finding> JudgeOne(const EngineSamples& engine) {
  std::vector<Finding> findings = {OfState(engine)};
  if (engine.state != "serving") return findings;
  findings.push_back(OfLookups(engine));
  findings.push_back(OfStores(engine));
  if (const double failed = engine.Sum(kFailures); failed > 0) {
    findings.push_back({Verdict::kNote, "loads", absl::StrFormat("%.0f failed and were recomputed", failed),
                        "read the engine's log, then ashlarctl status"});
  }
  return findings;
}

}  // namespace

const std::vector<EngineReason>& EngineReasons() {
  static const auto* const reasons = new std::vector<EngineReason>{
      {"none", "serving", ""},
      {"weights", "opening", "wait for hashing, or set weights_digest"},
      {"no_daemon", "opening", "start the daemon, or set rpc_socket and session_socket to the sockets that it printed"},
      {"permission", "opening", "run the engine as a user that may open the daemon's sockets (group ashlar)"},
      {"refused", "opening", "read the daemon's log; check tenants[].uids and both versions"},
      {"lost", "opening", "check the daemon; the connector reconnects by itself"},
      {"unhashed", "off", "read the log, or set weights_digest"},
      {"unsupported", "off", "remove the unsupported feature (docs/limitations.md)"},
      {"disagreement", "off", "give the scheduler and the workers the same model configuration"},
      {"error", "off", "report the exception in the engine's log with the engine's arguments"},
  };
  return *reasons;
}

const std::vector<StoreOutcome>& StoreOutcomes() {
  static const auto* const outcomes = new std::vector<StoreOutcome>{
      {"declined", "enlarge the tenant's budgets: objects that save more time fill them"},
      {"no_space", "enlarge the tenant's budgets: objects in use fill them"},
      {"busy", "raise saves_in_flight, or find the cause of the load with ashlarctl top"},
      {"bad_source", "report the engine's arguments and log"},
      {"unavailable", "run ashlarctl status, then read the logs of the engine and the daemon"},
      {"too_long", "raise staging_bytes"},
      {"weights_changed", "send new prompts: those computed with earlier weights are not stored"},
  };
  return *outcomes;
}

std::vector<Finding> JudgeEngine(const EngineMetrics& metrics) {
  const auto has = [&](absl::string_view prefix) {
    return std::ranges::any_of(metrics.families, [&](const auto& each) { return absl::StartsWith(each, prefix); });
  };
  if (!has("vllm:")) {
    return {{Verdict::kBad, "engine", "no metrics of vLLM at this address",
             "give the metrics endpoint of vLLM's server, such as http://localhost:8000/metrics; start it without "
             "--disable-log-stats"}};
  }
  if (!has("vllm:ashlar_")) {
    return {{Verdict::kBad, "connector", "not loaded; expected metrics vllm:ashlar_*",
             "start the engine with --kv-transfer-config '{\"kv_connector\": \"AshlarConnector\", \"kv_role\": "
             "\"kv_both\"}'"}};
  }
  std::vector<Finding> findings;
  const std::map<std::string, EngineSamples> engines = ByEngine(metrics);
  for (const auto& [name, engine] : engines) {
    for (Finding& finding : JudgeOne(engine)) {
      if (engines.size() > 1) finding.found = absl::StrCat("engine ", name, ": ", finding.found);
      findings.push_back(std::move(finding));
    }
  }
  if (findings.empty()) findings.push_back(OfState({}));
  return findings;
}

absl::StatusOr<std::vector<Finding>> ExamineEngine(const std::string& url) {
  const absl::StatusOr<std::string> text = FetchMetrics(url, kTimeout);
  if (!text.ok()) return text.status();
  return JudgeEngine(ParseMetrics(*text));
}

}  // namespace ashlar::ctl
