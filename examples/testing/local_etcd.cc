// SPDX-License-Identifier: Apache-2.0
#include "examples/testing/local_etcd.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "examples/testing/child_process.h"

namespace ashlar::tools {
namespace {

using std::chrono::steady_clock;

constexpr auto kEtcdStartTimeout = std::chrono::seconds(60);  // a busy machine's disk is slow

// Returns the program's path; empty: PATH has none.
std::string FindInPath(const std::string& program) {
  const char* const path = std::getenv("PATH");
  for (const absl::string_view folder : absl::StrSplit(path == nullptr ? "" : path, ':', absl::SkipEmpty())) {
    std::string candidate = absl::StrCat(folder, "/", program);
    if (access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return "";
}

std::string ReadText(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

}  // namespace

absl::StatusOr<std::vector<uint16_t>> FreePorts(size_t count) {
  std::vector<int> sockets;  // open until all are chosen, so that no port is chosen twice
  std::vector<uint16_t> ports;
  absl::Status status;
  while (status.ok() && ports.size() < count) {
    sockets.push_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    if (bind(sockets.back(), generic, size) != 0 || getsockname(sockets.back(), generic, &size) != 0) {
      status = absl::ErrnoToStatus(errno, "cannot take a port of 127.0.0.1");
    }
    ports.push_back(ntohs(address.sin_port));
  }
  for (const int fd : sockets) close(fd);
  if (!status.ok()) return status;
  return ports;
}

absl::StatusOr<std::unique_ptr<LocalEtcd>> LocalEtcd::Start() {
  const std::string program = FindInPath("etcd");
  if (program.empty()) {
    return absl::NotFoundError("etcd: not in PATH, and several nodes find each other by it (Debian's etcd-server)");
  }
  std::unique_ptr<LocalEtcd> etcd(new LocalEtcd());
  std::string folder = "/tmp/ashlar-etcd-XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) return absl::ErrnoToStatus(errno, "cannot make a folder under /tmp");
  etcd->folder_ = folder;
  if (absl::Status status = etcd->Launch(program); !status.ok()) return status;
  if (absl::Status status = etcd->AwaitService(); !status.ok()) return status;
  return etcd;
}

absl::Status LocalEtcd::Launch(const std::string& program) {
  const absl::StatusOr<std::vector<uint16_t>> ports = FreePorts(2);
  if (!ports.ok()) return ports.status();
  endpoint_ = absl::StrCat("127.0.0.1:", (*ports)[0]);
  const std::string clients = absl::StrCat("http://", endpoint_);
  const std::string members = absl::StrCat("http://127.0.0.1:", (*ports)[1]);
  const int log = open((folder_ + "/log").c_str(), O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
  if (log < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot write in ", folder_));
  // Its data is removed with it and need not survive a loss of power.
  const absl::StatusOr<pid_t> pid =
      Spawn(program,
            {program, "--name=local", absl::StrCat("--data-dir=", folder_, "/data"), "--unsafe-no-fsync",
             "--quota-backend-bytes=8589934592",  // by default a quarter of that
             absl::StrCat("--listen-client-urls=", clients), absl::StrCat("--advertise-client-urls=", clients),
             absl::StrCat("--listen-peer-urls=", members), absl::StrCat("--initial-advertise-peer-urls=", members),
             absl::StrCat("--initial-cluster=local=", members)},
            {.output = log, .errors = log});
  close(log);
  if (!pid.ok()) return pid.status();
  pid_ = *pid;
  return absl::OkStatus();
}

absl::Status LocalEtcd::AwaitService() {
  const auto deadline = steady_clock::now() + kEtcdStartTimeout;
  const auto log = [this] { return ReadText(folder_ + "/log"); };
  while (log().find("ready to serve client requests") == std::string::npos) {
    if (waitpid(pid_, nullptr, WNOHANG) == pid_) {
      pid_ = -1;
      return absl::InternalError(absl::StrCat("etcd ended at once: ", log()));
    }
    if (steady_clock::now() >= deadline)
      return absl::DeadlineExceededError(absl::StrCat("etcd does not serve: ", log()));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return absl::OkStatus();
}

LocalEtcd::~LocalEtcd() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  std::error_code error;
  std::filesystem::remove_all(folder_, error);
}

}  // namespace ashlar::tools
