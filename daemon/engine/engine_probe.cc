// SPDX-License-Identifier: Apache-2.0
// Probe: estimates for routers.
#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ashlar/v1/cache.pb.h"
#include "daemon/engine/engine_service.h"
#include "daemon/engine/request_fields.h"
#include "proto/invalid.h"
#include "proto/limits.h"
#include "storage/lookup/prober.h"

namespace ashlar::daemon {
namespace {

constexpr size_t kMinNamespaceBytes = 2;
constexpr size_t kListedNamespaces = 8;  // in an error

std::string Hex(const NamespaceId& ns) {
  return absl::BytesToHexString({reinterpret_cast<const char*>(ns.bytes.data()), ns.bytes.size()});
}

// Returns whether two layouts are of one model with the same weights. Their dtypes may differ, because engines also
// encode the format of their caches in the dtype.
bool SameModel(const Identity& a, const Identity& b) {
  const auto fields = [](const Identity& identity) {
    return std::tie(identity.model_id, identity.weights_digest, identity.quantization, identity.tokenizer_digest,
                    identity.lora);
  };
  return fields(a) == fields(b);
}

absl::Status RefuseSeveral(const std::vector<std::shared_ptr<const Model>>& found) {
  std::vector<std::string> names;
  for (const std::shared_ptr<const Model>& model : found) {
    if (names.size() < kListedNamespaces) names.push_back(Hex(model->ns));
  }
  return Invalid("ns: ", found.size(), " open models match; expected one of ", absl::StrJoin(names, ", "));
}

}  // namespace

// A model that no session has open any more is not found, even if it is remembered for operators. Without `ns`,
// adapters are left out, because their base model has the same model_id. Layouts are told apart by what engines declare
// (PrefixUse), not by their seams: a convolution needs a head in every layout, and segments may have none.
absl::StatusOr<EngineService::Opened> EngineService::FindOpened(storage::TenantId tenant, const ProbedModel& name,
                                                                bool segmented) const {
  using Models = std::vector<std::shared_ptr<const Model>>;
  const size_t bytes = name.ns.size();
  if (bytes > NamespaceId{}.bytes.size() || (bytes > 0 && bytes < kMinNamespaceBytes)) {
    return Invalid("ns: wrong length; expected ", kMinNamespaceBytes, " to ", NamespaceId{}.bytes.size(), " bytes");
  }
  const std::vector<SessionTable::Listed> sessions = table_.List();
  const auto sessions_of = [&](const Model& model) {
    const auto open = std::ranges::count_if(sessions, [&](const SessionTable::Listed& listed) {
      return !listed.draining && listed.session->about().tenant == tenant && listed.session->HasOpened(model.ns);
    });
    return static_cast<uint32_t>(open);
  };
  const auto is_named = [&](const Model& model) {
    const bool id = name.model_id.empty() || model.identity.model_id == name.model_id;
    return id && (bytes > 0 || model.identity.lora.empty());
  };
  Models found = models_.List(tenant, name.ns);
  std::erase_if(found, [&](const auto& model) { return !is_named(*model) || sessions_of(*model) == 0; });
  const auto has_prefixes = [](const auto& model) { return model->prefixes != nullptr; };
  if (std::ranges::any_of(found, has_prefixes)) std::erase_if(found, std::not_fn(has_prefixes));
  if (found.empty()) {
    return absl::NotFoundError(absl::StrCat(name.model_id.empty() ? "ns" : "model_id",
                                            ": no engine of this tenant has opened such a model on this node"));
  }
  if (found.size() > 1) return RefuseSeveral(found);
  const std::shared_ptr<const Model>& model = found.front();
  Opened opened{.model = model, .of_segments = model, .sessions = sessions_of(*model)};
  if (!segmented || model->prefixes == nullptr) return opened;
  Models separate = models_.List(tenant);
  std::erase_if(separate, [&](const auto& other) {
    return has_prefixes(other) || !SameModel(other->identity, model->identity) || sessions_of(*other) == 0;
  });
  if (separate.size() > 1) return RefuseSeveral(separate);
  if (!separate.empty()) opened.of_segments = separate.front();
  return opened;
}

void EngineService::ProbeHere(storage::TenantId tenant, const ProbedModel& name,
                              std::shared_ptr<const v1::Prompt> prompt,
                              std::function<void(absl::StatusOr<Here>)> done) {
  const absl::StatusOr<Opened> opened = FindOpened(tenant, name, prompt->segment_lengths_size() > 0);
  if (!opened.ok()) return done(opened.status());
  const Model& model = *opened->model;
  const Model& of_segments = *opened->of_segments;
  if (const uint64_t lookups = CountLookups(*prompt, model, of_segments); lookups > limits::kMaxLookupsPerMatch) {
    return done(Invalid("prompt: ", lookups, " shards of segments; expected at most ", limits::kMaxLookupsPerMatch));
  }
  auto asked = ReadPrompt("prompt", *prompt, model, of_segments);
  if (!asked.ok()) return done(asked.status());
  if (!sessions_.rates().Take(tenant, 1)) {
    return done(absl::ResourceExhaustedError(
        absl::StrCat("calls_per_second: the tenant exceeded its limit of ", sessions_.rates().limit(tenant))));
  }
  struct Call {
    Opened opened;
    ParsedPrompt asked;
    std::unique_ptr<storage::Prober> prober;
  };
  const auto call = std::make_shared<Call>(Call{.opened = *opened, .asked = *std::move(asked), .prober = nullptr});
  const auto probe = [this, tenant, call, done](storage::Slice& slice) {
    const Model& of = *call->opened.model;
    const ParsedPrompt& about = call->asked;
    if (call->prober == nullptr) {
      const Layout& seams = call->opened.of_segments->layout;
      call->prober = cache_.StartProbe(tenant, about.segments, about.text.has_value() ? &*about.text : nullptr,
                                       seams.head, seams.tail);
    }
    if (!call->prober->Run(slice)) return false;
    const storage::Probed& found = call->prober->result();
    const PrefillBacklog::Load load = router_.backlog().Of(tenant, of.ns);
    Here here{.ns = of.ns, .node = {}};
    v1::NodeProbe& node = here.node;
    node.set_prompt_tokens(about.tokens);
    node.set_prefix_tokens(found.prefix_tokens);
    node.set_segment_tokens(found.segment_tokens);
    for (size_t tier = 0; tier < found.tokens.size(); ++tier) {
      if (found.tokens[tier] == 0) continue;
      v1::TierTokens* of_tier = node.add_tiers();
      of_tier->set_tier(static_cast<uint32_t>(tier));
      of_tier->set_tokens(found.tokens[tier]);
    }
    node.set_fetch_ns(found.fetch);
    const uint64_t saved = std::min(about.tokens, found.prefix_tokens + found.segment_tokens);
    node.set_compute_ns(about.tokens == saved ? 0 : RecomputeTime(of, about.tokens - saved));
    node.set_wait_ns(of.tokens_per_second > 0 ? load.wait : 0);
    node.set_queued_tokens(load.tokens);
    node.set_tokens_per_second(of.tokens_per_second);
    node.set_sessions(call->opened.sessions);
    node.set_landings(static_cast<uint32_t>(cache_.stats().landings));
    node.set_draining(cache_.offers().draining());
    done(std::move(here));
    return true;
  };
  if (!loop_.Post(tenant, probe)) {
    done(absl::ResourceExhaustedError("the daemon's metadata queue is full; try again"));
  }
}

void EngineService::Probe(const v1::ProbeRequest& request, v1::ProbeReply* reply, Done done) {
  const auto session = sessions_.Resolve(request.session());
  if (!session.ok()) return done(session.status());
  router_.probes().Probe((*session)->about().tenant, {.ns = request.ns(), .model_id = request.model_id()},
                         std::make_shared<const v1::Prompt>(request.prompt()), request.cluster(),
                         [reply, done](absl::StatusOr<v1::ProbeReply> probed) {
                           if (!probed.ok()) return done(probed.status());
                           *reply = *std::move(probed);
                           done(absl::OkStatus());
                         });
}

}  // namespace ashlar::daemon
