// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/daemon_process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <thread>

#include "tests/integration/network_namespace.h"
#include "tests/integration/pid_namespace.h"

namespace ashlar::integration {
namespace {

constexpr std::chrono::milliseconds kPollInterval{2};

struct sockaddr_in Loopback(uint16_t port) {
  struct sockaddr_in address {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

// `address` is a sockaddr_in or a sockaddr_un.
template <typename Address>
std::string HttpGet(int family, const Address& address, const std::string& path) {
  const int fd = ::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  std::string answer;
  if (::connect(fd, reinterpret_cast<const struct sockaddr*>(&address), sizeof address) == 0) {
    const std::string request = "GET " + path + " HTTP/1.0\r\nHost: localhost\r\n\r\n";
    if (::send(fd, request.data(), request.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(request.size())) {
      char bytes[4096];
      for (ssize_t got; (got = ::recv(fd, bytes, sizeof bytes, 0)) > 0;) answer.append(bytes, got);
    }
  }
  ::close(fd);
  return answer;
}

std::string ReadFile(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// Returns the port of the last daemon in the log, which chose any free port; 0 before it is logged.
uint16_t MetricsPort(const std::string& log) {
  static const std::string kName = " metrics_port=";
  const size_t at = log.rfind(kName);
  return at == std::string::npos ? 0
                                 : static_cast<uint16_t>(std::strtoul(log.c_str() + at + kName.size(), nullptr, 10));
}

// The letter in /proc/PID/stat: "S (sleeping)" and the like.
char StateOf(pid_t pid) {
  const std::string stat = ReadFile("/proc/" + std::to_string(pid) + "/stat");
  const size_t name_end = stat.rfind(')');
  return name_end == std::string::npos ? '?' : stat[name_end + 2];
}

std::string Ending(int status) {
  if (WIFEXITED(status)) return "ended with exit status " + std::to_string(WEXITSTATUS(status));
  if (WIFSIGNALED(status)) return "was killed by signal " + std::to_string(WTERMSIG(status));
  return "is gone, with wait status " + std::to_string(status);
}

std::string LastLines(const std::string& text) {
  constexpr int kLines = 20;
  size_t begin = text.size();
  for (int line = 0; line <= kLines && begin != std::string::npos; ++line) {
    begin = begin == 0 ? std::string::npos : text.rfind('\n', begin - 1);
  }
  return begin == std::string::npos ? text : text.substr(begin + 1);
}

std::string SsdYaml(const std::string& folder, const DaemonOptions& options) {
  if (options.ssd.empty()) return "";
  return "ssd:\n  folder: " + folder + "\n  capacity_bytes: " + options.ssd + "\n  admission: " + options.admission +
         "\n  on_damage: " + options.on_damage + "\n";
}

}  // namespace

bool Eventually(const std::function<bool()>& holds, std::chrono::milliseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (!holds()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kPollInterval);
  }
  return true;
}

void BreakConnections(const std::string& path) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename());
    struct sockaddr_un peer {};
    socklen_t size = sizeof peer;
    if (::getpeername(fd, reinterpret_cast<struct sockaddr*>(&peer), &size) == 0 && peer.sun_family == AF_UNIX &&
        path == peer.sun_path) {
      ::shutdown(fd, SHUT_RDWR);
    }
  }
}

DaemonProcess::DaemonProcess(const DaemonOptions& options)
    : own_pid_namespace_(options.own_pid_namespace),
      network_namespace_(options.network_namespace),
      program_(options.program.empty() ? ASHLARD : options.program),
      uid_(options.uid),
      max_files_(options.max_files),
      log_(options.log),
      environment_(options.environment),
      ssd_folder_(options.ssd_folder) {
  std::string pattern = testing::TempDir() + "ashlar-integration-XXXXXX";
  directory_ = ::mkdtemp(pattern.data());
  EXPECT_EQ(::chmod(directory_.c_str(), 0755), 0);  // for engines of other users
  if (uid_ != 0) {
    EXPECT_EQ(::chown(directory_.c_str(), uid_, static_cast<gid_t>(-1)), 0);
  }
  Configure(options);
  Start();
}

void DaemonProcess::Configure(const DaemonOptions& options) {
  max_threads_ = options.max_threads;
  std::ofstream(directory_ + "/config.yaml") << "listen:\n"
                                             << "  rpc_socket: " << directory_ << "/rpc.sock\n"
                                             << "  session_socket: " << directory_ << "/session.sock\n"
                                             << "  admin_socket: " << admin_socket() << "\n"
                                             << "  metrics_address: 127.0.0.1:0\n"
                                             << "  metrics_socket: " << metrics_socket() << "\n"
                                             << "metrics:\n"
                                             << "  tenants: named\n"
                                             << "dram:\n"
                                             << "  capacity_bytes: " << options.dram << "\n"
                                             << "  arena_bytes: " << options.arena << "\n"
                                             << "workers:\n"
                                             << "  threads: " << options.threads << "\n"
                                             << "drain_seconds: " << options.drain_seconds << "\n"
                                             << "eviction: " << options.eviction << "\n"
                                             << SsdYaml(ssd_folder(), options) << options.tenants << options.sessions
                                             << options.gpu << options.cluster << options.more;
}

DaemonProcess::~DaemonProcess() {
  Kill();
  const std::string said = log();
  EXPECT_EQ(said.find("Sanitizer"), std::string::npos) << "a sanitizer has complained about the daemon";
  if (testing::Test::HasFailure()) std::fputs(said.c_str(), stderr);
  std::filesystem::remove_all(directory_);
}

std::string DaemonProcess::log() const {
  return ReadFile(directory_ + "/log");
}

void DaemonProcess::Launch() {
  const std::string config = directory_ + "/config.yaml";
  const std::string log = directory_ + "/log";
  const char* const arguments[] = {program_.c_str(), "--config", config.c_str(), nullptr};
  pid_ = Fork(own_pid_namespace_);
  if (pid_ == 0) {
    if (network_namespace_ >= 0 && !LiveInNetworkNamespace(network_namespace_)) ::_exit(127);
    const struct rlimit files = {.rlim_cur = max_files_, .rlim_max = max_files_};
    if (max_files_ != 0 && ::setrlimit(RLIMIT_NOFILE, &files) != 0) ::_exit(127);
    const struct rlimit threads = {.rlim_cur = max_threads_, .rlim_max = max_threads_};
    if (max_threads_ != 0 && ::setrlimit(RLIMIT_NPROC, &threads) != 0) ::_exit(127);
    // Keeps its group, so that engines of this one reach the sockets.
    if (uid_ != 0 && (::setgroups(0, nullptr) != 0 || ::setuid(uid_) != 0)) ::_exit(127);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // a crashed test leaves no daemon running
    const int fd = log_ >= 0 ? log_ : ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
    ::dup2(fd, STDOUT_FILENO);
    ::dup2(fd, STDERR_FILENO);
    for (const std::string& variable : environment_) ::putenv(const_cast<char*>(variable.c_str()));
    ::execv(program_.c_str(), const_cast<char* const*>(arguments));
    ::dprintf(STDERR_FILENO, "%s: cannot be run: %s\n", program_.c_str(), std::strerror(errno));
    ::_exit(127);
  }
}

void DaemonProcess::Start() {
  const size_t said_before = log().size();
  Launch();
  ASSERT_GT(pid_, 0);
  bool serves = false;
  std::optional<int> ended;  // its wait status
  Eventually([&] {
    int status = 0;
    const pid_t waited = ::waitpid(pid_, &status, WNOHANG);
    if (waited != 0) ended = waited == pid_ ? status : -1;
    const auto logged = [&] { return log_ >= 0 || (metrics_port_ = MetricsPort(log().substr(said_before))) != 0; };
    return ended || (serves = Serves() && logged());
  });
  if (ended) pid_ = -1;
  ASSERT_TRUE(serves) << "the daemon " << (ended ? Ending(*ended) + " before it served" : "does not serve in time")
                      << "; its last lines:\n"
                      << LastLines(log().substr(said_before));
}

std::string DaemonProcess::Refusal() {
  const size_t said_before = log().size();
  Launch();
  int status = 0;
  const bool ended = Eventually([&] { return ::waitpid(pid_, &status, WNOHANG) != 0; });
  EXPECT_TRUE(ended) << "it serves";
  if (!ended) Kill();
  pid_ = -1;
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) != 0) << status;
  return log().substr(said_before);
}

