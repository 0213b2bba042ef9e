// SPDX-License-Identifier: Apache-2.0
// The attack by commits: each inserts a text of millions of tokens into the prefix tree, cut at each state.
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "ashlar/v1/cache.pb.h"
#include "proto/limits.h"
#include "proto/object.h"
#include "proto/outcome.h"
#include "proto/tokens.h"
#include "tools/neighbours/attack.h"
#include "tools/neighbours/call_load.h"
#include "tools/neighbours/raw_engine.h"

namespace ashlar::neighbours {
namespace {

// Texts of the longest kind, with states at as many depths as allowed, all different from their first token. The model
// has no attention, so the text takes no pages.
class Commits final : public Attack {
 public:
  Commits(const Target& target, bool quick) : daemon_(target.daemon), tokens_(quick ? 1 << 18 : 1 << 22) {}

  absl::Status Prepare() override {
    Layout layout = SmallLayout();
    layout.layers.pop_back();
    for (size_t i = 0; i < kSessions; ++i) {
      absl::StatusOr<RawEngine> engine = RawEngine::OpenForPrefixes(daemon_, layout);
      if (!engine.ok()) return engine.status();
      engines_.push_back(*std::move(engine));
      if (absl::Status status = Describe(engines_.back(), layout); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  Achieved Run(const std::stop_token& stop) override {
    const CallLoad load{.rpc_socket = daemon_.rpc_socket,
                        .method = "Commit",
                        .at_a_time = 2 * kSessions,
                        .connections = kSessions,
                        .request =
                            [this](size_t slot) {
                              v1::CommitRequest& request = requests_[slot % kSessions];
                              ++text_;
                              std::memcpy(request.mutable_tokens()->data(), &text_, sizeof text_);
                              return request.SerializeAsString();
                            },
                        .granted = [](size_t, const std::string& message) -> uint64_t {
                          v1::CommitReply reply;
                          if (!reply.ParseFromString(message)) return 0;
                          uint64_t states = 0;
                          for (const uint32_t outcome : reply.outcomes()) {
                            states += outcome == static_cast<uint32_t>(CommitOutcome::kBusy) ? 0 : 1;
                          }
                          return states;
                        }};
    LoadResult result = RunLoad(load, stop);
    return {.sessions = kSessions,
            .asked = result.calls,
            .granted = result.granted,
            .refused = result.refused,
            .most_at_a_time = result.most_at_a_time,
            .why = std::move(result.error)};
  }

 private:
  static constexpr size_t kSessions = 4;

  // The request of one session; all of its states are at the same address.
  absl::Status Describe(RawEngine& engine, const Layout& layout) {
    const auto plan = PlanPrefixCheckpoint(layout, {}, {}, limits::kPrefixBlockTokens, tokens_);
    if (!plan.ok()) return plan.status();
    uint64_t bytes = 0;
    for (const Part& part : plan->parts) bytes += part.Bytes();
    const absl::StatusOr<uint64_t> region = engine.HostRegion(bytes);
    if (!region.ok()) return region.status();
    v1::CommitRequest request;
    request.set_session(engine.session().secret());
    request.set_model(engine.model());
    request.set_tokens(PackTokens(std::vector<int32_t>(tokens_, 7)));
    request.set_prompt_tokens(tokens_);
    request.set_provenance(static_cast<uint32_t>(Provenance::kExact));
    for (uint64_t i = 1; i <= limits::kMaxCheckpointsPerCommit; ++i) {
      v1::CapturedState& state = *request.add_checkpoints();
      state.set_depth(tokens_ / limits::kMaxCheckpointsPerCommit * i);
      uint64_t offset = 0;
      for (const Part& part : plan->parts) {
        v1::PartSource& source = *state.add_parts();
        source.set_layer(part.layer);
        source.set_form(static_cast<uint32_t>(part.form));
        source.set_region(*region);
        source.set_offset(offset);
        offset += part.Bytes();
      }
    }
    requests_.push_back(std::move(request));
    return absl::OkStatus();
  }

  const ClientOptions daemon_;
  const uint64_t tokens_;  // tokens of a text
  std::vector<RawEngine> engines_;
  std::vector<v1::CommitRequest> requests_;
  int32_t text_ = 0;
};

}  // namespace

std::unique_ptr<Attack> MakeCommits(const Target& target, bool quick) {
  return std::make_unique<Commits>(target, quick);
}

}  // namespace ashlar::neighbours
