// SPDX-License-Identifier: Apache-2.0
#include "daemon/testing/node.h"

#include <fcntl.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"
#include "daemon/config/config.h"
#include "daemon/runtime/unix_socket.h"
#include "daemon/testing/http_peer.h"
#include "proto/limits.h"

namespace ashlar::daemon {

void Require(bool condition, const std::string& what) {
  if (condition) return;
  std::fprintf(stderr, "test fixture: %s\n", what.c_str());
  std::abort();
}

TestNode::TestNode(const std::string& more, const std::string& listen) {
  std::string name = "/tmp/ashlard_test_XXXXXX";
  Require(mkdtemp(name.data()) != nullptr, "mkdtemp");
  folder_ = name;
  Require(chmod(name.c_str(), 0711) == 0, "chmod");  // other users reach the sockets; their mode decides
  const std::string yaml =
      absl::StrCat("listen: {rpc_socket: ", rpc_socket(), ", session_socket: ", session_socket(),
                   ", admin_socket: ", admin_socket(), listen.empty() ? "" : ", ", listen,
                   "}\ndram: {capacity_bytes: 16MiB, arena_bytes: 1MiB}\nworkers: {threads: 2}\n",
                   more.find("metrics:") == std::string::npos ? "metrics: {tenants: named}\n" : "", more);
  v1::Config config;
  const absl::Status parsed = ParseConfig(yaml, &config);
  Require(parsed.ok(), std::string(parsed.message()));
  auto daemon = Daemon::Start(config);
  Require(daemon.ok(), daemon.ok() ? "" : std::string(daemon.status().message()));
  daemon_ = *std::move(daemon);
}

TestNode::~TestNode() {
  daemon_ = nullptr;
  std::filesystem::remove_all(folder_);
}

size_t OpenDescriptors() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

UniqueFd MakeMemfd(size_t bytes, int seals) {
  UniqueFd memfd(memfd_create("ashlar-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  Require(memfd.valid() && ftruncate(memfd.get(), static_cast<off_t>(bytes)) == 0, "memfd");
  if (seals != 0) Require(fcntl(memfd.get(), F_ADD_SEALS, seals) == 0, "F_ADD_SEALS");
  return memfd;
}

bool Eventually(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

void AsUser(uid_t uid, const std::function<void()>& body) {
  std::thread([&] {
    // The system call changes only this thread; glibc's function would change the process.
    Require(syscall(SYS_setresuid, -1, uid, -1) == 0, "setresuid");
    body();
  }).join();
}

std::string Scrape(int port) {
  return HttpPeer(port).Ask("/metrics");
}

// Encoded by hand, because Debian ships the service without its .proto.
int Health(const std::string& rpc_socket, const std::string& service) {
  grpc::GenericStub health(grpc::CreateChannel(absl::StrCat("unix:", rpc_socket), grpc::InsecureChannelCredentials()));
  // HealthCheckRequest { string service = 1; }
  const grpc::Slice request(service.empty() ? "" : absl::StrCat("\x0a", std::string(1, service.size()), service));
  const grpc::ByteBuffer request_bytes(&request, 1);
  grpc::ByteBuffer response_bytes;
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  const auto call = health.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", request_bytes, &queue);
  call->StartCall();
  grpc::Status status;
  call->Finish(&response_bytes, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  grpc::Slice response;
  if (!queue.Next(&tag, &ok) || !status.ok() || !response_bytes.DumpToSingleSlice(&response).ok()) return -1;
  // HealthCheckResponse { ServingStatus status = 1; }
  return response.size() == 2 && *response.begin() == 0x08 ? response.begin()[1] : -1;
}

RawSession::RawSession(const std::string& path) : socket_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  Require(connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0, "connect");
}

bool RawSession::Send(const std::string& bytes, std::span<const int> descriptors) {
  std::vector<char> control(CMSG_SPACE(descriptors.size_bytes()));
  iovec vector{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr header{};
  header.msg_iov = &vector;
  header.msg_iovlen = 1;
  if (!descriptors.empty()) {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    cmsghdr* part = CMSG_FIRSTHDR(&header);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(part), descriptors.data(), descriptors.size_bytes());
  }
  return sendmsg(socket_.get(), &header, MSG_NOSIGNAL) >= 0;
}

absl::StatusOr<v1::SessionReply> RawSession::Receive(UniqueFd* descriptor) {
  pollfd waiting{socket_.get(), POLLIN, 0};
  Require(poll(&waiting, 1, 10'000) == 1, "no reply within 10 s");
  absl::StatusOr<Datagram> datagram = daemon::Receive(socket_.get());
  if (!datagram.ok()) return absl::UnavailableError("closed");
  v1::SessionReply reply;
  Require(reply.ParseFromString(datagram->bytes), "a reply that does not parse");
  Require(datagram->descriptors.size() <= 1, "more than one descriptor");
  if (descriptor != nullptr && datagram->descriptors.size() == 1) *descriptor = std::move(datagram->descriptors[0]);
  return reply;
}

absl::StatusOr<v1::SessionReply> RawSession::Ask(const v1::SessionRequest& request, std::span<const int> descriptors,
                                                 UniqueFd* descriptor) {
  if (!Send(request.SerializeAsString(), descriptors)) return absl::UnavailableError("closed");
  return Receive(descriptor);
}

absl::StatusOr<v1::SessionReply> RawSession::Hello(UniqueFd* descriptor) {
  v1::SessionRequest request;
  request.mutable_hello()->set_protocol_min(limits::kProtocolMin);
  request.mutable_hello()->set_protocol_max(limits::kProtocolMax);
  request.mutable_hello()->set_client("raw test");
  return Ask(request, {}, descriptor);
}

bool RawSession::Closed() {
  pollfd waiting{socket_.get(), POLLIN, 0};
  return poll(&waiting, 1, 5'000) == 1 && !Receive().ok();
}

absl::Status StatusOf(const absl::StatusOr<v1::SessionReply>& reply) {
  if (!reply.ok()) return reply.status();
  return absl::Status(static_cast<absl::StatusCode>(reply->code()), reply->message());
}

}  // namespace ashlar::daemon