bool DaemonProcess::Serves() const {
  return Client::Connect(client_options()).ok();
}

void DaemonProcess::Kill() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

void DaemonProcess::Signal(int number) {
  ASSERT_EQ(::kill(pid_, number), 0);
}

int DaemonProcess::Terminate() {
  Signal(SIGTERM);
  return Wait();
}

int DaemonProcess::Wait() {
  int status = 0;
  EXPECT_EQ(::waitpid(pid_, &status, 0), pid_);
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

void DaemonProcess::Freeze() {
  ASSERT_EQ(::kill(pid_, SIGSTOP), 0);
  ASSERT_TRUE(Eventually([this] { return StateOf(pid_) == 'T'; }));
}

void DaemonProcess::Thaw() {
  ASSERT_EQ(::kill(pid_, SIGCONT), 0);
}

ClientOptions DaemonProcess::client_options() const {
  return {.rpc_socket = directory_ + "/rpc.sock",
          .session_socket = directory_ + "/session.sock",
          .timeout = kPatience,
          .name = "integration test"};
}

std::string DaemonProcess::Metrics() const {
  const InNetworkNamespace there(network_namespace_);
  return HttpGet(AF_INET, Loopback(metrics_port_), "/metrics");
}

std::string DaemonProcess::Http(const std::string& path) const {
  struct sockaddr_un address {};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, metrics_socket().c_str(), sizeof(address.sun_path) - 1);
  return HttpGet(AF_UNIX, address, path);
}

double DaemonProcess::Metric(const std::string& sample) const {
  const std::string text = Metrics();
  const size_t at = text.find("\n" + sample + " ");
  return at == std::string::npos ? 0 : std::strtod(text.c_str() + at + sample.size() + 2, nullptr);
}

size_t DaemonProcess::peak_bytes() const {
  std::ifstream status("/proc/" + std::to_string(pid()) + "/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.starts_with("VmHWM:")) return std::stoul(line.substr(6)) * 1024;
  }
  ADD_FAILURE() << "no VmHWM";
  return 0;
}

}  // namespace ashlar::integration
