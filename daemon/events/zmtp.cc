// SPDX-License-Identifier: Apache-2.0
#include "daemon/events/zmtp.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace ashlar::daemon {
namespace {

constexpr size_t kGreetingBytes = 64, kMechanismAt = 12, kMechanismBytes = 20;
constexpr uint8_t kMajorVersion = 3;
constexpr uint8_t kMore = 1, kLong = 2, kCommand = 4;  // flags of a frame
constexpr size_t kPingTtlBytes = 2;

uint8_t Byte(absl::string_view text, size_t at) {
  return static_cast<uint8_t>(text[at]);
}

// Returns a number of `bytes` bytes, big-endian.
uint64_t Number(absl::string_view text, size_t at, size_t bytes) {
  uint64_t number = 0;
  for (size_t i = 0; i < bytes; ++i) number = number << 8 | Byte(text, at + i);
  return number;
}

std::string Bytes(uint64_t number, size_t count) {
  std::string bytes(count, '\0');
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<char>(number >> (8 * (count - 1 - i)));
  return bytes;
}

bool Takes(ZmtpSocket own, absl::string_view other) {
  if (own == ZmtpSocket::kPub) return other == "SUB" || other == "XSUB";
  return other == "REQ" || other == "DEALER" || other == "ROUTER";
}

std::string Command(absl::string_view name, absl::string_view body) {
  return absl::StrCat(std::string(1, kCommand), Bytes(1 + name.size() + body.size(), 1), Bytes(name.size(), 1), name,
                      body);
}

std::string Property(absl::string_view name, absl::string_view value) {
  return absl::StrCat(Bytes(name.size(), 1), name, Bytes(value.size(), 4), value);
}

}  // namespace

std::string ZmtpGreeting(ZmtpSocket own) {
  std::string greeting = absl::StrCat("\xff", std::string(8, '\0'), "\x7f", Bytes(kMajorVersion, 1), Bytes(0, 1));
  greeting += "NULL";
  greeting.resize(kGreetingBytes, '\0');
  const bool pub = own == ZmtpSocket::kPub;
  const std::string properties = Property("Socket-Type", pub ? "PUB" : "ROUTER") + Property("Identity", "");
  return greeting + Command("READY", properties);
}

std::string ZmtpPong(absl::string_view context) {
  return Command("PONG", context);
}

std::string ZmtpFrameHeader(size_t bytes, bool more) {
  const uint8_t flags = more ? kMore : 0;
  if (bytes <= UINT8_MAX) return absl::StrCat(Bytes(flags, 1), Bytes(bytes, 1));
  return absl::StrCat(Bytes(flags | kLong, 1), Bytes(bytes, 8));
}

void AppendZmtpFrame(std::string& to, absl::string_view body, bool more) {
  absl::StrAppend(&to, ZmtpFrameHeader(body.size(), more), body);
}

absl::StatusOr<std::vector<ZmtpInput>> ZmtpReader::Receive(absl::string_view bytes) {
  absl::StrAppend(&unread_, bytes);
  std::vector<ZmtpInput> inputs;
  if (!greeted_) {
    if (absl::Status status = ReadGreeting(); !status.ok()) return status;
  }
  while (greeted_) {
    const absl::StatusOr<bool> read = ReadFrame(inputs);
    if (!read.ok()) return read.status();
    if (!*read) break;
  }
  return inputs;
}

absl::Status ZmtpReader::ReadGreeting() {
  if (!unread_.empty() && Byte(unread_, 0) != 0xff) return absl::FailedPreconditionError("greeting: expected ZMTP 3");
  if (unread_.size() < kGreetingBytes) return absl::OkStatus();
  if ((Byte(unread_, 9) & 1) == 0) return absl::FailedPreconditionError("greeting: expected ZMTP 3");
  if (Byte(unread_, 10) < kMajorVersion) {
    return absl::FailedPreconditionError(absl::StrCat("greeting: ZMTP ", Byte(unread_, 10), ", expected 3"));
  }
  const std::string mechanism = unread_.substr(kMechanismAt, kMechanismBytes);
  if (mechanism != std::string("NULL") + std::string(kMechanismBytes - 4, '\0')) {
    return absl::FailedPreconditionError("greeting: unsupported mechanism; expected NULL");
  }
  greeted_ = true;
  unread_.erase(0, kGreetingBytes);
  return absl::OkStatus();
}

