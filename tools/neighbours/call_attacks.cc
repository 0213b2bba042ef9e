// SPDX-License-Identifier: Apache-2.0
// Attacks by calls: on the metadata thread, on the workers that land, and on the daemon's memory for pending calls.
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "ashlar/v1/cache.pb.h"
#include "client/session/prompt_message.h"
#include "proto/limits.h"
#include "tools/neighbours/attack.h"
#include "tools/neighbours/call_load.h"
#include "tools/neighbours/raw_engine.h"

namespace ashlar::neighbours {
namespace {

Achieved ToAchieved(size_t sessions, LoadResult result) {
  return {.sessions = sessions,
          .asked = result.calls,
          .granted = result.granted,
          .refused = result.refused,
          .most_at_a_time = result.most_at_a_time,
          .why = std::move(result.error)};
}

absl::Status Publish(const ClientOptions& daemon, uint64_t bytes) {
  absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(daemon);
  return client.ok() ? SegmentEngine::Open(**client, bytes).status() : client.status();
}

absl::Status OpenEngines(const ClientOptions& daemon, size_t count, std::vector<RawEngine>& engines) {
  for (size_t i = 0; i < count; ++i) {
    absl::StatusOr<RawEngine> engine = RawEngine::Open(daemon);
    if (!engine.ok()) return engine.status();
    engines.push_back(*std::move(engine));
  }
  return absl::OkStatus();
}

// Matches of the longest kind: 65,536 segments of one token that were never published.
class Lookups final : public Attack {
 public:
  explicit Lookups(const Target& target) : daemon_(target.daemon) {}

  absl::Status Prepare() override {
    if (absl::Status status = OpenEngines(daemon_, kSessions, engines_); !status.ok()) return status;
    for (const RawEngine& engine : engines_) {
      v1::MatchRequest request;
      request.set_session(engine.session().secret());
      request.set_model(engine.model());
      for (uint64_t left = limits::kMaxLookupsPerMatch; left > 0; left -= limits::kMaxSegments) {
        std::vector<int32_t> tokens(limits::kMaxSegments);
        for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(left + i);
        const std::vector<uint64_t> lengths(tokens.size(), 1);
        internal::Describe({.tokens = tokens, .segment_lengths = lengths}, /*uses_prefixes=*/false,
                           *request.add_prompts());
      }
      requests_.push_back(request.SerializeAsString());
    }
    return absl::OkStatus();
  }

  Achieved Run(const std::stop_token& stop) override {
    const CallLoad load{.rpc_socket = daemon_.rpc_socket,
                        .method = "Match",
                        .at_a_time = 64,
                        .connections = kSessions,
                        .request = [this](size_t slot) { return requests_[slot % kSessions]; },
                        .granted = [](size_t, const std::string& reply) -> uint64_t {
                          return reply.empty() ? 0 : limits::kMaxLookupsPerMatch;
                        }};
    return ToAchieved(kSessions, RunLoad(load, stop));
  }

 private:
  static constexpr size_t kSessions = 8;

  const ClientOptions daemon_;
  std::vector<RawEngine> engines_;
  std::vector<std::string> requests_;
};

// The same 16 MiB repeatedly, by many sessions that land them in the same memory.
class Landings final : public Attack {
 public:
  Landings(const Target& target, bool quick) : daemon_(target.daemon), at_a_time_(quick ? 330 : 1100) {}

  absl::Status Prepare() override {
    const SegmentPrompt prompt(kBytes);
    if (absl::Status status = Publish(daemon_, kBytes); !status.ok()) return status;
    if (absl::Status status = OpenEngines(daemon_, kSessions, engines_); !status.ok()) return status;
    absl::StatusOr<internal::Descriptor> memory = SealedMemory(kBytes);
    if (!memory.ok()) return memory.status();
    for (RawEngine& engine : engines_) {
      const absl::StatusOr<uint64_t> pages = engine.DeclarePages(memory->get(), prompt);
      if (!pages.ok()) return pages.status();
      const absl::StatusOr<RawEngine::Found> found = engine.Match(prompt);
      if (!found.ok()) return found.status();
      v1::LandRequest request;
      request.set_session(engine.session().secret());
      request.set_lease(found->lease);
      request.set_pages_id(*pages);
      for (const int32_t page : prompt.PageTable(0)) request.add_page_table(page);
      request.add_segments()->set_segment(1);
      request.mutable_segments(0)->set_first_position(prompt.position());
      requests_.push_back(std::move(request));
    }
    return absl::OkStatus();
  }

  Achieved Run(const std::stop_token& stop) override {
    const CallLoad load{.rpc_socket = daemon_.rpc_socket,
                        .method = "Land",
                        .at_a_time = at_a_time_,
                        .connections = kSessions,
                        .request =
                            [this](size_t slot) {
                              v1::LandRequest& request = requests_[slot % kSessions];
                              request.set_landing(++landing_);
                              return request.SerializeAsString();
                            },
                        .granted = [](size_t, const std::string& message) -> uint64_t {
                          v1::LandEvent event;
                          const bool landed = event.ParseFromString(message) &&
                                              event.verdict().miss_reasons_size() == 1 &&
                                              event.verdict().miss_reasons(0) == 0;
                          return landed ? kBytes >> 20 : 0;
                        }};
    return ToAchieved(kSessions, RunLoad(load, stop));
  }

 private:
  static constexpr size_t kSessions = 11;
  static constexpr uint64_t kBytes = 16u << 20;

