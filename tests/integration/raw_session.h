// SPDX-License-Identifier: Apache-2.0
// The session socket and the service as a hostile engine would use them: any bytes, any fields.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "client/session/client.h"

namespace ashlar::v1 {
class SessionReply;
class SessionRequest;
}  // namespace ashlar::v1

namespace ashlar::integration {

class RawSession {
 public:
  explicit RawSession(const ClientOptions& daemon);
  ~RawSession();
  RawSession(const RawSession&) = delete;
  RawSession& operator=(const RawSession&) = delete;

  bool connected() const { return fd_ >= 0; }
  // Sends one datagram with descriptors; false when the daemon has hung up.
  bool Send(const std::string& bytes, const std::vector<int>& descriptors = {});
  bool Send(const v1::SessionRequest& request, const std::vector<int>& descriptors = {});
  // The daemon's answer; one with code UNAVAILABLE when it hung up instead. Descriptors are counted and closed.
  v1::SessionReply Receive(size_t* descriptors = nullptr);
  v1::SessionReply Ask(const v1::SessionRequest& request, const std::vector<int>& descriptors = {});
  // Sends a valid Hello. Returns the secret that names the session.
  std::string Greet();

 private:
  int fd_ = -1;
};

}  // namespace ashlar::integration
