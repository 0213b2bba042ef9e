// SPDX-License-Identifier: Apache-2.0
// An engine without a model: its states, keys and values are numbers made from the tokens, so that any process can say
// what a cached segment must contain.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "client/session/client.h"

namespace ashlar::integration {

using Tokens = std::vector<int32_t>;

inline Tokens Join(Tokens a, const Tokens& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// Runs of tokens that are equal for equal seeds, and differ for different seeds.
Tokens MakeRun(uint64_t seed, size_t tokens);
std::vector<Tokens> MakePrompt(uint64_t seed, size_t segments, size_t tokens);

struct Shape {
  uint32_t layers = 2;  // number of each kind; linear and attention layers alternate
  uint32_t kv_heads = 2;
  uint32_t key_dim = 32;
  uint32_t value_dim = 24;
  TensorShard shard{};     // shard of a model with `size` times these heads; each rank has different values
  uint32_t tokens = 1024;  // capacity of the target pages, and of the source pages
  PrefixUse prefixes{};
  uint32_t captures = 1;         // capacity in sets of states
  double tokens_per_second = 0;  // declared prefill speed; 0: unknown
  int gpu = 0;                   // index for kernels::FindGpu, if the memory is on a GPU
};

class TestEngine {
 public:
  // kTouched: registered with allocated pages; kRegistered leaves the allocation to the daemon.
  enum class Memory { kRegistered, kTouched, kHosted, kGpuRegistered };

  // Failures to connect, open or register are test failures.
  explicit TestEngine(ClientOptions options, const Shape& shape = {}, Memory memory = Memory::kRegistered);

  Client& client() { return *client_; }
  Model& model() { return *model_; }
  Region& region() { return region_; }
  const PagedCache& pages() const { return pages_; }
  std::span<const int32_t> target_table() const { return target_table_; }
  Layout Whole() const;  // layout of the shard's model
  void CloseModel() { model_.reset(); }
  static Identity identity() { return {.model_id = "test", .weights_digest = "none", .dtype = "f32"}; }

  Match Lookup(const std::vector<Tokens>& segments);
  Reservation Reserve(ObjectKind kind, const Tokens& run);
  // Writes the run's content into the engine's memory, and returns its places.
  PublishParts Compute(ObjectKind kind, const Tokens& run);
  // Reserve, Compute, Publish: expects to be granted and published.
  void Publish(ObjectKind kind, const Tokens& run);
  void PublishPrompt(const std::vector<Tokens>& segments);

  // Both in one call, into the slots for landing.
  MatchAndLanding LookupAndLand(const std::vector<Tokens>& segments);
  // Lands the prompt's segments at their positions.
  Landing Land(const Match& match, const std::vector<Tokens>& segments);
  // All slots to land in get the same byte.
  void FillTargets(std::byte value);
  bool TargetsAre(std::byte value) const;
  // Compares the landed data: values byte for byte, keys with the reference rotation. Slots around the interior must
  // hold the byte `around`.
  void ExpectLanded(ObjectKind kind, const Tokens& run, uint64_t first_position, std::byte around,
                    int64_t rotary_shift = 0) const;
  void ExpectTuples(const Match& match, size_t segment, const Tokens& run) const;
  void ExpectTuple(const Match& match, size_t segment, const Tokens& run, uint32_t layer) const;  // `layer` is linear

  // The bytes of one row of values, or of one head's state, as published, to search for in memory.
  std::string ValueRow(ObjectKind kind, const Tokens& run, uint32_t layer, uint64_t token) const;
  std::string StateOfHead(ObjectKind kind, const Tokens& run, uint32_t layer, uint32_t head) const;

 protected:
  const Shape& shape() const { return shape_; }
  std::span<const int32_t> source_table() const { return source_table_; }
  // Returns the place of the `capture`-th set of states, by linear layer.
  std::span<const PublishParts::Linear> places(uint32_t capture) const {
    return std::span(tensors_).subspan(capture * shape_.layers, shape_.layers);
  }
  float* Row(std::span<const int32_t> table, uint32_t attention, uint64_t position) const;
  uint64_t RowFloats() const;

 private:
  void MakeLayout();
  void Place();
  absl::StatusOr<Region> MakeRegion(Memory memory);
  // The region's bytes for the CPU: the region itself or, for a region on a GPU, a copy that Push writes there and Pull
  // reads back.
  std::byte* near() const { return near_ != nullptr ? near_.get() : region_.data(); }
  void Push() const;
  void Pull() const;

  const Shape shape_;
  Layout layout_;
  PagedCache pages_;
  std::vector<PublishParts::Linear> tensors_;  // offsets as pointers into region_
  std::vector<int32_t> source_table_, target_table_;
  uint64_t bytes_ = 0;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<kernels::ArenaMemory> gpu_memory_;  // GPU memory that the engine has allocated itself
  Region region_;
  std::unique_ptr<std::byte[]> near_;  // null: the region is in CPU memory
};

}  // namespace ashlar::integration
