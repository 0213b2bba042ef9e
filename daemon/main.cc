// SPDX-License-Identifier: Apache-2.0
// ashlard --config FILE.yaml: the cache daemon of one node.
#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "CLI/App.hpp"
#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"
#include "daemon/config/config.h"
#include "daemon/daemon.h"
#include "daemon/mappings.h"
#include "daemon/runtime/event_loop.h"
#include "daemon/runtime/exit_timer.h"
#include "daemon/runtime/log.h"
#include "daemon/security/sandbox.h"
#include "daemon/threads.h"
#include "proto/version.h"

namespace {

using ashlar::daemon::Log;
using ashlar::daemon::LogLevel;

constexpr int kExitFailed = 1;                            // could not start
constexpr int kExitBadConfig = 2;                         // arguments or configuration are missing or refused
constexpr int kExitStuck = 3;                             // could not stop completely, for example because a disk hangs
constexpr std::chrono::milliseconds kStopPatience{1500};  // after the grace period
constexpr size_t kMostReloads = 2;                        // queued reloads
constexpr timespec kPoll = {.tv_sec = 0, .tv_nsec = 50'000'000};

struct Arguments {
  std::string config;
  bool check_config = false;
};

// Returns the exit code after the requested text was printed.
int Printed() {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return 0;
  std::fprintf(stderr, "ashlard: cannot write to standard output: %s\n", strerror(errno));
  return kExitFailed;
}

// Returns the exit code if the program ends here.
std::optional<int> Parse(int argc, char** argv, Arguments* arguments) {
  CLI::App app("The Ashlar cache daemon; run one per node.", "ashlard");
  app.set_version_flag("--version", absl::StrCat("ashlard ", ashlar::Version()), "Print the version and exit.");
  app.set_help_flag("-h,--help", "Print this help and exit.");
  app.add_option("--config", arguments->config, "Configuration file; ashlard.example.yaml describes every field.")
      ->type_name("FILE.yaml")
      ->take_last()
      ->required();
  app.add_flag("--check-config", arguments->check_config, "Print the effective configuration and exit.");
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& asked) {  // help or version
    app.exit(asked);
    return Printed();
  } catch (const CLI::ParseError& error) {
    const std::vector<std::string> unknown = app.remaining();
    const std::string why = unknown.empty() ? error.what() : absl::StrCat(unknown[0], ": unknown argument");
    std::fprintf(stderr, "ashlard: %s; see ashlard --help\n", why.c_str());
    return kExitBadConfig;
  }
  return std::nullopt;
}

constexpr std::chrono::milliseconds kLastLines{500};  // for the log's last lines if nothing reads them

int Failed(const absl::Status& status) {
  Log(LogLevel::kError, "cannot start", {{"error", std::string(status.message())}});
  ashlar::daemon::FlushLog(kLastLines);
  return kExitFailed;
}

// Called before threads exist, because they inherit it.
absl::Status LimitFiles(const ashlar::v1::Config& config, const std::string& file) {
  const std::string& folder = config.ssd().folder();
  std::error_code error;  // the disk tier reports a folder that cannot be created
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  const absl::StatusOr<bool> limited = ashlar::daemon::RestrictFiles(ashlar::daemon::PathsFor(config, file));
  if (!limited.ok()) return limited.status();
  if (!*limited) Log(LogLevel::kWarning, "sandbox: this kernel has no Landlock; file access is not restricted", {});
  return absl::OkStatus();
}

// Returns the signal that ends the daemon. SIGHUP reads the file again on `reloads`, so a slow read delays no other
// signal.
int AwaitEnd(const sigset_t& told, ashlar::daemon::Daemon& daemon, ashlar::daemon::EventLoop& reloads) {
  for (siginfo_t info{};;) {
    const int number = sigwaitinfo(&told, &info);
    if (number == SIGTERM || number == SIGINT) return number;
    if (number != SIGHUP) continue;
    const ashlar::daemon::Operator by = ashlar::daemon::OperatorOf(info.si_uid, info.si_pid);
    reloads.Post(ashlar::storage::kNoTenant, [&daemon, by] { daemon.Reload(by); });
  }
}

