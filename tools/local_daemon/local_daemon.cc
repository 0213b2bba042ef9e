#include "tools/local_daemon/local_daemon.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "absl/strings/str_cat.h"
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

bool Exited(pid_t pid) {
  return waitpid(pid, nullptr, WNOHANG) == pid;
}

}  // namespace

absl::StatusOr<std::unique_ptr<LocalDaemon>> LocalDaemon::Start(const LocalDaemonOptions& options) {
  std::unique_ptr<LocalDaemon> daemon(new LocalDaemon());
  std::string folder = "/tmp/ashlar-XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) return absl::ErrnoToStatus(errno, "cannot make a folder under /tmp");
  daemon->folder_ = folder;
  daemon->client_options_.rpc_socket = folder + "/rpc.sock";
  daemon->client_options_.session_socket = folder + "/session.sock";
  if (absl::Status status = daemon->Spawn(options); !status.ok()) return status;

  const auto deadline = steady_clock::now() + kStartTimeout;
  while (steady_clock::now() < deadline) {
    if (Client::Connect(daemon->client_options_).ok()) return daemon;
    if (Exited(daemon->pid_)) {
      daemon->pid_ = -1;
      return absl::InternalError(absl::StrCat("ashlard ended at once: ", daemon->Log()));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return absl::DeadlineExceededError(absl::StrCat("ashlard does not accept sessions: ", daemon->Log()));
}

absl::Status LocalDaemon::Spawn(const LocalDaemonOptions& options) {
  const std::string config = folder_ + "/ashlard.yaml", log = folder_ + "/ashlard.log";
  std::ofstream out(config);
  out << "listen:\n  rpc_socket: " << client_options_.rpc_socket
      << "\n  session_socket: " << client_options_.session_socket << "\n";
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
  out << "drain_seconds: 1\n";  // nothing of it is kept
  if (options.threads != 0) out << "workers:\n  threads: " << options.threads << "\n";
  out.close();
  if (!out) return absl::InternalError(absl::StrCat("cannot write ", config));

  const std::string binary = options.binary.empty() ? BesideThisProgram("ashlard") : options.binary;
  const int log_fd = open(log.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // a killed tool leaves no daemon behind
    if (getppid() != parent) _exit(127);
    dup2(log_fd, STDOUT_FILENO);
    dup2(log_fd, STDERR_FILENO);
    execl(binary.c_str(), binary.c_str(), "--config", config.c_str(), nullptr);
    dprintf(STDERR_FILENO, "cannot start %s\n", binary.c_str());
    _exit(127);
  }
  close(log_fd);
  return pid_ > 0 ? absl::OkStatus() : absl::ErrnoToStatus(errno, "fork");
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
    bool gone = false;
    while (!(gone = Exited(pid_)) && steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    if (!gone) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }
  std::error_code error;
  std::filesystem::remove_all(folder_, error);
}

}  // namespace ashlar::tools
