// SPDX-License-Identifier: Apache-2.0
#include "examples/testing/local_daemon.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>
#include <thread>

#include "absl/strings/str_cat.h"
#include "client/session/client.h"
#include "proto/limits.h"

namespace ashlar::tools {
namespace {

using std::chrono::steady_clock;

constexpr auto kStartTimeout = std::chrono::seconds(20);
constexpr uint64_t kDefaultArenaBytes = uint64_t{64} << 20;
constexpr auto kStopTimeout = std::chrono::seconds(10);

std::string BesideThisProgram(const std::string& name) {
  std::error_code error;
  return (std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / name).string();
}

// Returns the port in the daemon's log, which chose any free port; 0 before it is logged.
uint16_t MetricsPort(const std::string& log) {
  static constexpr std::string_view kName = " metrics_port=";
  const size_t at = log.find(kName);
  return at == std::string::npos ? 0
                                 : static_cast<uint16_t>(std::strtoul(log.c_str() + at + kName.size(), nullptr, 10));
}

// Returns the last line that is not empty.
std::string LastLine(const std::string& log) {
  const size_t end = log.find_last_not_of('\n') + 1;
  const size_t before = log.substr(0, end).rfind('\n');
  return log.substr(before + 1, end - before - 1);  // npos + 1 is 0
}

}  // namespace

absl::StatusOr<std::unique_ptr<LocalDaemon>> LocalDaemon::Start(const LocalDaemonOptions& options) {
  std::unique_ptr<LocalDaemon> daemon(new LocalDaemon());
  std::string folder = "/tmp/ashlar-XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) return absl::ErrnoToStatus(errno, "cannot make a folder under /tmp");
  daemon->folder_ = folder;
  daemon->sockets_.rpc_socket = folder + "/rpc.sock";
  daemon->sockets_.session_socket = folder + "/session.sock";
  if (options.user.has_value() &&
      (chown(folder.c_str(), options.user->uid, options.user->gid) != 0 || chmod(folder.c_str(), 0750) != 0)) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot give ", folder, " to the daemon's user"));
  }
  if (absl::Status status = daemon->Configure(options); !status.ok()) return status;
  if (absl::Status status = daemon->Launch(options); !status.ok()) return status;

  const auto deadline = steady_clock::now() + kStartTimeout;
  while (steady_clock::now() < deadline) {
    if (options.metrics) daemon->metrics_port_ = MetricsPort(daemon->Log());
    if (daemon->Serves() && (daemon->metrics_port_ != 0) == options.metrics) return daemon;
    if (daemon->Ended()) return absl::InternalError(absl::StrCat("ashlard ended at once: ", daemon->Log()));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return absl::DeadlineExceededError(absl::StrCat("ashlard does not accept sessions: ", daemon->Log()));
}

absl::Status LocalDaemon::Configure(const LocalDaemonOptions& options) const {
  const std::string config = folder_ + "/ashlard.yaml";
  std::ofstream out(config);
  out << "listen:\n  rpc_socket: " << sockets_.rpc_socket << "\n  session_socket: " << sockets_.session_socket << "\n";
  if (options.metrics) out << "  metrics_address: 127.0.0.1:0\n";
  // Small tiers have small arenas: a tenant's budget holds at least one.
  const auto memory = [&](const char* name, uint64_t bytes) {
    out << name << ":\n  capacity_bytes: " << bytes << "\n";
    if (bytes < kDefaultArenaBytes) out << "  arena_bytes: " << limits::kExtentBytes << "\n";
  };
  memory("dram", options.dram_bytes);
  if (options.hbm_bytes > 0) memory("hbm", options.hbm_bytes);
  if (options.ssd_bytes > 0) {
    const std::string& folder = options.ssd_folder.empty() ? folder_ + "/ssd" : options.ssd_folder;
    out << "ssd:\n  folder: " << folder << "\n  capacity_bytes: " << options.ssd_bytes
        << "\n  admission: " << options.admission << "\n";
  }
  out << "eviction: " << options.eviction << "\n";
  out << options.tenants << options.cluster;
  out << "drain_seconds: 1\n";  // it has no data to save
  if (options.threads != 0) out << "workers:\n  threads: " << options.threads << "\n";
  out.close();
  const bool readable = chmod(config.c_str(), 0644) == 0;  // for the daemon's user
  return out && readable ? absl::OkStatus() : absl::InternalError(absl::StrCat("cannot write ", config));
}

absl::Status LocalDaemon::Launch(const LocalDaemonOptions& options) {
  const std::string binary = options.binary.empty() ? BesideThisProgram("ashlard") : options.binary;
  const int log = open((folder_ + "/ashlard.log").c_str(), O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
  SpawnOptions spawn{.user = options.user, .output = log, .errors = log};
  if (options.open_files != 0) spawn.limits.emplace_back(RLIMIT_NOFILE, options.open_files);
  if (options.data_bytes != 0) spawn.limits.emplace_back(RLIMIT_DATA, options.data_bytes);
  const absl::StatusOr<pid_t> pid = Spawn(binary, {binary, "--config", folder_ + "/ashlard.yaml"}, spawn);
  close(log);
  if (!pid.ok()) return pid.status();
  pid_ = *pid;
  return absl::OkStatus();
}

bool LocalDaemon::Serves() {
  const absl::Status status =
      Client::Connect({.rpc_socket = sockets_.rpc_socket, .session_socket = sockets_.session_socket}).status();
  return status.ok() || absl::IsPermissionDenied(status);
}

std::optional<std::string> LocalDaemon::Ended() {
  int status = 0;
  if (pid_ > 0 && waitpid(pid_, &status, WNOHANG) == pid_) {
    pid_ = -1;
    ended_ = absl::StrCat(WIFSIGNALED(status) ? absl::StrCat("signal ", WTERMSIG(status))
                                              : absl::StrCat("exit code ", WEXITSTATUS(status)),
                          ": ", LastLine(Log()));
  }
  return ended_;
}

std::string LocalDaemon::Log() const {
  std::stringstream text;
  text << std::ifstream(folder_ + "/ashlard.log").rdbuf();
  return text.str();
}

LocalDaemon::~LocalDaemon() {
  if (pid_ > 0) {
    kill(pid_, SIGTERM);
    const auto deadline = steady_clock::now() + kStopTimeout;
    while (!Ended() && steady_clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (!Ended()) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }
  std::error_code error;
  std::filesystem::remove_all(folder_, error);
}

}  // namespace ashlar::tools
