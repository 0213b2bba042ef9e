// SPDX-License-Identifier: Apache-2.0
#include "client/session/session_channel.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/session.pb.h"
#include "proto/limits.h"
#include "proto/version.h"

namespace ashlar::internal {
namespace {

constexpr size_t kMaxLateAnswers = 256;
constexpr size_t kSessionBytes = 16, kDaemonEpochBytes = 16;

absl::Status Ended() {
  return absl::UnavailableError("the session with the daemon has ended");
}

// The GPU's name for the daemon; empty: none.
std::string NameOf(const kernels::GpuId& gpu) {
  if (gpu == kernels::GpuId{}) return "";
  return {reinterpret_cast<const char*>(gpu.data()), gpu.size()};
}

// Waits until the socket is ready for `events`.
absl::Status Await(int fd, short events, Deadline deadline) {
  for (;;) {
    struct pollfd socket = {.fd = fd, .events = events, .revents = 0};
    const int ready = ::poll(&socket, 1, PollTimeout(deadline));
    if (ready > 0) return absl::OkStatus();
    if (ready < 0 && errno != EINTR) return absl::ErrnoToStatus(errno, "poll");
    if (Passed(deadline)) return absl::DeadlineExceededError("the daemon did not answer in time");
  }
}

// Space for the descriptors of one message.
union DescriptorSpace {
  struct cmsghdr align;
  char bytes[CMSG_SPACE(sizeof(int) * limits::kMaxDescriptorsPerMessage)];
};

std::vector<Descriptor> TakeDescriptors(struct msghdr& message) {
  std::vector<Descriptor> descriptors;
  for (struct cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof fd, sizeof fd);
      descriptors.emplace_back(fd);
    }
  }
  return descriptors;
}

}  // namespace

struct SessionChannel::Answer {
  v1::SessionReply reply;
  std::vector<Descriptor> descriptors;
  bool incomplete = false;  // the message was truncated for lack of space or descriptors
};

absl::StatusOr<std::unique_ptr<SessionChannel>> SessionChannel::Open(const std::string& path, const std::string& client,
                                                                     Deadline deadline, const std::stop_token& stop) {
  std::unique_ptr<SessionChannel> channel(new SessionChannel);
  absl::StatusOr<ForkClosedSocket> socket = ForkClosedSocket::Connect(path, SOCK_SEQPACKET, deadline, stop);
  if (!socket.ok()) return socket.status();
  channel->socket_ = *std::move(socket);
  const std::stop_callback on_stop(stop, [&channel] { channel->Shutdown(); });
  if (absl::Status status = channel->Greet(client, deadline); !status.ok()) return status;
  return channel;
}

