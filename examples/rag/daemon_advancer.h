// DaemonAdvancer: lets the daemon advance linear layers, as for an engine without kernels.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "ashlar/client.h"
#include "examples/refengine/engine.h"

namespace ashlar::rag {

// Copies states and tokens into memory that it shares with the daemon, and results back: what the engine holds is only
// written when a layer is done.
class DaemonAdvancer final : public refengine::SeamAdvancer {
 public:
  // `model` is the client's, with one layer for each of `config`.
  static absl::StatusOr<std::unique_ptr<DaemonAdvancer>> Make(Client& client, const Model& model,
                                                              const refengine::ModelConfig& config);

  // For the next prompt: `layers` are the cached layers of the match's segments, [segment][layer], and stay where they
  // are. False: the daemon may still write for an earlier one.
  bool Begin(const Match& match, std::span<const std::vector<refengine::CachedLayer>> layers);
  bool Advance(int32_t layer, const kernels::AdvanceSeamArgs& args) override;

  // Segments that the daemon found unusable since Begin.
  const std::vector<uint32_t>& lost() const { return lost_; }
  uint64_t advances() const { return advances_; }  // any thread

 private:
  DaemonAdvancer(const Model& model, const refengine::ModelConfig& config, Region region)
      : model_(model), config_(config), region_(std::move(region)) {}

  // The next bytes of the region; null when there are not so many left.
  std::byte* Take(uint64_t bytes);
  float* CopyToDevice(const float* rows, int64_t stride, int64_t tokens, int64_t width);
  bool CopyTokens(const kernels::LinearShape& shape, const kernels::TokenInputs& inputs, kernels::TokenInputs& out);
  bool CopyState(const kernels::StateView& state, std::byte*& out);
  void CopyStateOut(const std::byte* from, const kernels::StateView& state) const;
  // Returns the daemon's request for one step; none if there is no room, or the interior is not of this match.
  std::optional<AdvanceStep> Describe(int32_t layer, const kernels::SeamStep& step);
  uint64_t StateBytes() const;  // of one head, fp32

  Model model_;
  const refengine::ModelConfig config_;
  const Region region_;
  uint64_t used_ = 0;  // of the region, by the layer under way
  const Match* match_ = nullptr;
  std::span<const std::vector<refengine::CachedLayer>> layers_;
  std::optional<Composition> doubtful_;  // its memory is the daemon's
  std::vector<uint32_t> lost_;
  std::atomic<uint64_t> advances_ = 0;
};

}  // namespace ashlar::rag
