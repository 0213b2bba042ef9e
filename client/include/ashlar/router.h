// SPDX-License-Identifier: Apache-2.0
// The router API: how much of a prompt each node has cached, for programs that choose an engine for it
// (docs/router.md).
//
// It follows the rules of ashlar/engine.h for errors, ownership and forks.
#pragma once

#include <cstdint>

#include "ashlar/engine.h"

namespace ashlar::engine {

struct ProberState;
struct ProbedState;

struct ProberOptions {
  const char* rpc_socket = nullptr;
  const char* session_socket = nullptr;
  const char* name = nullptr;  // shown in the daemon's logs
  uint32_t timeout_ms = 1000;  // limit of one call to the daemon
};

// A model that engines of the caller's tenant have open on the node. Null or empty strings leave it open; then exactly
// one open model must match. Adapters (Model::lora) are only found by `ns`.
//
// An engine may open a model twice, as vLLM's connector does: with OpenOptions::capture_tokens for prefixes, and
// without it for segments. If the identities differ at most in Model::dtype, the two layouts count as one model: the
// probe looks up a prompt's prefix in the first layout, and its segments in the second. To probe only the second
// layout, pass its `ns`. With tensor parallelism, each rank of vLLM has its own layout for segments; only that of rank
// 0 has the model_id, so rank 0 is probed.
struct ProbeModel {
  const char* ns = nullptr;        // its namespace, or at least 4 first digits of it, in hexadecimal
  const char* model_id = nullptr;  // Model::model_id; vLLM's connector sets the model's name
};

// How much of a prompt one node has cached, and how busy it is. Estimates, from measured rates. Seconds are 0 if they
// are not known.
struct NodeProbe {
  const char* node = nullptr;  // name in the cluster; empty without one. Valid as long as the Probed
  uint64_t prompt_tokens = 0;
  uint64_t prefix_tokens = 0;    // tokens of the exact prefix that Begin would resume from
  uint64_t segment_tokens = 0;   // tokens of cached segments after it, without the seams that are computed
  uint64_t tier_tokens[8] = {};  // the same tokens by tier (TierName)
  double fetch_seconds = 0;      // time to load and land these tokens
  double compute_seconds = 0;    // time to compute the other tokens
  double wait_seconds = 0;       // time until an engine of the node has computed the prompts that it has looked up
  uint64_t queued_tokens = 0;    // tokens of the looked-up prompts of all engines of the model
  double tokens_per_second = 0;  // declared rate of prefill
  uint32_t sessions = 0;         // sessions of engine processes with this model; 0: the node has no engine
  uint32_t landings = 0;         // landings in flight, of all tenants
  bool draining = false;         // the node accepts no lookups
};

// The result of a probe.
class Probed {
 public:
  Probed() = default;
  Probed(Probed&&) noexcept;
  Probed& operator=(Probed&&) noexcept;
  ~Probed();

  const NodeProbe* nodes(uint32_t* count) const noexcept;  // the asked node is the first; `count` may be null
  uint32_t cheapest() const noexcept;  // index of the node where the prompt's first token is expected first

 private:
  friend class Prober;
  ProbedState* impl_ = nullptr;
};

// A session of a router with a daemon: no model, no memory. Thread-safe. It reconnects like a Cache.
class Prober {
 public:
  Prober() = default;
  Prober(Prober&&) noexcept;
  Prober& operator=(Prober&&) noexcept;
  ~Prober();

  static Status Open(const ProberOptions& options, Prober* out) noexcept;
  bool connected() const noexcept;
  // Estimates how much of a prompt the node has cached; with `cluster` also the other nodes of the cluster that have
  // engines of the model and answer within 100 ms. Takes no lease, counts as no use or miss, and changes no policy. Of
  // `prompt` only tokens, segments, media, salt and conversation are read, during the call. kFailedPrecondition: no
  // engine of the tenant has opened the model on the node. kUnavailable: no daemon, or it is late.
  Status Probe(const ProbeModel& model, const Prompt& prompt, bool cluster, Probed* out) noexcept;

 private:
  ProberState* impl_ = nullptr;
};

}  // namespace ashlar::engine