  const ClientOptions daemon_;
  const size_t at_a_time_;
  std::vector<RawEngine> engines_;
  std::vector<v1::LandRequest> requests_;
  uint64_t landing_ = 0;
};

// Matches of 64 prompts each, all of the same segment, without releases.
class Leases final : public Attack {
 public:
  explicit Leases(const Target& target) : daemon_(target.daemon) {}

  absl::Status Prepare() override {
    const SegmentPrompt prompt(kPageBytes);
    if (absl::Status status = Publish(daemon_, kPageBytes); !status.ok()) return status;
    if (absl::Status status = OpenEngines(daemon_, kSessions, engines_); !status.ok()) return status;
    for (const RawEngine& engine : engines_) {
      v1::MatchRequest request;
      request.set_session(engine.session().secret());
      request.set_model(engine.model());
      for (uint64_t i = 0; i < limits::kMaxPromptsPerCall; ++i) {
        internal::Describe(prompt.prompt(), /*uses_prefixes=*/false, *request.add_prompts());
      }
      requests_.push_back(request.SerializeAsString());
    }
    return absl::OkStatus();
  }

  Achieved Run(const std::stop_token& stop) override {
    const CallLoad load{.rpc_socket = daemon_.rpc_socket,
                        .method = "Match",
                        .at_a_time = 4 * kSessions,
                        .connections = kSessions,
                        .request = [this](size_t slot) { return requests_[slot % kSessions]; },
                        .granted = [](size_t, const std::string& message) -> uint64_t {
                          v1::MatchReply reply;
                          uint64_t leases = 0;
                          if (!reply.ParseFromString(message)) return 0;
                          for (const v1::PromptMatch& match : reply.prompts()) leases += match.lease().empty() ? 0 : 1;
                          return leases;
                        }};
    return ToAchieved(kSessions, RunLoad(load, stop));
  }

 private:
  static constexpr size_t kSessions = 12;

  const ClientOptions daemon_;
  std::vector<RawEngine> engines_;
  std::vector<std::string> requests_;
};

// As many models as sessions may open, each with the largest tables that a layout may have, all different.
class Models final : public Attack {
 public:
  Models(const Target& target, bool quick) : daemon_(target.daemon), sessions_wanted_(quick ? 16 : 120) {}

  absl::Status Prepare() override {
    for (size_t i = 0; i < sessions_wanted_; ++i) {
      absl::StatusOr<RawSession> session = RawSession::Open(daemon_);
      if (!session.ok()) return session.status();
      sessions_.push_back(*std::move(session));
    }
    Layout layout{.page_tokens = kPageTokens};
    for (uint64_t bytes = 0; bytes < limits::kMaxLayoutTableBytes; bytes += kNumbers * sizeof(float)) {
      layout.layers.push_back(LinearLayer{.family = Family::kMamba1,
                                          .key_heads = kHeads,
                                          .value_heads = kHeads,
                                          .d_k = kStateDim,
                                          .d_v = kStateDim,
                                          .decay_table = std::vector<float>(kNumbers, kDecay),
                                          .transition = TransitionForm::kElementwise});
    }
    if (absl::Status status = Validate(layout); !status.ok()) return status;
    request_.set_identity(EncodeIdentity(SmallIdentity()));
    request_.set_layout(EncodeLayout(layout));
    number_at_ = request_.layout().rfind(std::string(reinterpret_cast<const char*>(&kDecay), sizeof kDecay));
    return absl::OkStatus();
  }

  Achieved Run(const std::stop_token& stop) override {
    const CallLoad load{.rpc_socket = daemon_.rpc_socket,
                        .method = "OpenModel",
                        .at_a_time = kAtATime,
                        .connections = kAtATime,
                        .request =
                            [this](size_t) {
                              const float number = -1.0f - static_cast<float>(asked_);
                              std::memcpy(request_.mutable_layout()->data() + number_at_, &number, sizeof number);
                              request_.set_session(sessions_[asked_++ % sessions_.size()].secret());
                              return request_.SerializeAsString();
                            },
                        .granted = [](size_t, const std::string& reply) -> uint64_t { return reply.empty() ? 0 : 1; }};
    return ToAchieved(sessions_.size(), RunLoad(load, stop));
  }

 private:
  static constexpr size_t kAtATime = 8;
  static constexpr uint32_t kHeads = 16, kStateDim = limits::kMaxLinearHeadDim;
  static constexpr size_t kNumbers = size_t{kHeads} * kStateDim * kStateDim;
  static constexpr float kDecay = -0.123f;

  const ClientOptions daemon_;
  const size_t sessions_wanted_;
  std::vector<RawSession> sessions_;
  v1::OpenModelRequest request_;
  size_t number_at_ = 0;  // offset in the layout of the number that makes models different
  uint64_t asked_ = 0;
};

}  // namespace

std::unique_ptr<Attack> MakeLookups(const Target& target, bool) {
  return std::make_unique<Lookups>(target);
}
std::unique_ptr<Attack> MakeLandings(const Target& target, bool quick) {
  return std::make_unique<Landings>(target, quick);
}
std::unique_ptr<Attack> MakeLeases(const Target& target, bool) {
  return std::make_unique<Leases>(target);
}
std::unique_ptr<Attack> MakeModels(const Target& target, bool quick) {
  return std::make_unique<Models>(target, quick);
}

}  // namespace ashlar::neighbours
