// SPDX-License-Identifier: Apache-2.0
#include "tools/neighbours/raw_engine.h"

#include <fcntl.h>
#include <grpcpp/create_channel.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "ashlar/v1/cache.grpc.pb.h"
#include "ashlar/v1/session.pb.h"
#include "client/session/prompt_message.h"
#include "proto/limits.h"

namespace ashlar::neighbours {
namespace {

constexpr timeval kSocketPatience = {.tv_sec = 10, .tv_usec = 0};

absl::Status FromGrpc(const grpc::Status& status) {
  return {static_cast<absl::StatusCode>(status.error_code()), status.error_message()};
}

void CloseDescriptors(msghdr& message) {
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
    for (size_t i = 0; i < (part->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof fd, sizeof fd);
      close(fd);
    }
  }
}

}  // namespace

absl::StatusOr<RawSession> RawSession::Open(const ClientOptions& daemon) {
  internal::Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket) return absl::ErrnoToStatus(errno, "socket");
  setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &kSocketPatience, sizeof kSocketPatience);
  setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &kSocketPatience, sizeof kSocketPatience);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  daemon.session_socket.copy(address.sun_path, sizeof address.sun_path - 1);
  if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return absl::ErrnoToStatus(errno, "cannot connect to the session socket");
  }
  RawSession session(std::move(socket));
  v1::SessionRequest hello;
  hello.mutable_hello()->set_protocol_min(limits::kProtocolMin);
  hello.mutable_hello()->set_protocol_max(limits::kProtocolMax);
  hello.mutable_hello()->set_client("neighbours");
  const absl::StatusOr<v1::SessionReply> reply = session.Ask(hello);
  if (!reply.ok()) return reply.status();
  session.secret_ = reply->welcome().session();
  return session;
}

absl::Status RawSession::Send(const v1::SessionRequest& request, int descriptor) {
  std::string bytes = request.SerializeAsString();
  iovec data = {.iov_base = bytes.data(), .iov_len = bytes.size()};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> space{};
  if (descriptor >= 0) {
    message.msg_control = space.data();
    message.msg_controllen = space.size();
    cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof descriptor);
    std::memcpy(CMSG_DATA(part), &descriptor, sizeof descriptor);
  }
  if (sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return absl::OkStatus();
  if (errno == EAGAIN || errno == ETOOMANYREFS)
    return absl::ResourceExhaustedError("the session accepts no more requests");
  return absl::UnavailableError("the session has ended");
}

absl::StatusOr<v1::SessionReply> RawSession::Ask(const v1::SessionRequest& request, int descriptor) {
  if (absl::Status status = Send(request, descriptor); !status.ok()) return status;
  std::string bytes(limits::kMaxSessionMessageBytes, '\0');
  iovec data = {.iov_base = bytes.data(), .iov_len = bytes.size()};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * limits::kMaxDescriptorsPerMessage)> space{};
  message.msg_control = space.data();
  message.msg_controllen = space.size();
  const ssize_t size = recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
  if (size < 0 && errno == EAGAIN) return absl::DeadlineExceededError("the session does not answer");
  if (size <= 0) return absl::UnavailableError("the session has ended");
  CloseDescriptors(message);
  v1::SessionReply reply;
  if (!reply.ParseFromArray(bytes.data(), static_cast<int>(size))) return absl::InternalError("not a SessionReply");
  if (reply.code() != 0) return absl::Status(static_cast<absl::StatusCode>(reply.code()), reply.message());
  return reply;
}

struct RawEngine::Calls {
  std::unique_ptr<v1::Cache::Stub> stub;

  template <typename Request, typename Reply>
  absl::Status Make(grpc::Status (v1::Cache::Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
                    const Request& request, Reply& reply) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(kSocketPatience.tv_sec));
    return FromGrpc(((*stub).*method)(&context, request, &reply));
  }
};

RawEngine::RawEngine(RawSession session) : session_(std::move(session)) {}
RawEngine::RawEngine(RawEngine&&) noexcept = default;
RawEngine& RawEngine::operator=(RawEngine&&) noexcept = default;
RawEngine::~RawEngine() = default;

absl::StatusOr<RawEngine> RawEngine::Open(const ClientOptions& daemon) {
  return Open(daemon, SmallLayout(), /*prefixes=*/false);
}

