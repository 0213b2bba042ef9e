// SPDX-License-Identifier: Apache-2.0
// ashlarctl probe: how much of a prompt nodes have cached.
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "proto/invalid.h"
#include "proto/key.h"
#include "proto/outcome.h"
#include "tools/ashlarctl/command.h"
#include "tools/ashlarctl/format.h"
#include "tools/ashlarctl/texts.h"
#include "tools/ashlarctl/token_file.h"

namespace ashlar::ctl {
namespace {

using nlohmann::json;

double Seconds(int64_t nanos) {
  return static_cast<double>(nanos) * 1e-9;
}

json JsonOf(const v1::NodeProbe& node) {
  json tiers = json::array();
  for (const v1::TierTokens& tier : node.tiers()) {
    tiers.push_back({{"tier", std::string(Name(static_cast<TierKind>(tier.tier())))}, {"tokens", tier.tokens()}});
  }
  return {{"node", node.node()},
          {"prompt_tokens", node.prompt_tokens()},
          {"prefix_tokens", node.prefix_tokens()},
          {"segment_tokens", node.segment_tokens()},
          {"tiers", std::move(tiers)},
          {"fetch_seconds", Seconds(node.fetch_ns())},
          {"compute_seconds", Seconds(node.compute_ns())},
          {"wait_seconds", Seconds(node.wait_ns())},
          {"queued_tokens", node.queued_tokens()},
          {"tokens_per_second", node.tokens_per_second()},
          {"sessions", node.sessions()},
          {"landings", node.landings()},
          {"draining", node.draining()}};
}

std::string TextOf(const v1::NodeProbe& node, bool cheapest) {
  std::string tiers;
  for (const v1::TierTokens& tier : node.tiers()) {
    absl::StrAppend(&tiers, tiers.empty() ? "; " : ", ", Name(static_cast<TierKind>(tier.tier())), " ", tier.tokens());
  }
  return absl::StrCat(node.node().empty() ? "this node" : Printable(node.node()), ": saves ",
                      node.prefix_tokens() + node.segment_tokens(), " of ", node.prompt_tokens(), " tokens (prefix ",
                      node.prefix_tokens(), ", segments ", node.segment_tokens(), tiers, "), fetch ",
                      Duration(Seconds(node.fetch_ns())), ", compute ",
                      node.tokens_per_second() > 0 ? Duration(Seconds(node.compute_ns())) : "unknown", ", wait ",
                      Duration(Seconds(node.wait_ns())), "; ", node.sessions(), " sessions, ", node.queued_tokens(),
                      " tokens queued, ", node.landings(), " landings", node.draining() ? ", draining" : "",
                      cheapest ? "; cheapest" : "", "\n");
}

}  // namespace

absl::StatusOr<Answer> Probe(const Arguments& arguments, AdminClient& client) {
  if (!arguments.Has("tenant")) return Invalid("--tenant: required");
  if (arguments.files.empty()) return Invalid("TOKENS-FILE: at least one is required");
  v1::AdminProbeRequest request;
  request.set_tenant(arguments.Get("tenant"));
  request.set_model_id(arguments.Get("model-id"));
  request.set_cluster(arguments.Has("cluster"));
  for (size_t i = 0; i < arguments.files.size(); ++i) {
    const absl::StatusOr<std::string> tokens = ReadTokenFile(arguments.files[i], arguments.Has("binary"));
    if (!tokens.ok()) return tokens.status();
    if (tokens->empty()) return Invalid(arguments.files[i], ": the file has no tokens");
    request.mutable_prompt()->mutable_tokens()->append(*tokens);
    if (arguments.Has("segments") && i + 1 < arguments.files.size()) {
      request.mutable_prompt()->add_segment_lengths(tokens->size() / sizeof(int32_t));
    }
  }
  request.mutable_prompt()->set_salt(PackSalt(MakeSalt(arguments.Get("salt"))));
  absl::StatusOr<std::string> ns = NamespaceBytes(arguments, client);
  if (!ns.ok()) return ns.status();
  request.set_ns(*std::move(ns));
  v1::ProbeReply reply;
  if (absl::Status status = client.Probe(request, &reply); !status.ok()) return status;
  Answer answer{.json = {{"namespace", Hex(reply.ns())}, {"cheapest", reply.cheapest()}, {"nodes", json::array()}}};
  for (int i = 0; i < reply.nodes_size(); ++i) {
    answer.json["nodes"].push_back(JsonOf(reply.nodes(i)));
    const bool cheapest = reply.nodes_size() > 1 && reply.cheapest() == static_cast<uint32_t>(i);
    answer.text += TextOf(reply.nodes(i), cheapest);
  }
  return answer;
}

}  // namespace ashlar::ctl
