// SPDX-License-Identifier: Apache-2.0
// Prober and Probed: how much of a prompt nodes have cached.
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ashlar/router.h"
#include "client/engine/boundary.h"
#include "client/engine/status.h"
#include "client/session/client.h"
#include "proto/hex.h"
#include "proto/limits.h"

namespace ashlar::engine {

struct ProbedState {
  std::vector<ashlar::NodeProbe> found;
  std::vector<NodeProbe> nodes;  // points into `found`
  uint32_t cheapest = 0;
};

struct ProberState {
  std::unique_ptr<Client> client;
  internal::CreatorProcess creator;
};

namespace {

double Seconds(std::chrono::nanoseconds time) {
  return std::chrono::duration<double>(time).count();
}

Status ReadNamespace(const char* hex, std::string& bytes) {
  const absl::string_view digits = hex == nullptr ? "" : hex;
  const bool good =
      digits.size() % 2 == 0 && digits.find_first_not_of("0123456789abcdefABCDEF") == absl::string_view::npos;
  if (!good) return Invalid("ns: expected an even number of hexadecimal digits");
  bytes = BytesOfHex(digits);
  return {};
}

// The fields of a prompt that a probe reads. `media` keeps what the result points to.
Status ReadPrompt(const Prompt& prompt, std::vector<MediaHash>& media, ashlar::Prompt& read) {
  if (prompt.tokens == nullptr && prompt.token_count > 0) return Invalid("prompt.tokens: null");
  if (prompt.segment_lengths == nullptr && prompt.segment_count > 0) return Invalid("prompt.segment_lengths: null");
  if (prompt.media == nullptr && prompt.media_count > 0) return Invalid("prompt.media: null");
  if (prompt.salt == nullptr && prompt.salt_bytes > 0) return Invalid("prompt.salt: null");
  if (prompt.salt_bytes > limits::kMaxSaltBytes)
    return Invalid("prompt.salt: too long; expected at most ", limits::kMaxSaltBytes, " bytes");
  for (uint64_t i = 0; i < prompt.media_count; ++i) {
    MediaHash hash{.offset = prompt.media[i].offset};
    std::ranges::copy(prompt.media[i].hash, hash.hash.begin());
    media.push_back(hash);
  }
  read.tokens = {prompt.tokens, prompt.token_count};
  read.segment_lengths = {prompt.segment_lengths, prompt.segment_count};
  read.media = media;
  read.salt = MakeSalt({static_cast<const char*>(prompt.salt), prompt.salt_bytes});
  std::ranges::copy(prompt.conversation, read.conversation.begin());
  return {};
}

}  // namespace

Probed::Probed(Probed&& other) noexcept : impl_(std::exchange(other.impl_, nullptr)) {}
Probed& Probed::operator=(Probed&& other) noexcept {
  std::swap(impl_, other.impl_);
  return *this;
}
Probed::~Probed() {
  delete impl_;
}
const NodeProbe* Probed::nodes(uint32_t* count) const noexcept {
  if (count != nullptr) *count = impl_ == nullptr ? 0 : static_cast<uint32_t>(impl_->nodes.size());
  return impl_ == nullptr ? nullptr : impl_->nodes.data();
}
uint32_t Probed::cheapest() const noexcept {
  return impl_ == nullptr ? 0 : impl_->cheapest;
}

Prober::Prober(Prober&& other) noexcept : impl_(std::exchange(other.impl_, nullptr)) {}
Prober& Prober::operator=(Prober&& other) noexcept {
  std::swap(impl_, other.impl_);
  return *this;
}
Prober::~Prober() {
  if (impl_ != nullptr && !impl_->creator.InChild()) delete impl_;
}

Status Prober::Open(const ProberOptions& options, Prober* out) noexcept {
  return Guarded([&]() -> Status {
    if (out == nullptr) return Invalid("out: null");
    if (options.rpc_socket == nullptr) return Invalid("rpc_socket: null");
    if (options.session_socket == nullptr) return Invalid("session_socket: null");
    auto client = Client::Connect({.rpc_socket = options.rpc_socket,
                                   .session_socket = options.session_socket,
                                   .timeout = std::chrono::milliseconds(options.timeout_ms),
                                   .name = options.name == nullptr ? "router" : options.name});
    if (!client.ok()) return ToStatus(client.status());
    Prober made;
    made.impl_ = new ProberState{.client = *std::move(client), .creator = {}};
    *out = std::move(made);
    return {};
  });
}

bool Prober::connected() const noexcept {
  return impl_ != nullptr && !impl_->creator.InChild() && impl_->client->connected();
}

Status Prober::Probe(const ProbeModel& model, const Prompt& prompt, bool cluster, Probed* out) noexcept {
  return Guarded([&]() -> Status {
    if (impl_ == nullptr) return MakeStatus(Code::kFailedPrecondition, "the prober is not open");
    if (Status status = CheckProcess(impl_->creator); !status.ok()) return status;
    if (out == nullptr) return Invalid("out: null");
    ProbedModel probed_model{.ns = "", .model_id = model.model_id == nullptr ? "" : model.model_id};
    if (Status status = ReadNamespace(model.ns, probed_model.ns); !status.ok()) return status;
    std::vector<MediaHash> media;
    ashlar::Prompt read;
    if (Status status = ReadPrompt(prompt, media, read); !status.ok()) return status;
    auto state = std::make_unique<ProbedState>();
    auto found = impl_->client->Probe(probed_model, read, cluster, &state->cheapest);
    if (absl::IsNotFound(found.status())) return MakeStatus(Code::kFailedPrecondition, found.status().message());
    if (!found.ok()) return ToStatus(found.status());
    state->found = *std::move(found);
    for (const ashlar::NodeProbe& node : state->found) {
      NodeProbe out_node{.node = node.node.c_str(),
                         .prompt_tokens = node.prompt_tokens,
                         .prefix_tokens = node.prefix_tokens,
                         .segment_tokens = node.segment_tokens,
                         .fetch_seconds = Seconds(node.fetch),
                         .compute_seconds = Seconds(node.compute),
                         .wait_seconds = Seconds(node.wait),
                         .queued_tokens = node.queued_tokens,
                         .tokens_per_second = node.tokens_per_second,
                         .sessions = node.sessions,
                         .landings = node.landings,
                         .draining = node.draining};
      static_assert(ashlar::NodeProbe::kTiers == std::size(NodeProbe{}.tier_tokens));
      std::ranges::copy(node.tier_tokens, out_node.tier_tokens);
      state->nodes.push_back(out_node);
    }
    Probed made;
    made.impl_ = state.release();
    *out = std::move(made);
    return {};
  });
}

}  // namespace ashlar::engine
