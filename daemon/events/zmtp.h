// SPDX-License-Identifier: Apache-2.0
// ZmtpReader: parses what the peer of a ZMTP 3 connection sends (https://rfc.zeromq.org/spec/23, mechanism NULL).
//
// libzmq limits the number of messages, but not their size: an endless message of many frames, or endless
// subscriptions, use unbounded memory. This reader keeps at most one message of bounded size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ashlar::daemon {

// The type of this end: a PUB socket, or a ROUTER socket that serves replays.
enum class ZmtpSocket : uint8_t { kPub, kRouter };

struct ZmtpInput {
  enum class Kind : uint8_t { kReady, kSubscribe, kCancel, kPing, kMessage };
  Kind kind = Kind::kMessage;
  // kSubscribe, kCancel: the prefix. kPing: the context to return. kMessage: all frames. kReady: empty.
  std::vector<std::string> frames;
};

class ZmtpReader {
 public:
  static constexpr size_t kMaxFrameBytes = 1024, kMaxFrames = 8;

  explicit ZmtpReader(ZmtpSocket own) : own_(own) {}

  // Returns the inputs that these bytes complete. FAILED_PRECONDITION if the peer speaks another version or mechanism,
  // or has an incompatible socket type. INVALID_ARGUMENT if it violates the protocol or a limit. The connection cannot
  // be used after an error.
  absl::StatusOr<std::vector<ZmtpInput>> Receive(absl::string_view bytes);

 private:
  absl::Status ReadGreeting();
  absl::StatusOr<bool> ReadFrame(std::vector<ZmtpInput>& inputs);  // returns false if the frame is incomplete
  absl::Status ReadCommand(absl::string_view body, std::vector<ZmtpInput>& inputs);
  absl::Status ReadReady(absl::string_view properties);
  absl::Status AddFrame(absl::string_view body, bool more, std::vector<ZmtpInput>& inputs);

  const ZmtpSocket own_;
  std::string unread_;  // at most the bytes of one frame and one Receive
  bool greeted_ = false, ready_ = false;
  std::vector<std::string> frames_;  // frames of an incomplete message
};

// Returns the greeting and the READY command of this end.
std::string ZmtpGreeting(ZmtpSocket own);
std::string ZmtpPong(absl::string_view context);
// Returns the bytes that precede the body of a frame.
std::string ZmtpFrameHeader(size_t bytes, bool more);
void AppendZmtpFrame(std::string& to, absl::string_view body, bool more);

}  // namespace ashlar::daemon