void ExitWithin(std::chrono::nanoseconds patience, const ashlar::v1::Config& config) {
  const bool json = config.log().format() == "json";
  const std::string line = ashlar::daemon::FormatLogLine(json, "the daemon did not stop in time; ending the process",
                                                         {{"exit_status", kExitStuck}});
  ashlar::daemon::ExitTimer::Start(patience, kExitStuck, json ? "{\"level\":\"error\"," + line + "}\n" : line + "\n");
}

// Serves until SIGTERM or SIGINT.
int Serve(const ashlar::v1::Config& config, const std::string& file) {
  ashlar::daemon::ConfigureLog(config.log().level(), config.log().format());
  // A signal also ends the daemon while it opens folders, which a hung disk may delay without end.
  const bool sandboxed = config.sandbox() == "on";
  if (absl::Status limited = sandboxed ? LimitFiles(config, file) : absl::OkStatus(); !limited.ok()) {
    return Failed(limited);
  }
  // Blocked before any thread starts, so only sigwait receives them.
  sigset_t ends;
  sigemptyset(&ends);
  sigaddset(&ends, SIGTERM);
  sigaddset(&ends, SIGINT);
  sigset_t told = ends;
  sigaddset(&told, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &told, nullptr);
  signal(SIGPIPE, SIG_IGN);

  if (absl::Status able = ashlar::daemon::CheckThreads(config); !able.ok()) return Failed(able);
  if (absl::Status log = ashlar::daemon::LogInBackground(); !log.ok()) return Failed(log);
  auto daemon = ashlar::daemon::Daemon::Start(config, file);
  if (!daemon.ok()) return Failed(daemon.status());
  if (absl::Status limited = sandboxed ? ashlar::daemon::RestrictCalls() : absl::OkStatus(); !limited.ok()) {
    return Failed(limited);
  }
  if (sandboxed) Log(LogLevel::kInfo, "sandbox active", {});
  const ashlar::daemon::MonotonicClock clock;
  ashlar::daemon::EventLoop reloads(kMostReloads, clock);
  reloads.Start("reload");
  Log(LogLevel::kInfo, "stopping", {{"signal", strsignal(AwaitEnd(told, **daemon, reloads))}});
  const auto grace = std::chrono::nanoseconds((*daemon)->drain_time());
  const auto deadline = std::chrono::steady_clock::now() + grace;
  ExitWithin(grace + kStopPatience, config);
  // A second signal ends the wait.
  const auto interrupted = [&] { return sigtimedwait(&ends, nullptr, &kPoll) > 0; };
  const bool waited = (*daemon)->Drain(grace.count(), interrupted);
  if (!waited) ExitWithin(kStopPatience, config);
  reloads.Stop();
  const std::chrono::nanoseconds left = deadline - std::chrono::steady_clock::now();
  const bool stopped = (*daemon)->Stop(waited ? std::max<ashlar::storage::Nanos>(left.count(), 0) : 0);
  ashlar::daemon::FlushLog(kLastLines);
  if (!stopped) std::_Exit(kExitStuck);
  ashlar::daemon::ExitTimer::Cancel();  // freeing large memory takes time
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  // Files of the daemon are readable by its user only. Sockets get explicit modes.
  umask(077);
  ashlar::daemon::BoundAllocatorMappings();
  Arguments arguments;
  if (const std::optional<int> code = Parse(argc, argv, &arguments)) return *code;
  ashlar::v1::Config config;
  if (const absl::Status status = ashlar::daemon::LoadConfig(arguments.config, &config); !status.ok()) {
    std::fprintf(stderr, "ashlard: %s\n", std::string(status.message()).c_str());
    return kExitBadConfig;
  }
  if (arguments.check_config) {
    std::fputs(ashlar::daemon::FormatConfig(config).c_str(), stdout);
    return Printed();
  }
  return Serve(config, arguments.config);
}
