// SPDX-License-Identifier: Apache-2.0
// Probes: how much of a prompt nodes have cached, and which would have its first token first (HYPIC §5).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "ashlar/v1/prompt.pb.h"
#include "proto/key.h"
#include "storage/ids.h"

namespace ashlar::v1 {
class ProbeReply;
}

namespace ashlar::daemon {

class PrefillElsewhere;

// The model of a probe, as in v1::ProbeRequest, by one of its layouts.
struct ProbedModel {
  std::string ns;  // bytes; may be a prefix, or empty
  std::string model_id;
};

class PromptProber {
 public:
  struct Here {
    NamespaceId ns;
    v1::NodeProbe node;  // without a name
  };
  virtual ~PromptProber() = default;

  // Estimates what this node would save. Any thread; hashes the prompt on it. `done` is called once, on any thread.
  // NOT_FOUND: no engine has opened the model. INVALID_ARGUMENT names the field.
  virtual void ProbeHere(storage::TenantId tenant, const ProbedModel& model, std::shared_ptr<const v1::Prompt> prompt,
                         std::function<void(absl::StatusOr<Here>)> done) = 0;
};

// Combines the estimates of this node and of the other nodes of the cluster. Any thread, after Attach.
class ClusterProber {
 public:
  explicit ClusterProber(std::string node) : node_(std::move(node)) {}
  // Call each once, before the loop runs. All must outlive the object. Without PrefillElsewhere, only this node is
  // probed.
  void Attach(PromptProber* here) { here_ = here; }
  void Attach(PrefillElsewhere* elsewhere) { elsewhere_ = elsewhere; }
  void Stop() { stopped_ = true; }  // other nodes are not asked any more

  // Estimates how much of a prompt this node has cached, and with `cluster` other nodes that answer soon. No plan, no
  // lease, no other effect. Errors as of PromptProber::ProbeHere.
  void Probe(storage::TenantId tenant, const ProbedModel& model, std::shared_ptr<const v1::Prompt> prompt, bool cluster,
             std::function<void(absl::StatusOr<v1::ProbeReply>)> done);
  PromptProber* here() const { return here_; }  // null in tests without engines

 private:
  const std::string node_;  // this node's name
  PromptProber* here_ = nullptr;
  PrefillElsewhere* elsewhere_ = nullptr;
  bool stopped_ = false;
};

// Returns the index of the node that is expected to have the first token first: the time until it is free, to load what
// it has, and to compute the rest. Nodes of unknown rates count as the fastest known. Nodes that drain, or have no
// engine, are chosen only if all are so.
uint32_t CheapestOf(const v1::ProbeReply& reply);

}  // namespace ashlar::daemon
