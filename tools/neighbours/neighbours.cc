// SPDX-License-Identifier: Apache-2.0
#include "tools/neighbours/neighbours.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "examples/testing/child_process.h"
#include "examples/testing/local_daemon.h"
#include "tools/neighbours/attack.h"

namespace ashlar::neighbours {
namespace {

using std::chrono::milliseconds;
using tools::ChildProcess;
using tools::LocalDaemon;
using tools::ProcessUser;

// Users without names, all of one group: the daemon's sockets serve its group.
constexpr gid_t kGroup = 65530;
constexpr ProcessUser kDaemon{65530, kGroup}, kVictim{65531, kGroup}, kAttacker{65532, kGroup};

// The bound of the victim's waits, derived from its waits without an attack.
constexpr double kTimesAlone = 5, kMoreMilliseconds = 20;

constexpr double kSeconds = 10, kQuickSeconds = 1.5;
constexpr milliseconds kLead{500};       // lead of an attack: rounds before it has started do not count
constexpr milliseconds kReady{30'000};   // longest wait until a process is ready
constexpr milliseconds kLate{30'000};    // longest wait for calls in progress at the end, if the daemon is stopped
constexpr milliseconds kToStop{15'000};  // longest wait for an attacker to stop
constexpr uint64_t kMiB = 1 << 20;

// Limits that many machines have. They do not apply to root, nor does the kernel count root's descriptors in flight.
constexpr uint64_t kOpenFiles = 20'000;
constexpr uint64_t kDataBytes = 4096 * kMiB;  // the memory of this machine that an attack may waste

constexpr AttackKind kAttacks[] = {
    {"mappings", "regions", MakeMappings, 60'000, 4, 10'000, 4},
    {"unread_replies", "replies", MakeUnreadReplies, 126, 1, 126, 1},
    {"lookups", "lookups", MakeLookups, 64, 64, 64, 64},
    {"landings", "MiB landed", MakeLandings, 1100, 1100, 330, 330},
    {"leases", "leases", MakeLeases, 1000, 48, 100, 48},
    {"models", "models", MakeModels, 8, 8, 8, 8},
    {"commits", "states", MakeCommits, 8, 8, 8, 8},
    {"metrics", "connections at a time", MakeMetrics, 192, 64, 192, 64},
};

// Returns the bytes of a process's private memory; 0: there is no such process.
uint64_t OwnMemory(pid_t pid) {
  std::ifstream status(absl::StrCat("/proc/", pid, "/status"));
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssAnon:")) return std::strtoul(line.c_str() + 8, nullptr, 10) * 1024;
  }
  return 0;
}

// One daemon, its victim, and the effect of one attack on them.
class Row {
 public:
  Row(const AttackKind& kind, const Options& options)
      : kind_(kind),
        quick_(options.quick),
        seconds_(options.seconds > 0 ? options.seconds
                 : options.quick     ? kQuickSeconds
                                     : kSeconds) {}

  absl::Status Run() {
    if (absl::Status status = Start(); !status.ok()) return status;
    absl::StatusOr<nlohmann::json> alone = Measure(seconds_ / 2, /*attacked=*/false);
    if (!alone.ok()) return alone.status();
    alone_ = *std::move(alone);
    if (alone_["refused"] != 0) {
      return absl::InternalError(
          absl::StrCat("the victim was refused without an attack: ", alone_["why"].get<std::string>()));
    }
    return RunAttack();
  }

  nlohmann::json Case() const {
    return {{"attack", kind_.name},
            {"alone_p50_ms", alone_["p50_ms"]},
            {"alone_p99_ms", alone_["p99_ms"]},
            {"alone_max_ms", alone_["max_ms"]},
            {"victim_p50_ms", victim_["p50_ms"]},
            {"victim_p99_ms", victim_["p99_ms"]},
            {"victim_max_ms", victim_["max_ms"]},
            {"victim_served", victim_["served"]},
            {"victim_refused", victim_["refused"]}};
  }

  // Describes the attack for the figures of the victim's rounds.
  nlohmann::json Attack() const {
    nlohmann::json attack = achieved_;
    attack["attack"] = kind_.name;
    attack["granted_are"] = kind_.what;
    attack["newcomer_max_ms"] = victim_["newcomer_max_ms"];
    if (ScrapesToo()) attack["scrape_max_ms"] = victim_["scrape_max_ms"];
    attack["daemon_ended"] = ended_.has_value();
    attack["daemon_bytes"] = daemon_bytes_;
    return attack;
  }

  bool Met() const { return victim_["p99_ms"] <= Bar() && victim_["refused"] == 0 && !ended_; }

  void Print() const {
    std::printf("%-15s %8.2f %8.2f %8.2f %9.2f %9.2f %9.2f %9.2f %7lu %7lu  %s\n", kind_.name, Number(alone_, "p50_ms"),
                Number(alone_, "p99_ms"), Number(alone_, "max_ms"), Number(victim_, "p50_ms"),
                Number(victim_, "p99_ms"), Number(victim_, "max_ms"), Bar(), Count(victim_, "served"),
                Count(victim_, "refused"), Met() ? "met" : "NOT MET");
    std::printf("    newcomers: at most %.0f ms", Number(victim_, "newcomer_max_ms"));
    if (ScrapesToo()) std::printf("; scrapes: at most %.0f ms", Number(victim_, "scrape_max_ms"));
    if (Count(victim_, "refused") > 0) std::printf("; first refusal: %s", Text(victim_, "why").c_str());
    std::printf("\n    attacker: ");
    if (achieved_.contains("asked")) {
      std::printf("%lu sessions, %lu requests, at most %lu at a time, %lu refused, %lu %s",
                  Count(achieved_, "sessions"), Count(achieved_, "asked"), Count(achieved_, "most_at_a_time"),
                  Count(achieved_, "refused"), Count(achieved_, "granted"), kind_.what);
      if (!Text(achieved_, "why").empty()) std::printf("; first refusal: %s", Text(achieved_, "why").c_str());
    }
    std::printf("\n");
    if (ended_) std::printf("    the daemon ended: %s\n", ended_->c_str());
    if (!ended_) std::printf("    the daemon: %lu MiB of its own\n", static_cast<unsigned long>(daemon_bytes_ / kMiB));
    std::fflush(stdout);
  }

 private:
  static double Number(const nlohmann::json& figures, const char* name) { return figures[name].get<double>(); }
  static unsigned long Count(const nlohmann::json& figures, const char* name) { return figures[name].get<uint64_t>(); }
  static std::string Text(const nlohmann::json& figures, const char* name) { return figures[name].get<std::string>(); }
  double Bar() const { return kTimesAlone * Number(alone_, "p99_ms") + kMoreMilliseconds; }
  bool ScrapesToo() const { return std::string_view(kind_.name) == "metrics"; }

  absl::Status Start() {
    auto daemon = LocalDaemon::Start(
        {.dram_bytes = 512 * kMiB,
         .tenants = absl::StrCat("tenants:\n  - {name: victim, uids: [", kVictim.uid, "], dram_bytes: 256MiB}\n",
                                 "  - {name: attacker, uids: [", kAttacker.uid, "], dram_bytes: 256MiB}\n"),
         .metrics = true,
         .user = kDaemon,
         .open_files = kOpenFiles,
         .data_bytes = kDataBytes});
    if (!daemon.ok()) return daemon.status();
    daemon_ = *std::move(daemon);
    return StartProcess(
        {"ashlar-bench", "neighbours-victim", daemon_->sockets().rpc_socket, daemon_->sockets().session_socket},
        kVictim, victim_process_);
  }

  static absl::Status StartProcess(const std::vector<std::string>& arguments, ProcessUser user,
                                   std::unique_ptr<ChildProcess>& process) {
    auto started = ChildProcess::Start(arguments, user);
    if (!started.ok()) return started.status();
    process = *std::move(started);
    return process->ReadLine(kReady).status();
  }

  absl::StatusOr<nlohmann::json> Answer(ChildProcess& process, milliseconds patience) {
    const absl::StatusOr<std::string> line = process.ReadLine(patience);
    if (!line.ok()) return line.status();
    return nlohmann::json::parse(*line);
  }

  absl::StatusOr<nlohmann::json> Measure(double seconds, bool attacked) {
    const int port = ScrapesToo() && attacked ? daemon_->metrics_port() : 0;
    absl::Status asked = victim_process_->WriteLine(absl::StrCat(seconds, " ", attacked ? 1 : 0, " ", port));
    if (!asked.ok()) return asked;
    return Answer(*victim_process_, milliseconds(static_cast<int64_t>(seconds * 1000)) + kLate);
  }

  absl::Status RunAttack() {
    std::unique_ptr<ChildProcess> attacker;
    absl::Status status = StartProcess(
        {"ashlar-bench", "neighbours-attacker", kind_.name, daemon_->sockets().rpc_socket,
         daemon_->sockets().session_socket, absl::StrCat(daemon_->metrics_port()), quick_ ? "quick" : "full"},
        kAttacker, attacker);
    if (!status.ok()) return status;
    if (status = attacker->WriteLine("go"); !status.ok()) return status;
    std::this_thread::sleep_for(kLead);
    absl::StatusOr<nlohmann::json> victim = Measure(seconds_, /*attacked=*/true);
    if (!victim.ok()) return victim.status();
    victim_ = *std::move(victim);
    ended_ = daemon_->Ended();
    daemon_bytes_ = OwnMemory(daemon_->pid());
    if (status = attacker->WriteLine("stop"); !status.ok()) return status;
    absl::StatusOr<nlohmann::json> achieved = Answer(*attacker, kToStop);
    if (!achieved.ok() && !ended_) return achieved.status();
    if (achieved.ok()) achieved_ = *std::move(achieved);
    return ended_ ? absl::OkStatus() : CheckThatItTookPlace();
  }

  absl::Status CheckThatItTookPlace() const {
    const uint64_t least_asked = quick_ ? kind_.quick_least_asked : kind_.least_asked;
    const uint64_t least_at_a_time = quick_ ? kind_.quick_least_at_a_time : kind_.least_at_a_time;
    if (Count(achieved_, "asked") >= least_asked && Count(achieved_, "most_at_a_time") >= least_at_a_time) {
      return absl::OkStatus();
    }
    return absl::InternalError(absl::StrCat("the attacker asked for ", Count(achieved_, "asked"), " of ", least_asked,
                                            ", at most ", Count(achieved_, "most_at_a_time"), " of ", least_at_a_time,
                                            " at a time: no attack (", Text(achieved_, "why"), ")"));
  }

  const AttackKind& kind_;
  const bool quick_;
  const double seconds_;
  std::unique_ptr<LocalDaemon> daemon_;
  std::unique_ptr<ChildProcess> victim_process_;  // destroyed before the daemon
  nlohmann::json alone_, victim_, achieved_;
  std::optional<std::string> ended_;  // how the daemon ended, if it did
  uint64_t daemon_bytes_ = 0;         // its private memory at the attack's end
};

}  // namespace

std::span<const AttackKind> Attacks() {
  return kAttacks;
}

absl::Status Run(const Options& options, nlohmann::json& figures) {
  if (geteuid() != 0) {
    return absl::FailedPreconditionError(
        "user: not root; daemon, victim and attacker run as three other users, which only root can start");
  }
  signal(SIGPIPE, SIG_IGN);  // a dead process is reported as an error
  std::printf("%-15s %8s %8s %8s %9s %9s %9s %9s %7s %7s\n", "attack, ms", "p50", "p99", "max", "p50", "p99", "max",
              "bar", "served", "refused");
  nlohmann::json& cases = figures["cases"] = nlohmann::json::array();
  nlohmann::json& attacks = figures["attacks"] = nlohmann::json::array();
  std::string unmet;
  for (const AttackKind& kind : kAttacks) {
    if (std::string_view(kind.name).find(options.filter) == std::string_view::npos) continue;
    Row row(kind, options);
    if (absl::Status status = row.Run(); !status.ok()) {
      return absl::Status(status.code(), absl::StrCat(kind.name, ": ", status.message()));
    }
    row.Print();
    cases.push_back(row.Case());
    attacks.push_back(row.Attack());
    if (!row.Met()) absl::StrAppend(&unmet, unmet.empty() ? "" : ", ", kind.name);
  }
  if (cases.empty()) return absl::NotFoundError("--filter: no attack of this name");
  return unmet.empty() ? absl::OkStatus() : absl::OutOfRangeError(absl::StrCat("not met: ", unmet));
}

}  // namespace ashlar::neighbours
