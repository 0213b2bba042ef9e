// SPDX-License-Identifier: Apache-2.0
#include "tests/nodes/network.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <linux/ethtool.h>
#include <linux/if_packet.h>
#include <linux/sockios.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <sched.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <random>

#include "tests/integration/daemon_process.h"

namespace ashlar::nodes {
namespace {

using integration::InNetworkNamespace;

constexpr char kDevice[] = "eth0";  // in each node
constexpr int kPortBytes = 32 << 20;
constexpr int kIgnoreOutgoing = 23;  // PACKET_IGNORE_OUTGOING, which not every header has

std::string PortName(size_t node) {
  return "port" + std::to_string(node);
}

std::string MacText(size_t node) {
  char text[18];
  const auto mac = MacOf(node);
  std::snprintf(text, sizeof text, "%02x:%02x:%02x:%02x:%02x:%02x", mac[0], mac[1], mac[2], mac[3], mac[4], mac[5]);
  return text;
}

// Runs lines of iproute2's `ip` in the calling thread's namespace.
bool Ip(const std::string& lines) {
  std::FILE* const ip = ::popen("ip -batch - 2>&1 >/dev/null", "w");
  if (ip == nullptr) return false;
  std::fputs(lines.c_str(), ip);
  return ::pclose(ip) == 0;
}

// Makes the kernel compute checksums and segment packets before a frame reaches the device, as on a wire. By default
// neither happens between two ends of a veth pair: a reader of raw frames would see segments of 64 KiB with unset
// checksums.
bool TurnOffloadsOff(const char* device) {
  const int fd = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  bool off = true;
  for (const uint32_t command : {ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGRO}) {
    struct ethtool_value value {
      .cmd = command, .data = 0
    };
    struct ifreq request {};
    std::strcpy(request.ifr_name, device);
    request.ifr_data = reinterpret_cast<char*>(&value);
    off = ::ioctl(fd, SIOCETHTOOL, &request) == 0 && off;
  }
  ::close(fd);
  return off;
}

// The kernel reports it some time after both ends are up, and programs skip interfaces that are not running.
bool IsRunning(const char* device) {
  const int fd = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  struct ifreq request {};
  std::strcpy(request.ifr_name, device);
  const bool runs = ::ioctl(fd, SIOCGIFFLAGS, &request) == 0 && (request.ifr_flags & IFF_RUNNING) != 0;
  ::close(fd);
  return runs;
}

// Opens raw frames of that device; negative: see errno.
int OpenPort(const char* device) {
  const int fd = ::socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, 0);
  if (fd < 0) return fd;
  const int on = 1;
  ::setsockopt(fd, SOL_PACKET, kIgnoreOutgoing, &on, sizeof on);
  ::setsockopt(fd, SOL_PACKET, PACKET_QDISC_BYPASS, &on, sizeof on);
  // So that frames are lost only on purpose.
  ::setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &kPortBytes, sizeof kPortBytes);
  ::setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &kPortBytes, sizeof kPortBytes);
  struct sockaddr_ll address {};
  address.sll_family = AF_PACKET;
  address.sll_protocol = htons(ETH_P_ALL);
  address.sll_ifindex = static_cast<int>(::if_nametoindex(device));
  if (::bind(fd, reinterpret_cast<struct sockaddr*>(&address), sizeof address) == 0) return fd;
  ::close(fd);
  return -1;
}

// In a child, so that nothing of it remains.
std::string TryAll() {
  const pid_t child = ::fork();
  if (child == 0) {
    if (::unshare(CLONE_NEWNET) != 0) ::_exit(1);
    if (!Ip("link add one type veth peer name other\nlink add middle type bridge\nlink set one up\n")) ::_exit(2);
    if (OpenPort("one") < 0) ::_exit(3);
    if (!TurnOffloadsOff("other")) ::_exit(4);
    ::_exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  if (!WIFEXITED(status)) return "network namespaces cannot be tried";
  switch (WEXITSTATUS(status)) {
    case 0:
      return "";
    case 1:
      return "this machine does not let this user make network namespaces (CAP_SYS_ADMIN)";
    case 2:
      return "no veth pair or bridge can be made: CAP_NET_ADMIN, the kernel's veth and bridge, or iproute2 is missing";
    case 3:
      return "no raw frames can be read (CAP_NET_RAW)";
    default:
      return "the offloads of a veth device cannot be turned off";
  }
}

uint64_t FreshSeed() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

}  // namespace

