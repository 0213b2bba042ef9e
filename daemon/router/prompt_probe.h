// SPDX-License-Identifier: Apache-2.0
// Probes of prompts: what nodes would save of a prompt, and which would have its first token first (HYPIC §5).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ashlar/v1/prompt.pb.h"
#include "proto/key.h"
#include "storage/ids.h"

namespace ashlar::v1 {
class ProbeReply;
}

namespace ashlar::daemon {

// The model of a probe, as in v1::ProbeRequest.
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

// Returns the index of the node that is expected to have the first token first: the time until it is free, to load what
// it has, and to compute the rest. Nodes of unknown rates count as the fastest known. Nodes that drain, or have no
// engine, are chosen only if all are so.
uint32_t CheapestOf(const v1::ProbeReply& reply);

}  // namespace ashlar::daemon