absl::Status SessionChannel::Greet(const std::string& client, Deadline deadline) {
  v1::SessionRequest request;
  request.mutable_hello()->set_protocol_min(limits::kProtocolMin);
  request.mutable_hello()->set_protocol_max(limits::kProtocolMax);
  request.mutable_hello()->set_client(client);
  request.mutable_hello()->set_release(Version());
  absl::StatusOr<Answer> answer = Ask(request, -1, Expects::kNothing, deadline);
  if (!answer.ok()) return answer.status();
  const v1::Welcome& welcome = answer->reply.welcome();
  if (!answer->reply.has_welcome() || welcome.session().size() != kSessionBytes) {
    return absl::UnavailableError("the reply on the session socket is not of Ashlar's protocol");
  }
  if (welcome.protocol() < limits::kProtocolMin || welcome.protocol() > limits::kProtocolMax) {
    return absl::FailedPreconditionError(absl::StrCat("the daemon chose protocol version ", welcome.protocol(),
                                                      "; this client supports ", limits::kProtocolMin, " to ",
                                                      limits::kProtocolMax));
  }
  if (welcome.extent_bytes() != limits::kExtentBytes) {
    return absl::FailedPreconditionError(absl::StrCat("the daemon's extents have ", welcome.extent_bytes(),
                                                      " bytes; this client expects ", limits::kExtentBytes));
  }
  if (answer->reply.clock_ns() <= 0) {
    return absl::FailedPreconditionError("the daemon's reply lacks its clock");
  }
  if (welcome.daemon_epoch().size() != kDaemonEpochBytes || answer->descriptors.size() != 1) {
    return absl::FailedPreconditionError("the daemon's reply lacks the descriptor of its process, or its epoch");
  }
  absl::StatusOr<PeerProcess> daemon = PeerProcess::Of(std::move(answer->descriptors.front()));
  if (!daemon.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the daemon's process: ", std::string(daemon.status().message())));
  }
  daemon_ = *std::move(daemon);
  session_ = welcome.session();
  daemon_epoch_ = welcome.daemon_epoch();
  tenant_ = welcome.tenant();
  protocol_ = welcome.protocol();
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> SessionChannel::RegisterRegion(int descriptor, uint64_t bytes, kernels::MemoryKind memory,
                                                        const kernels::GpuId& gpu, Deadline deadline) {
  v1::SessionRequest request;
  request.mutable_register_region()->set_bytes(bytes);
  request.mutable_register_region()->set_on_gpu(memory == kernels::MemoryKind::kDevice);
  request.mutable_register_region()->set_gpu(NameOf(gpu));
  absl::StatusOr<Answer> answer = Ask(request, descriptor, Expects::kRegion, deadline);
  if (!answer.ok()) return answer.status();
  if (!answer->reply.has_region()) return absl::InternalError("the daemon's answer lacks the region");
  return answer->reply.region().region();
}

absl::StatusOr<SessionChannel::HostedRegion> SessionChannel::HostRegion(uint64_t bytes, Deadline deadline) {
  v1::SessionRequest request;
  request.mutable_host_region()->set_bytes(bytes);
  absl::StatusOr<Answer> answer = Ask(request, -1, Expects::kRegion, deadline);
  if (!answer.ok()) return answer.status();
  if (!answer->reply.has_region() || answer->descriptors.size() != 1) {
    return absl::InternalError("the daemon's answer lacks the region or its descriptor");
  }
  return HostedRegion{answer->reply.region().region(), std::move(answer->descriptors.front())};
}

absl::StatusOr<SessionChannel::Arena> SessionChannel::GetArena(uint32_t arena, Deadline deadline) {
  v1::SessionRequest request;
  request.mutable_get_arena()->set_arena(arena);
  absl::StatusOr<Answer> answer = Ask(request, -1, Expects::kNothing, deadline);
  if (!answer.ok()) return answer.status();
  if (!answer->reply.has_arena() || answer->reply.arena().arena() != arena || answer->descriptors.size() != 1) {
    return absl::InternalError("the daemon's answer lacks the arena or its descriptor");
  }
  const v1::ArenaReply& granted = answer->reply.arena();
  return Arena{std::move(answer->descriptors.front()), granted.bytes(), granted.on_gpu()};
}

void SessionChannel::DropRegion(uint64_t region) {
  {
    MutexLock lock(mutex_);
    to_drop_.push_back(region);
    if (turn_) return;  // the end of that turn drops it
    turn_ = true;
  }
  EndTurn();
}

int64_t SessionChannel::InDaemonsClock(Deadline deadline) const {
  return std::max<int64_t>(MonotonicNanos(deadline) + clock_ahead_.load(std::memory_order_relaxed), 1);
}

bool SessionChannel::Alive() const {
  struct pollfd end = {.fd = fd(), .events = POLLRDHUP, .revents = 0};
  while (::poll(&end, 1, 0) < 0 && errno == EINTR) {
  }
  return end.revents == 0;
}

void SessionChannel::Shutdown() {
  ::shutdown(fd(), SHUT_RDWR);
}

absl::StatusOr<SessionChannel::Answer> SessionChannel::Ask(const v1::SessionRequest& request, int descriptor,
                                                           Expects expects, Deadline deadline) {
  {
    MutexLock lock(mutex_);
    while (turn_ && turn_ended_.WaitUntil(mutex_, deadline)) continue;
    if (turn_) return absl::DeadlineExceededError("the session socket was busy");
    turn_ = true;
  }
  absl::StatusOr<Answer> answer = Exchange(request, descriptor, expects, deadline);
  EndTurn();
  if (!answer.ok()) return answer;
  if (const auto code = static_cast<absl::StatusCode>(answer->reply.code()); code != absl::StatusCode::kOk) {
    return absl::Status(code, answer->reply.message());
  }
  if (!answer->incomplete) return answer;
  if (answer->reply.has_region()) DropRegion(answer->reply.region().region());
  return absl::ResourceExhaustedError("this process has no free file descriptors; raise RLIMIT_NOFILE");
}

void SessionChannel::EndTurn() {
  MutexLock lock(mutex_);
  while (!to_drop_.empty()) {
    const std::vector<uint64_t> regions = std::exchange(to_drop_, {});
    lock.Unlock();
    for (uint64_t region : regions) SendDrop(region);
    lock.Lock();
  }
  turn_ = false;
  turn_ended_.NotifyOne();
}

absl::StatusOr<SessionChannel::Answer> SessionChannel::Exchange(const v1::SessionRequest& request, int descriptor,
                                                                Expects expects, Deadline deadline) {
  if (late_.size() >= kMaxLateAnswers) {
    if (absl::Status status = TakeLateAnswers(Deadline()); !status.ok()) return status;
  }
  if (absl::Status status = Send(request, descriptor, deadline); !status.ok()) return status;
  absl::Status status = TakeLateAnswers(deadline);
  if (status.ok()) {
    absl::StatusOr<Answer> answer = Receive(deadline);
    if (!absl::IsDeadlineExceeded(answer.status())) return answer;
    status = answer.status();
  }
  late_.push_back(expects);
  return status;
}

// Reads all late answers, whose callers have stopped waiting, from the socket.
absl::Status SessionChannel::TakeLateAnswers(Deadline deadline) {
  while (!late_.empty()) {
    absl::StatusOr<Answer> answer = Receive(deadline);
    if (!answer.ok()) return answer.status();
    if (late_.front() == Expects::kRegion && answer->reply.has_region()) {
      MutexLock lock(mutex_);
      to_drop_.push_back(answer->reply.region().region());
    }
    late_.pop_front();
  }
  return absl::OkStatus();
}

// Best effort: a drop that cannot be sent now ends with the session.
void SessionChannel::SendDrop(uint64_t region) {
  if (late_.size() >= kMaxLateAnswers && !TakeLateAnswers(Deadline()).ok()) return;
  v1::SessionRequest request;
  request.mutable_drop_region()->set_region(region);
  if (Send(request, -1, Deadline()).ok()) late_.push_back(Expects::kNothing);
}

absl::Status SessionChannel::Send(const v1::SessionRequest& request, int descriptor, Deadline deadline) {
  const std::string bytes = request.SerializeAsString();
  struct iovec data = {.iov_base = const_cast<char*>(bytes.data()), .iov_len = bytes.size()};
  struct msghdr message {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  DescriptorSpace space{};
  if (descriptor >= 0) {
    message.msg_control = space.bytes;
    message.msg_controllen = CMSG_SPACE(sizeof descriptor);
    struct cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof descriptor);
    std::memcpy(CMSG_DATA(part), &descriptor, sizeof descriptor);
  }
  while (::sendmsg(fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return Ended();
    if (absl::Status status = Await(fd(), POLLOUT, deadline); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<SessionChannel::Answer> SessionChannel::Receive(Deadline deadline) {
  std::array<char, limits::kMaxSessionMessageBytes> bytes;
  struct iovec data = {.iov_base = bytes.data(), .iov_len = bytes.size()};
  DescriptorSpace space{};
  for (;;) {
    struct msghdr message {};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = space.bytes;
    message.msg_controllen = sizeof space.bytes;
    const ssize_t size = ::recvmsg(fd(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0 && errno == EAGAIN) {
      if (absl::Status status = Await(fd(), POLLIN, deadline); !status.ok()) return status;
      continue;
    }
    if (size <= 0) return Ended();
    Answer answer;
    answer.descriptors = TakeDescriptors(message);
    answer.incomplete = (message.msg_flags & MSG_CTRUNC) != 0;
    if ((message.msg_flags & MSG_TRUNC) != 0 || !answer.reply.ParseFromArray(bytes.data(), size)) {
      Shutdown();  // the messages that follow could not be parsed
      return Ended();
    }
    // Only one thread at a time gets here.
    const int64_t ahead = answer.reply.clock_ns() - MonotonicNanos(std::chrono::steady_clock::now());
    clock_ahead_.store(std::max(clock_ahead_.load(std::memory_order_relaxed), ahead), std::memory_order_relaxed);
    return answer;
  }
}

}  // namespace ashlar::internal