std::string Network::WhyNot() {
  static const std::string reason = TryAll();
  return reason;
}

std::string Network::address(size_t node) {
  return "10.77.0." + std::to_string(node + 1);
}

Network::Network(const NetworkOptions& options) : seed_(options.seed != 0 ? options.seed : FreshSeed()) {
  for (size_t i = 0; i < options.nodes; ++i) nodes_.push_back(std::make_unique<integration::NetworkNamespace>());
  Connect(options);
  if (options.relay) StartRelay(options);
}

Network::~Network() {
  if (relay_ != nullptr && testing::Test::HasFailure()) {
    std::fprintf(stderr, "the relay's seed: %llu\n", static_cast<unsigned long long>(seed_));
  }
  relay_.reset();
}

// Addresses of neighbours are given, so that no ARP is lost or late where a test is about something else.
void Network::Connect(const NetworkOptions& options) {
  const std::string mtu = " mtu " + std::to_string(options.mtu);
  std::string wires = options.relay ? "" : "link add switch type bridge\nlink set switch up\n";
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const std::string port = PortName(i);
    wires += "link add " + port + mtu + " type veth peer name " + kDevice + mtu + " address " + MacText(i) + " netns " +
             nodes_[i]->path() + "\n";
    wires += "link set " + port + " addrgenmode none" + (options.relay ? "" : " master switch") + "\n";
    wires += "link set " + port + " up\n";
  }
  {
    const InNetworkNamespace there(switch_.fd());
    ASSERT_TRUE(Ip(wires)) << "links of the switch";
    for (size_t i = 0; options.relay && i < nodes_.size(); ++i) TurnOffloadsOff(PortName(i).c_str());
  }
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const std::string device = std::string(" dev ") + kDevice;
    std::string lines = "addr add " + address(i) + "/24" + device + "\n";
    lines += std::string("link set ") + kDevice + " addrgenmode none\nlink set " + kDevice + " up\n";
    for (size_t other = 0; other < nodes_.size(); ++other) {
      if (other != i) lines += "neigh add " + address(other) + " lladdr " + MacText(other) + device + "\n";
    }
    const InNetworkNamespace there(nodes_[i]->fd());
    ASSERT_TRUE(Ip(lines)) << "addresses of node " << i;
    if (options.relay) {
      ASSERT_TRUE(TurnOffloadsOff(kDevice)) << std::strerror(errno);
    }
  }
  for (const auto& node : nodes_) {
    const InNetworkNamespace there(node->fd());
    ASSERT_TRUE(integration::Eventually([] { return IsRunning(kDevice); }));
  }
}

void Network::StartRelay(const NetworkOptions& options) {
  std::vector<int> ports;
  const InNetworkNamespace there(switch_.fd());
  for (size_t i = 0; i < nodes_.size(); ++i) {
    ports.push_back(OpenPort(PortName(i).c_str()));
    EXPECT_GE(ports.back(), 0) << std::strerror(errno);
  }
  relay_ = std::make_unique<Relay>(std::move(ports), options.mtu, seed_);
}

void Network::SetLink(size_t from, size_t to, const LinkConditions& conditions) {
  ASSERT_NE(relay_, nullptr) << "the network has no relay";
  disturbed_ = disturbed_ || !(conditions == LinkConditions{});
  relay_->Set(from, to, conditions);
}

void Network::SetBetween(size_t a, size_t b, const LinkConditions& conditions) {
  SetLink(a, b, conditions);
  SetLink(b, a, conditions);
}

void Network::SetAround(size_t node, const LinkConditions& conditions) {
  for (size_t other = 0; other < nodes(); ++other) {
    if (other != node) SetBetween(node, other, conditions);
  }
}

void Network::SetAll(const LinkConditions& conditions) {
  for (size_t node = 0; node < nodes(); ++node) SetAround(node, conditions);
}

std::vector<std::string> ClockOff(const std::string& offset) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return {};
#endif
  std::error_code ignored;
  for (const auto& folder : std::filesystem::directory_iterator("/usr/lib", ignored)) {
    const std::string library = folder.path() / "faketime" / "libfaketimeMT.so.1";
    if (!std::filesystem::exists(library, ignored)) continue;
    // Waits with deadlines are on the monotonic clock, which no administrator sets.
    return {"LD_PRELOAD=" + library, "FAKETIME=" + offset, "FAKETIME_DONT_FAKE_MONOTONIC=1"};
  }
  return {};
}

}  // namespace ashlar::nodes
