// The calls of ashlar.v1.Admin, over the daemon's admin socket.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "ashlar/v1/admin.pb.h"

namespace ashlar::ctl {

class AdminClient {
 public:
  // Connects with the first call.
  explicit AdminClient(const std::string& socket);
  ~AdminClient();

  // The daemon's answer, or its status as it came. UNAVAILABLE names the socket.
  absl::Status Explain(const v1::Texts& request, v1::ExplainReply* reply);
  absl::Status LastMisses(const v1::LastMissesRequest& request, v1::LastMissesReply* reply);
  absl::Status Models(const v1::ModelsRequest& request, v1::ModelsReply* reply);
  absl::Status Stats(const v1::StatsRequest& request, v1::StatsReply* reply);
  absl::Status Sessions(const v1::SessionsRequest& request, v1::SessionsReply* reply);
  absl::Status GetConfig(const v1::GetConfigRequest& request, v1::GetConfigReply* reply);
  absl::Status Drain(const v1::DrainRequest& request, v1::DrainReply* reply);
  absl::Status Undrain(const v1::UndrainRequest& request, v1::DrainReply* reply);
  absl::Status GetDrain(const v1::GetDrainRequest& request, v1::DrainReply* reply);
  absl::Status Pin(const v1::PinRequest& request, v1::ObjectsReply* reply);
  absl::Status Unpin(const v1::Texts& request, v1::ObjectsReply* reply);
  absl::Status Evict(const v1::Texts& request, v1::ObjectsReply* reply);

 private:
  struct Rpc;
  const std::unique_ptr<Rpc> rpc_;
};

}  // namespace ashlar::ctl
