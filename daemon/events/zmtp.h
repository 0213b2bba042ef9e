// SPDX-License-Identifier: Apache-2.0
// ZmtpReader: reads what the other end of a ZMTP 3 connection sends (https://rfc.zeromq.org/spec/23, mechanism NULL).
//
// libzmq bounds messages by their number only: an endless message of many frames, or endless subscriptions, take memory
// without a limit. This reader keeps at most one message of bounded size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ashlar::daemon {

// What this end is: a PUB socket, or a ROUTER socket that answers requests.
enum class ZmtpSocket : uint8_t { kPub, kRouter };

struct ZmtpInput {
  enum class Kind : uint8_t { kReady, kSubscribe, kCancel, kPing, kMessage };
  Kind kind = Kind::kMessage;
  // kSubscribe, kCancel: the prefix. kPing: the context for the answer. kMessage: all frames. kReady: none.
  std::vector<std::string> frames;
};

class ZmtpReader {
 public:
  static constexpr size_t kMaxFrameBytes = 1024, kMaxFrames = 8;

  explicit ZmtpReader(ZmtpSocket own) : own_(own) {}

  // Returns what is complete with these bytes. FAILED_PRECONDITION: the other end speaks another version or mechanism,
  // or its socket has no use for this one. INVALID_ARGUMENT: it breaks the protocol or a limit. After an error the
  // connection is of no use.
  absl::StatusOr<std::vector<ZmtpInput>> Receive(absl::string_view bytes);

 private:
  absl::Status ReadGreeting();
  absl::StatusOr<bool> ReadFrame(std::vector<ZmtpInput>& inputs);  // false: it is not complete
  absl::Status ReadCommand(absl::string_view body, std::vector<ZmtpInput>& inputs);
  absl::Status ReadReady(absl::string_view properties);
  absl::Status AddFrame(absl::string_view body, bool more, std::vector<ZmtpInput>& inputs);

  const ZmtpSocket own_;
  std::string unread_;  // at most the bytes of one frame, and those of one Receive
  bool greeted_ = false, ready_ = false;
  std::vector<std::string> frames_;  // of a message that is not complete
};

// The greeting and the READY command of this end.
std::string ZmtpGreeting(ZmtpSocket own);
std::string ZmtpPong(absl::string_view context);
// Returns what precedes a frame's body.
std::string ZmtpFrameHeader(size_t bytes, bool more);
void AppendZmtpFrame(std::string& to, absl::string_view body, bool more);

}  // namespace ashlar::daemon
