// SPDX-License-Identifier: Apache-2.0
#include "daemon/events/event_connection.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace ashlar::daemon {
namespace {

constexpr size_t kMaxControlBytes = 4096;
constexpr storage::Nanos kSecond = 1'000'000'000;

std::string Number(uint64_t number) {
  std::string bytes(8, '\0');
  for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(number >> (56 - 8 * i));
  return bytes;
}

}  // namespace

EventConnection::EventConnection(UniqueFd socket, ZmtpSocket own, const std::string& topic, std::string peer,
                                 storage::Nanos now)
    : socket_(std::move(socket)),
      own_(own),
      topic_(topic),
      peer_(std::move(peer)),
      accepted_(now),
      reader_(own),
      prefixes_(topic.size() + 1),
      control_(ZmtpGreeting(own)) {}

absl::Status EventConnection::Read(const KeptBatches& kept, storage::Nanos now) {
  std::array<char, 4096> bytes;
  const ssize_t size = recv(socket_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  if (size == 0) return absl::UnavailableError("closed");
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return absl::OkStatus();
  if (size < 0) return absl::UnavailableError(std::strerror(errno));
  if (now - second_ >= kSecond) {
    second_ = now;
    received_ = 0;
  }
  received_ += static_cast<size_t>(size);
  if (received_ > kMaxReceivedBytesPerSecond) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the peer sends more than ", kMaxReceivedBytesPerSecond, " bytes per second"));
  }
  const auto inputs = reader_.Receive({bytes.data(), static_cast<size_t>(size)});
  if (!inputs.ok()) return inputs.status();
  for (const ZmtpInput& input : *inputs) {
    if (absl::Status status = Handle(input, kept); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status EventConnection::Handle(const ZmtpInput& input, const KeptBatches& kept) {
  using Kind = ZmtpInput::Kind;
  switch (input.kind) {
    case Kind::kReady:
      ready_ = true;
      return absl::OkStatus();
    case Kind::kSubscribe:
    case Kind::kCancel:
      Subscribe(input.frames[0], input.kind == Kind::kSubscribe, kept);
      return absl::OkStatus();
    case Kind::kPing:
      control_ += ZmtpPong(input.frames[0]);
      if (control_.size() <= kMaxControlBytes) return absl::OkStatus();
      return absl::ResourceExhaustedError("the peer sends pings but does not read the replies");
    case Kind::kMessage:
      break;
  }
  // A request: an empty frame, and the number of the first batch. A later request replaces an earlier one.
  if (own_ != ZmtpSocket::kRouter || input.frames.size() != 2 || input.frames[1].size() != 8) return absl::OkStatus();
  next_ = 0;
  for (const char byte : input.frames[1]) next_ = next_ << 8 | static_cast<uint8_t>(byte);
  end_ = kept.next();
  asked_ = true;
  return absl::OkStatus();
}

// Only subscriptions to a prefix of the topic are kept; others match nothing.
void EventConnection::Subscribe(const std::string& prefix, bool on, const KeptBatches& kept) {
  if (!absl::StartsWith(topic_, prefix)) return;
  if (!subscribed()) next_ = kept.next();
  prefixes_[prefix.size()] = on;
}

bool EventConnection::subscribed() const {
  return std::ranges::find(prefixes_, true) != prefixes_.end();
}

absl::Status EventConnection::Send(const KeptBatches& kept) {
  blocked_ = more_ = false;
  for (size_t turn = 0; turn < kTurnBytes;) {
    if (head_.empty() && !Fill(kept)) return absl::OkStatus();
    const size_t in_batch = sent_ > head_.size() ? sent_ - head_.size() : 0, in_head = sent_ - in_batch;
    const std::string nothing;
    const std::string& batch = batch_ == nullptr ? nothing : *batch_;
    std::array<iovec, 2> parts = {iovec{head_.data() + in_head, head_.size() - in_head},
                                  iovec{const_cast<char*>(batch.data()) + in_batch, batch.size() - in_batch}};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    const ssize_t sent = sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) {
      blocked_ = true;
      return absl::OkStatus();
    }
    if (sent < 0) return absl::UnavailableError(std::strerror(errno));
    turn += static_cast<size_t>(sent);
    sent_ += static_cast<size_t>(sent);
    if (sent_ < head_.size() + batch.size()) continue;
    head_.clear();
    batch_ = nullptr;
    sent_ = 0;
  }
  more_ = true;
  return absl::OkStatus();
}

bool EventConnection::Fill(const KeptBatches& kept) {
  if (!control_.empty()) {
    head_ = std::exchange(control_, {});
    return true;
  }
  if (!ready_) return false;
  next_ = std::max(next_, kept.first());
  if (own_ == ZmtpSocket::kRouter) return asked_ && FillReplay(kept);
  if (!subscribed() || next_ >= kept.next()) return false;
  FillBatch(kept);
  return true;
}

bool EventConnection::FillReplay(const KeptBatches& kept) {
  AppendZmtpFrame(head_, "", true);
  if (next_ < end_) {
    FillBatch(kept);
    return true;
  }
  for (const std::string& frame : {std::string(), Number(UINT64_MAX)}) AppendZmtpFrame(head_, frame, true);
  AppendZmtpFrame(head_, "", false);
  asked_ = false;
  return true;
}

void EventConnection::FillBatch(const KeptBatches& kept) {
  batch_ = kept.at(next_);
  AppendZmtpFrame(head_, topic_, true);
  AppendZmtpFrame(head_, Number(next_), true);
  head_ += ZmtpFrameHeader(batch_->size(), false);
  ++next_;
}

}  // namespace ashlar::daemon
