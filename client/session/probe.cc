// SPDX-License-Identifier: Apache-2.0
// Client::Probe: estimates for routers.
#include "ashlar/v1/cache.pb.h"
#include "client/session/client.h"
#include "client/session/prompt_message.h"
#include "client/session/rpc.h"

namespace ashlar {

absl::StatusOr<std::vector<NodeProbe>> Client::Probe(const ProbedModel& model, const Prompt& prompt, bool cluster,
                                                     uint32_t* cheapest) {
  if (absl::Status status = reconnector_->CheckProcess(); !status.ok()) return status;
  const absl::StatusOr<std::shared_ptr<internal::Connection>> connection = reconnector_->connection();
  if (!connection.ok()) return connection.status();
  if (absl::Status fits = internal::CheckMessage(prompt, (*connection)->protocol()); !fits.ok()) return fits;
  v1::ProbeRequest request;
  request.set_session((*connection)->session());
  request.set_ns(model.ns);
  request.set_model_id(model.model_id);
  request.set_cluster(cluster);
  internal::Describe(prompt, /*uses_prefixes=*/true, *request.mutable_prompt());
  v1::ProbeReply reply;
  const absl::Status status = (*connection)->rpc().Probe(request, reply, reconnector_->CallDeadline());
  // A session of another run of the daemon: the reconnector makes another one.
  if (absl::IsUnauthenticated(status)) return absl::UnavailableError("the daemon has restarted; try again");
  if (!status.ok()) return status;
  std::vector<NodeProbe> nodes;
  for (const v1::NodeProbe& node : reply.nodes()) {
    nodes.push_back({.node = node.node(),
                     .prompt_tokens = node.prompt_tokens(),
                     .prefix_tokens = node.prefix_tokens(),
                     .segment_tokens = node.segment_tokens(),
                     .fetch = std::chrono::nanoseconds(node.fetch_ns()),
                     .compute = std::chrono::nanoseconds(node.compute_ns()),
                     .wait = std::chrono::nanoseconds(node.wait_ns()),
                     .queued_tokens = node.queued_tokens(),
                     .tokens_per_second = node.tokens_per_second(),
                     .sessions = node.sessions(),
                     .landings = node.landings(),
                     .draining = node.draining()});
    for (const v1::TierTokens& tier : node.tiers()) {
      if (tier.tier() < NodeProbe::kTiers) nodes.back().tier_tokens[tier.tier()] += tier.tokens();
    }
  }
  if (nodes.empty() || reply.cheapest() >= nodes.size()) {
    return absl::InternalError("nodes: the daemon's reply is invalid");
  }
  *cheapest = reply.cheapest();
  return nodes;
}

}  // namespace ashlar