absl::StatusOr<RawEngine> RawEngine::OpenForPrefixes(const ClientOptions& daemon, const Layout& layout) {
  return Open(daemon, layout, /*prefixes=*/true);
}

absl::StatusOr<RawEngine> RawEngine::Open(const ClientOptions& daemon, const Layout& layout, bool prefixes) {
  absl::StatusOr<RawSession> session = RawSession::Open(daemon);
  if (!session.ok()) return session.status();
  RawEngine engine(*std::move(session));
  engine.calls_ = std::make_unique<Calls>();
  engine.calls_->stub =
      v1::Cache::NewStub(grpc::CreateChannel("unix:" + daemon.rpc_socket, grpc::InsecureChannelCredentials()));
  v1::OpenModelRequest request;
  request.set_session(engine.session_.secret());
  request.set_identity(EncodeIdentity(SmallIdentity()));
  request.set_layout(EncodeLayout(layout));
  if (prefixes) request.mutable_prefixes()->set_capture_tokens(1);
  v1::OpenModelReply reply;
  if (absl::Status status = engine.calls_->Make(&v1::Cache::Stub::OpenModel, request, reply); !status.ok()) {
    return status;
  }
  engine.model_ = reply.model();
  return engine;
}

absl::StatusOr<uint64_t> RawEngine::HostRegion(uint64_t bytes) {
  v1::SessionRequest region;
  region.mutable_host_region()->set_bytes(bytes);
  const absl::StatusOr<v1::SessionReply> hosted = session_.Ask(region);
  if (!hosted.ok()) return hosted.status();
  return hosted->region().region();
}

absl::StatusOr<uint64_t> RawEngine::DeclarePages(int memfd, const SegmentPrompt& prompt) {
  v1::SessionRequest region;
  region.mutable_register_region()->set_bytes(prompt.pages() * kPageBytes);
  const absl::StatusOr<v1::SessionReply> registered = session_.Ask(region, memfd);
  if (!registered.ok()) return registered.status();
  const PagedCache pages = SmallPages(prompt.pages());
  v1::DeclarePagesRequest request;
  request.set_session(session_.secret());
  request.set_model(model_);
  request.set_region(registered->region().region());
  request.set_page_tokens(pages.page_tokens);
  request.set_pages(pages.pages);
  for (const PagedLayer& layer : pages.layers) {
    v1::PagedLayer& message = *request.add_layers();
    message.set_layer(layer.layer);
    message.set_key_offset(layer.key_offset);
    message.set_value_offset(layer.value_offset);
    message.set_page_stride(layer.page_stride);
    message.set_token_stride(layer.token_stride);
    message.set_key_head_stride(layer.key_head_stride);
    message.set_value_head_stride(layer.value_head_stride);
  }
  v1::DeclarePagesReply reply;
  if (absl::Status status = calls_->Make(&v1::Cache::Stub::DeclarePages, request, reply); !status.ok()) return status;
  return reply.pages_id();
}

absl::StatusOr<RawEngine::Found> RawEngine::Match(const SegmentPrompt& prompt) {
  v1::MatchRequest request;
  request.set_session(session_.secret());
  request.set_model(model_);
  internal::Describe(prompt.prompt(), /*uses_prefixes=*/false, *request.add_prompts());
  v1::MatchReply reply;
  if (absl::Status status = calls_->Make(&v1::Cache::Stub::Match, request, reply); !status.ok()) return status;
  if (reply.prompts_size() != 1 || reply.prompts(0).segments_size() != 2 || reply.prompts(0).lease().empty() ||
      reply.prompts(0).segments(1).extents().empty()) {
    return absl::NotFoundError("a published segment was not found");
  }
  return Found{reply.prompts(0).lease(), reply.prompts(0).segments(1).extents(0).arena()};
}

absl::StatusOr<internal::Descriptor> SealedMemory(uint64_t bytes) {
  internal::Descriptor memory(memfd_create("neighbours", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory || ftruncate(memory.get(), static_cast<off_t>(bytes)) != 0 ||
      fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0) {
    return absl::ErrnoToStatus(errno, "cannot make memory");
  }
  return memory;
}

}  // namespace ashlar::neighbours
