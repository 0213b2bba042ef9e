// SPDX-License-Identifier: Apache-2.0
#include "daemon/router/prompt_probe.h"

#include <algorithm>
#include <utility>

#include "ashlar/v1/cache.pb.h"
#include "daemon/router/elsewhere.h"
#include "daemon/router/lpt.h"

namespace ashlar::daemon {

uint32_t CheapestOf(const v1::ProbeReply& reply) {
  double known = 0;
  for (const v1::NodeProbe& node : reply.nodes()) known = std::max(known, node.tokens_per_second());
  if (known <= 0) known = kUnknownRate;
  uint32_t best = 0;
  bool usable = false;
  storage::Nanos least = 0;
  for (int i = 0; i < reply.nodes_size(); ++i) {
    const v1::NodeProbe& node = reply.nodes(i);
    if (node.draining() || node.sessions() == 0) continue;
    const bool measured = node.tokens_per_second() > 0;
    const double rate = measured ? node.tokens_per_second() : known;
    const uint64_t saved = node.prefix_tokens() + node.segment_tokens();
    const uint64_t computed = std::max<uint64_t>(1, node.prompt_tokens() - std::min(saved, node.prompt_tokens()));
    const storage::Nanos wait = measured ? node.wait_ns() : ComputeTime(node.queued_tokens(), rate);
    const storage::Nanos ends = std::min<storage::Nanos>(wait, kLongestCompute) +
                                std::min<storage::Nanos>(node.fetch_ns(), kLongestCompute) +
                                ComputeTime(computed, rate);
    if (usable && ends >= least) continue;
    usable = true;
    least = ends;
    best = static_cast<uint32_t>(i);
  }
  return best;
}

void ClusterProber::Probe(storage::TenantId tenant, const ProbedModel& model, std::shared_ptr<const v1::Prompt> prompt,
                          bool cluster, std::function<void(absl::StatusOr<v1::ProbeReply>)> done) {
  if (here_ == nullptr) return done(absl::UnavailableError("the daemon is starting"));
  here_->ProbeHere(tenant, model, prompt, [=, this](absl::StatusOr<PromptProber::Here> here) {
    if (!here.ok()) return done(here.status());
    v1::ProbeReply reply;
    *reply.add_nodes() = std::move(here->node);
    reply.mutable_nodes(0)->set_node(node_);
    reply.set_ns(here->ns.bytes.data(), here->ns.bytes.size());
    if (!cluster || elsewhere_ == nullptr || stopped_) return done(std::move(reply));
    elsewhere_->Probe(tenant, here->ns, prompt, [reply, done](std::vector<v1::NodeProbe> nodes) mutable {
      for (v1::NodeProbe& node : nodes) *reply.add_nodes() = std::move(node);
      reply.set_cheapest(CheapestOf(reply));
      done(std::move(reply));
    });
  });
}

}  // namespace ashlar::daemon
