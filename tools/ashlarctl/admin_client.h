// SPDX-License-Identifier: Apache-2.0
// The calls of ashlar.v1.Admin, over the daemon's admin socket.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "ashlar/v1/admin.pb.h"
#include "proto/admin_calls.h"

namespace ashlar::ctl {

class AdminClient {
 public:
  // Connects with the first call.
  explicit AdminClient(const std::string& socket);
  ~AdminClient();

  const std::string& socket() const;  // path of the socket

  // The daemon's answer, or its status. If no daemon answers, the message names the socket and the reason.
#define ASHLAR_CALL(name, request, reply) absl::Status name(const v1::request&, v1::reply*);
  ASHLAR_ADMIN_CALLS(ASHLAR_CALL)
#undef ASHLAR_CALL

 private:
  struct Rpc;
  const std::unique_ptr<Rpc> rpc_;
};

}  // namespace ashlar::ctl
