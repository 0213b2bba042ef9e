// SPDX-License-Identifier: Apache-2.0
// The session socket of a whole daemon. An input is a conversation: datagrams, each behind a byte that says what is
// special about it and a byte of its length. Every datagram gets one reply, or the end of the session.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"
#include "ashlar/v1/session.pb.h"
#include "daemon/config/config.h"
#include "daemon/daemon.h"
#include "daemon/runtime/log.h"
#include "proto/limits.h"
#include "tests/fuzz/fuzz.h"

namespace {

using namespace ashlar;

constexpr int kReplyMilliseconds = 20000;
constexpr uint8_t kWithMemory = 1, kHelloFirst = 2;  // bits of the byte before a datagram

class Node {
 public:
  Node() {
    char folder[] = "/tmp/ashlar-fuzz-XXXXXX";
    FUZZ_EXPECT(mkdtemp(folder) != nullptr);
    folder_ = folder;
    v1::Config config;
    const absl::Status read = daemon::ParseConfig(
        absl::StrCat("listen: {rpc_socket: ", folder_, "/rpc, session_socket: ", socket(),
                     "}\ndram: {capacity_bytes: 1MiB, arena_bytes: 256KiB}\nsessions: {region_bytes: 1MiB}\n",
                     "workers: {threads: 1}\nlog: {level: error}\n"),
        &config);
    FUZZ_EXPECT(read.ok());
    daemon::ConfigureLog(config.log().level(), config.log().format());
    auto started = daemon::Daemon::Start(config);
    FUZZ_EXPECT(started.ok());
    daemon_ = *std::move(started);
    memory_ = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    FUZZ_EXPECT(memory_ >= 0 && ftruncate(memory_, 64 * 1024) == 0 && fcntl(memory_, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
  }
  ~Node() {
    daemon_.reset();
    close(memory_);
    std::filesystem::remove_all(folder_);
  }

  int Connect() const {
    const int connection = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    sockaddr_un address{.sun_family = AF_UNIX};
    std::strncpy(address.sun_path, socket().c_str(), sizeof address.sun_path - 1);
    FUZZ_EXPECT(connect(connection, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    return connection;
  }
  int memory() const { return memory_; }

 private:
  std::string socket() const { return folder_ + "/session"; }

  std::string folder_;
  std::unique_ptr<daemon::Daemon> daemon_;
  int memory_ = -1;
};

// False: the session is over.
bool Send(int connection, const std::string& bytes, int descriptor) {
  iovec data{const_cast<char*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{.msg_iov = &data, .msg_iovlen = 1};
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  }
  return sendmsg(connection, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
}

// False: the session has ended. A daemon that neither answers nor hangs up fails the run.
bool Receive(int connection, v1::SessionReply& reply) {
  pollfd wait{.fd = connection, .events = POLLIN};
  int ready;
  do ready = poll(&wait, 1, kReplyMilliseconds);
  while (ready < 0 && errno == EINTR);  // the fuzzer's own alarm
  FUZZ_EXPECT(ready == 1);
  std::string bytes(limits::kMaxSessionMessageBytes, '\0');
  iovec data{bytes.data(), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * limits::kMaxDescriptorsPerMessage)];
  msghdr message{.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
  const ssize_t size = recvmsg(connection, &message, MSG_CMSG_CLOEXEC);
  if (size <= 0) return false;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = CMSG_LEN(0); at < header->cmsg_len; at += sizeof(int)) {
      int descriptor;
      std::memcpy(&descriptor, reinterpret_cast<char*>(header) + at, sizeof descriptor);
      close(descriptor);
    }
  }
  FUZZ_EXPECT(reply.ParseFromArray(bytes.data(), static_cast<int>(size)));
  FUZZ_EXPECT((reply.code() == 0) == (reply.reply_case() != v1::SessionReply::REPLY_NOT_SET));
  FUZZ_EXPECT(reply.code() == 0 || !reply.message().empty());
  return true;
}

std::string Hello() {
  v1::SessionRequest request;
  request.mutable_hello()->set_protocol_min(limits::kProtocolMin);
  request.mutable_hello()->set_protocol_max(limits::kProtocolMax);
  return request.SerializeAsString();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Node node;
  const int connection = node.Connect();
  v1::SessionReply reply;
  bool open = true;
  if (size > 0 && (data[0] & kHelloFirst) != 0) {
    open = Send(connection, Hello(), -1) && Receive(connection, reply);
  }
  for (int asked = 0; open && size >= 2 && asked < 16; ++asked) {
    const uint8_t special = data[0];
    const size_t length = std::min<size_t>(data[1], size - 2);
    const std::string bytes(reinterpret_cast<const char*>(data) + 2, length);
    data += 2 + length;
    size -= 2 + length;
    open = Send(connection, bytes, (special & kWithMemory) != 0 ? node.memory() : -1) && Receive(connection, reply);
  }
  close(connection);
  return 0;
}
