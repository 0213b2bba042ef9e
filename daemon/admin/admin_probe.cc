// SPDX-License-Identifier: Apache-2.0
// Probe: how much of a prompt nodes have cached, for an operator.
#include <future>
#include <memory>
#include <utility>

#include "ashlar/v1/admin.pb.h"
#include "ashlar/v1/cache.pb.h"
#include "daemon/admin/admin_service.h"

namespace ashlar::daemon {

absl::Status AdminService::Probe(const v1::AdminProbeRequest& request, v1::ProbeReply* reply) const {
  const auto tenant = FindTenant(request.tenant());
  if (!tenant.ok()) return tenant.status();
  // The reply comes soon: other nodes have 100 ms.
  const auto probed = std::make_shared<std::promise<absl::StatusOr<v1::ProbeReply>>>();
  parts_.router.probes().Probe(
      *tenant, {.ns = request.ns(), .model_id = request.model_id()},
      std::make_shared<const v1::Prompt>(request.prompt()), request.cluster(),
      [probed](absl::StatusOr<v1::ProbeReply> answer) { probed->set_value(std::move(answer)); });
  absl::StatusOr<v1::ProbeReply> answer = probed->get_future().get();
  if (!answer.ok()) return answer.status();
  *reply = *std::move(answer);
  return absl::OkStatus();
}

}  // namespace ashlar::daemon
