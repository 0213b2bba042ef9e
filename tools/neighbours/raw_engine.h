// SPDX-License-Identifier: Apache-2.0
// RawSession and calls of an abusive engine: it has no queue and reads no replies.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/session/client.h"
#include "client/session/descriptor.h"
#include "tools/neighbours/segment_engine.h"

namespace ashlar::v1 {
class SessionReply;
class SessionRequest;
}  // namespace ashlar::v1

namespace ashlar::neighbours {

class RawSession {
 public:
  // Sends a valid Hello. Returns the daemon's error if it refuses, UNAVAILABLE if it hangs up.
  static absl::StatusOr<RawSession> Open(const ClientOptions& daemon);

  const std::string& secret() const { return secret_; }
  // The daemon's answer: its refusal, UNAVAILABLE if it hung up, DEADLINE_EXCEEDED after some seconds. Descriptors
  // attached to it are closed. `descriptor` is attached to the request; −1: none.
  absl::StatusOr<v1::SessionReply> Ask(const v1::SessionRequest& request, int descriptor = -1);
  // Sends without ever reading. UNAVAILABLE: the daemon hung up; RESOURCE_EXHAUSTED: it accepts no more.
  absl::Status Send(const v1::SessionRequest& request, int descriptor = -1);

 private:
  explicit RawSession(internal::Descriptor socket) : socket_(std::move(socket)) {}

  internal::Descriptor socket_;
  std::string secret_;
};

// A session that has opened the small model (segment_engine.h), and calls that prepare an attack (call_load.h).
class RawEngine {
 public:
  static absl::StatusOr<RawEngine> Open(const ClientOptions& daemon);
  // Another model than the small one, with exact prefixes.
  static absl::StatusOr<RawEngine> OpenForPrefixes(const ClientOptions& daemon, const Layout& layout);
  RawEngine(RawEngine&&) noexcept;
  RawEngine& operator=(RawEngine&&) noexcept;
  ~RawEngine();

  const RawSession& session() const { return session_; }
  uint64_t model() const { return model_; }
  // A region that the daemon hosts; its handle.
  absl::StatusOr<uint64_t> HostRegion(uint64_t bytes);
  // Pages in a memfd with space for the prompt's segment; returns their handle.
  absl::StatusOr<uint64_t> DeclarePages(int memfd, const SegmentPrompt& prompt);
  struct Found {
    std::string lease;
    uint32_t arena = 0;  // an arena that has part of the segment
  };
  // Matches a published segment.
  absl::StatusOr<Found> Match(const SegmentPrompt& prompt);

 private:
  struct Calls;
  static absl::StatusOr<RawEngine> Open(const ClientOptions& daemon, const Layout& layout, bool prefixes);
  explicit RawEngine(RawSession session);

  RawSession session_;
  std::unique_ptr<Calls> calls_;
  uint64_t model_ = 0;
};

// A memfd that may be registered.
absl::StatusOr<internal::Descriptor> SealedMemory(uint64_t bytes);

}  // namespace ashlar::neighbours
