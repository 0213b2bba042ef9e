// SPDX-License-Identifier: Apache-2.0
// For tests: an engine that talks to a daemon without the client library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ashlar/v1/cache.pb.h"
#include "daemon/testing/node.h"
#include "proto/layout.h"
#include "proto/object.h"
#include "proto/outcome.h"

namespace ashlar::daemon {

// A small layout: one linear and one attention layer, with d_k ≠ d_v and partial RoPE.
Layout SmallLayout();
Identity SmallIdentity();

// Returns `count` consecutive tokens starting at `first`.
std::vector<int32_t> Ascending(int count, int first);
v1::LandSegment At(uint32_t segment, uint64_t first_position);

// A session with an opened model and one registered region. Its pages are in the first half of the region.
class TestEngine {
 public:
  static constexpr uint32_t kPages = 64;
  static constexpr size_t kRegionBytes = 1 << 20;
  static constexpr size_t kTensors = kRegionBytes / 2;  // offset of everything except pages

  // `socket` is a connected socket; null to connect here.
  explicit TestEngine(const TestNode& node, const Layout& layout = SmallLayout(),
                      std::unique_ptr<RawSession> socket = nullptr);
  ~TestEngine();

  RawSession& socket() { return *socket_; }
  const std::string& secret() const { return secret_; }
  const std::string& tenant() const { return tenant_; }
  uint64_t model() const { return model_; }
  uint64_t region() const { return region_; }
  uint64_t pages() const { return pages_; }
  std::byte* memory() { return memory_; }
  // Fills the memory with distinct floats, so that neighbouring rows and matrices differ.
  void FillMemory();
  // Returns the row of one token in the declared pages of layer 1.
  float* Key(int32_t page, uint32_t slot, uint32_t head);
  float* Value(int32_t page, uint32_t slot, uint32_t head);

  v1::DeclarePagesRequest PagesRequest() const;
  // Opens the model again with prefixes, and declares the same pages for it. Returns both handles.
  struct Opened {
    uint64_t model = 0, pages = 0;
  };
  Opened OpenWithPrefixes(uint32_t capture_tokens = 1, uint32_t span_tokens = 0);

  template <typename Request>
  Request Make() const {
    Request request;
    request.set_session(secret_);
    return request;
  }
  // Makes one call and returns its status.
  absl::Status Call(const v1::OpenModelRequest& request, v1::OpenModelReply* reply);
  absl::Status Call(const v1::CloseModelRequest& request, v1::CloseModelReply* reply);
  absl::Status Call(const v1::DeclarePagesRequest& request, v1::DeclarePagesReply* reply);
  absl::Status Call(const v1::MatchRequest& request, v1::MatchReply* reply);
  absl::Status Call(const v1::ReserveRequest& request, v1::ReserveReply* reply);
  absl::Status Call(const v1::PublishRequest& request, v1::PublishReply* reply);
  absl::Status Call(const v1::CommitRequest& request, v1::CommitReply* reply);
  absl::Status Call(const v1::AbandonRequest& request, v1::AbandonReply* reply);
  absl::Status Call(const v1::QuiesceRequest& request, v1::QuiesceReply* reply);
  absl::Status Call(const v1::ReleaseRequest& request, v1::ReleaseReply* reply);
  absl::Status Call(const v1::AttachLeaseRequest& request, v1::AttachLeaseReply* reply);
  absl::Status Call(const v1::AdvanceRequest& request, v1::CompositionReply* reply);
  absl::Status Call(const v1::AdmitRequest& request, v1::AdmitReply* reply);
  absl::Status Call(const v1::ExtendAdmissionRequest& request, v1::AdmitReply* reply);
  absl::Status Call(const v1::MarkFilledRequest& request, v1::MarkFilledReply* reply);
  absl::Status Call(const v1::AttachAdmissionRequest& request, v1::AdmitReply* reply);
  absl::Status Call(const v1::PlanPrefillRequest& request, v1::PlanPrefillReply* reply);
  absl::Status Call(const v1::AwaitPrefillRequest& request, v1::AwaitPrefillReply* reply);
  absl::Status Call(const v1::EndPrefillRequest& request, v1::EndPrefillReply* reply);
  absl::Status Call(const v1::ServePrefillRequest& request, v1::ServePrefillReply* reply);
  absl::Status Call(const v1::HandOffRequest& request, v1::HandOffReply* reply);
  absl::Status Call(const v1::ProbeRequest& request, v1::ProbeReply* reply);
  absl::StatusOr<v1::PromptMatch> Match(std::span<const int32_t> tokens, std::vector<uint64_t> lengths);
  v1::ReserveResult Reserve(ObjectKind kind, std::span<const int32_t> tokens);
  // Sources for a reserved run of `tokens` tokens: tensors at kTensors, rows on pages 0, 1, ….
  v1::PublishObject Sources(ObjectKind kind, uint64_t reservation, uint64_t tokens) const;
  // The same sources for a text of a model opened with prefixes: one checkpoint at its end.
  v1::CommitRequest CommitRequest(const Opened& opened, std::span<const int32_t> tokens) const;
  PublishOutcome Publish(const v1::PublishObject& object);
  // Reserves and publishes the current memory.
  PublishOutcome PublishRun(ObjectKind kind, std::span<const int32_t> tokens);
  v1::LandRequest LandRequest(const std::string& lease, std::vector<v1::LandSegment> segments) const;
  v1::QuiesceRequest QuiesceRequest(uint64_t landing) const;
  // Reads the stream to its end.
  absl::StatusOr<std::vector<MissReason>> Land(const v1::LandRequest& request);
  // Looks up and lands a prompt of the model on pages 0, 1, …. Reads the match and the stream to its end.
  v1::LookupAndLandRequest LookupAndLandRequest(std::span<const int32_t> tokens, std::vector<uint64_t> lengths,
                                                const std::string& lease) const;
  struct Landed {
    v1::PromptMatch match;
    std::vector<MissReason> verdict;
  };
  absl::StatusOr<Landed> LookupAndLand(const v1::LookupAndLandRequest& request);
  // Cancels the stream as soon as it is open.
  void LandAndCancel(const v1::LandRequest& request);

 private:
  const Layout layout_;
  std::unique_ptr<RawSession> socket_;
  struct Rpc;
  const std::unique_ptr<Rpc> rpc_;
  std::string secret_, daemon_epoch_, tenant_;
  uint64_t region_ = 0, model_ = 0, pages_ = 0;
  std::byte* memory_ = nullptr;
};

}  // namespace ashlar::daemon
