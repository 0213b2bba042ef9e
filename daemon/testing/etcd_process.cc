// SPDX-License-Identifier: Apache-2.0
#include "daemon/testing/etcd_process.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

namespace ashlar::daemon {
namespace {

constexpr std::chrono::seconds kPatience{60};  // generous for a loaded machine's disk
constexpr uint16_t kUsualPort = 2379, kUsualPeerPort = 2380;

// Two different ports of 127.0.0.1 that are free at this moment.
void FreePorts(uint16_t* first, uint16_t* second) {
  int sockets[2];
  uint16_t* const ports[] = {first, second};
  for (int i = 0; i < 2; ++i) {
    sockets[i] = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    EXPECT_EQ(::bind(sockets[i], reinterpret_cast<struct sockaddr*>(&address), size), 0);
    EXPECT_EQ(::getsockname(sockets[i], reinterpret_cast<struct sockaddr*>(&address), &size), 0);
    *ports[i] = ntohs(address.sin_port);
  }
  for (const int fd : sockets) ::close(fd);
}

bool InPath(const std::string& program) {
  const char* const path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    if (::access((folder + "/" + program).c_str(), X_OK) == 0) return true;
  }
  return false;
}

}  // namespace

std::string EtcdProcess::WhyNot() {
  return InPath("etcd") ? "" : "etcd is not installed (Debian's etcd-server)";
}

EtcdProcess::EtcdProcess(const EtcdOptions& options) : options_(options) {
  std::string pattern = testing::TempDir() + "ashlar-etcd-XXXXXX";
  directory_ = ::mkdtemp(pattern.data());
  // A separate namespace has no other servers, so the usual ports are free.
  uint16_t port = kUsualPort;
  peer_port_ = kUsualPeerPort;
  if (options_.network_namespace < 0) FreePorts(&port, &peer_port_);
  if (options_.port == 0) options_.port = port;
  Start();
}

EtcdProcess::~EtcdProcess() {
  Kill();
  if (testing::Test::HasFailure()) std::fputs(log().c_str(), stderr);
  std::filesystem::remove_all(directory_);
}

void EtcdProcess::Start() {
  const std::string clients = (options_.certificate.empty() ? "http://" : "https://") + endpoint();
  const std::string peers = "http://127.0.0.1:" + std::to_string(peer_port_);
  // etcd's durability after a power loss is not tested here, and fsync on a shared disk takes long.
  std::vector<std::string> command = {"etcd", "--name=test", "--data-dir=" + directory_ + "/data", "--unsafe-no-fsync"};
  command.insert(command.end(), {"--listen-client-urls=" + clients, "--advertise-client-urls=" + clients});
  command.insert(command.end(), {"--listen-peer-urls=" + peers, "--initial-advertise-peer-urls=" + peers});
  command.push_back("--initial-cluster=test=" + peers);
  if (!options_.certificate.empty()) {
    command.insert(command.end(), {"--cert-file=" + options_.certificate, "--key-file=" + options_.key});
  }
  if (!options_.client_authority.empty()) {
    command.insert(command.end(), {"--client-cert-auth", "--trusted-ca-file=" + options_.client_authority});
  }
  command.insert(command.end(), options_.arguments.begin(), options_.arguments.end());
  const size_t said_before = log().size();
  process_.Start({.command = command,
                  .environment = options_.environment,
                  .log = directory_ + "/log",
                  .network_namespace = options_.network_namespace});
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  const auto serves = [&] { return log().find("ready to serve client requests", said_before) != std::string::npos; };
  while (!serves()) {
    ASSERT_TRUE(process_.Running()) << "etcd ended before it served:\n" << log().substr(said_before);
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "etcd does not serve:\n" << log().substr(said_before);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

void EtcdProcess::Wipe() {
  Kill();
  std::filesystem::remove_all(directory_ + "/data");
}

std::string EtcdProcess::endpoint() const {
  return options_.address + ":" + std::to_string(options_.port);
}

std::string EtcdProcess::log() const {
  std::ostringstream text;
  text << std::ifstream(directory_ + "/log").rdbuf();
  return text.str();
}

}  // namespace ashlar::daemon