absl::StatusOr<bool> ZmtpReader::ReadFrame(std::vector<ZmtpInput>& inputs) {
  if (unread_.size() < 2) return false;
  const uint8_t flags = Byte(unread_, 0);
  const size_t length_bytes = (flags & kLong) != 0 ? 8 : 1;
  if (flags > (kMore | kLong | kCommand) || (flags & (kMore | kCommand)) == (kMore | kCommand)) {
    return absl::InvalidArgumentError(absl::StrCat("frame: unknown flags ", flags));
  }
  if (unread_.size() < 1 + length_bytes) return false;
  const uint64_t length = Number(unread_, 1, length_bytes);
  if (length > kMaxFrameBytes) {
    return absl::InvalidArgumentError(absl::StrCat("frame: ", length, " bytes; expected at most ", kMaxFrameBytes));
  }
  const size_t begin = 1 + length_bytes, end = begin + length;
  if (unread_.size() < end) return false;
  const std::string body = unread_.substr(begin, length);
  unread_.erase(0, end);
  const bool command = (flags & kCommand) != 0;
  const absl::Status status = command ? ReadCommand(body, inputs) : AddFrame(body, (flags & kMore) != 0, inputs);
  if (!status.ok()) return status;
  return true;
}

absl::Status ZmtpReader::ReadCommand(absl::string_view body, std::vector<ZmtpInput>& inputs) {
  if (body.empty() || body.size() < 1 + size_t{Byte(body, 0)}) {
    return absl::InvalidArgumentError("command: the name exceeds the command's size");
  }
  const absl::string_view name = body.substr(1, Byte(body, 0)), data = body.substr(1 + name.size());
  if (!ready_) {
    if (name != "READY") return absl::InvalidArgumentError("command: expected READY first");
    if (absl::Status status = ReadReady(data); !status.ok()) return status;
    ready_ = true;
    inputs.push_back({.kind = ZmtpInput::Kind::kReady, .frames = {}});
  } else if (name == "PING" && data.size() >= kPingTtlBytes) {
    inputs.push_back({.kind = ZmtpInput::Kind::kPing, .frames = {std::string(data.substr(kPingTtlBytes))}});
  } else if (name == "SUBSCRIBE" || name == "CANCEL") {
    const auto kind = name == "CANCEL" ? ZmtpInput::Kind::kCancel : ZmtpInput::Kind::kSubscribe;
    inputs.push_back({.kind = kind, .frames = {std::string(data)}});
  }  // others are of later versions
  return absl::OkStatus();
}

absl::Status ZmtpReader::ReadReady(absl::string_view properties) {
  std::string socket;
  while (!properties.empty()) {
    const size_t name_bytes = Byte(properties, 0);
    if (properties.size() < 1 + name_bytes + 4) return absl::InvalidArgumentError("READY: a property is truncated");
    const absl::string_view name = properties.substr(1, name_bytes);
    const uint64_t value_bytes = Number(properties, 1 + name_bytes, 4);
    properties.remove_prefix(1 + name_bytes + 4);
    if (properties.size() < value_bytes) return absl::InvalidArgumentError("READY: a property is truncated");
    if (absl::EqualsIgnoreCase(name, "Socket-Type")) {
      socket = std::string(properties.substr(0, value_bytes));
    }
    properties.remove_prefix(value_bytes);
  }
  if (Takes(own_, socket)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("READY: wrong socket type; expected ", own_ == ZmtpSocket::kPub ? "SUB" : "REQ or DEALER"));
}

absl::Status ZmtpReader::AddFrame(absl::string_view body, bool more, std::vector<ZmtpInput>& inputs) {
  if (!ready_) return absl::InvalidArgumentError("message: expected READY first");
  if (frames_.size() == kMaxFrames) {
    return absl::InvalidArgumentError(absl::StrCat("message: more than ", kMaxFrames, " frames"));
  }
  frames_.emplace_back(body);
  if (more) return absl::OkStatus();
  ZmtpInput input{.kind = ZmtpInput::Kind::kMessage, .frames = std::exchange(frames_, {})};
  // Up to ZMTP 3.0, subscriptions are messages: 1 or 0, then the prefix.
  if (own_ == ZmtpSocket::kPub && input.frames.size() == 1 && !body.empty() && Byte(body, 0) <= 1) {
    input.kind = Byte(body, 0) == 1 ? ZmtpInput::Kind::kSubscribe : ZmtpInput::Kind::kCancel;
    input.frames[0].erase(0, 1);
  }
  inputs.push_back(std::move(input));
  return absl::OkStatus();
}

}  // namespace ashlar::daemon
