// SPDX-License-Identifier: Apache-2.0
// GroupedEngine: an engine of two attention layers, whose pages one table names, or one table for each of two groups.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ashlar/engine.h"
#include "kernels/gpu.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/engine_options.h"

namespace ashlar::integration {

// kApart: each group numbers its own pages, and chooses its own tokens per page. kCommon: there is one set of page
// numbers, and layers of both groups share the memory of a page.
enum class Grouping : uint8_t { kOne, kApart, kCommon };

// Its numbers identify their layer and token.
class GroupedEngine {
 public:
  static constexpr uint32_t kLinear = 0, kWide = 1, kNarrow = 2, kSeam = 4, kPageTokens = 16, kCapture = 16;
  static constexpr uint32_t kHeads = 2, kDim = 8;
  static constexpr uint32_t kPages = 400, kNarrowPages = 500, kNarrowPageTokens = 8;
  static constexpr float kDecays[kHeads] = {-0.3F, -0.01F};

  // `gpu`: the GPU of the pages; null: CPU memory.
  GroupedEngine(const DaemonProcess& daemon, Grouping grouping, bool memory = true, const kernels::Gpu* gpu = nullptr,
                engine::ComposeBy compose = engine::ComposeBy::kProcess)
      : grouping_(grouping), gpu_(gpu) {
    const std::string rpc = daemon.client_options().rpc_socket, session = daemon.client_options().session_socket;
    engine::OpenOptions options = Options(rpc, session);
    options.compose = compose;
    if (!memory) options.memory = {.kind = engine::MemoryKind::kNone};
    if (gpu_ != nullptr) PutOnGpu(options.memory);
    const engine::Status opened = engine::Cache::Open(options, &cache);
    EXPECT_EQ(opened.code, engine::Code::kOk) << opened.message;
    uint32_t count = 0;
    const engine::PagePlace* const places = cache.places(&count);
    places_.assign(places, places + count);
    for (size_t g = 0; g < groups(); ++g) free_.push_back(Shuffled(PagesOf(g)));
  }

  // Points into this object, and is valid as long as the sockets' names.
  engine::OpenOptions Options(const std::string& rpc, const std::string& session) {
    layers_[kLinear] = {.kind = engine::LayerKind::kLinear, .family = Family::kRetnet, .decay_table = kDecays};
    layers_[kLinear].key_heads = layers_[kLinear].value_heads = kHeads;
    layers_[kLinear].d_k = layers_[kLinear].d_v = kDim;
    layers_[kWide] = {.kind = engine::LayerKind::kGqa, .kv_heads = kHeads, .key_dim = kDim, .value_dim = kDim};
    layers_[kNarrow] = {.kind = engine::LayerKind::kGqa, .kv_heads = 1, .key_dim = 4, .value_dim = kDim};
    engine::OpenOptions options = {.rpc_socket = rpc.c_str(), .session_socket = session.c_str()};
    options.model = {.model_id = "groups", .weights_digest = "1", .page_tokens = kPageTokens};
    options.model.head = options.model.tail = kSeam;
    options.model.layers = layers_;
    options.model.layer_count = 3;
    options.memory.pages = kPages;
    options.capture_tokens = kCapture;
    if (grouping_ == Grouping::kOne) return options;
    groups_[0] = {.layers = &wide_, .layer_count = 1};
    groups_[1] = {.layers = &narrow_, .layer_count = 1, .page_tokens = kNarrowPageTokens};
    if (grouping_ == Grouping::kApart) groups_[1].pages = kNarrowPages;
    options.memory.groups = groups_;
    options.memory.group_count = 2;
    options.memory.common_pages = grouping_ == Grouping::kCommon;
    return options;
  }

  // Places the pages in an allocation of the engine.
  void PutOnGpu(engine::Memory& memory) {
    kernels::ArenaError error;
    arena_ = gpu_->MakeArena(2 << 20, &error);
    ASSERT_NE(arena_, nullptr) << error.message;
    memory.kind = engine::MemoryKind::kGpu;
    memory.bytes = arena_->bytes();
    memory.gpu_descriptor = arena_->descriptor();
    memory.gpu_data = reinterpret_cast<uint8_t*>(arena_->data());
    std::memcpy(memory.gpu, gpu_->id().data(), sizeof memory.gpu);
  }

  size_t groups() const { return grouping_ == Grouping::kOne ? 1 : 2; }
  uint32_t PagesOf(size_t group) const { return group == 1 && grouping_ == Grouping::kApart ? kNarrowPages : kPages; }
  uint64_t TokensOf(size_t group) const { return group == 1 ? kNarrowPageTokens : kPageTokens; }
  // The set of page numbers from which a group allocates.
  size_t SetOf(size_t group) const { return grouping_ == Grouping::kCommon ? 0 : group; }

  // Exclusive pages for this number of tokens, for every group.
  struct Tables {
    std::vector<std::vector<int32_t>> pages;
    std::vector<engine::PageTable> tables;
  };
  Tables Take(uint64_t tokens) {
    Tables taken;
    for (size_t g = 0; g < groups(); ++g) {
      std::vector<int32_t>& from = free_[SetOf(g)];
      const uint64_t count = (tokens + TokensOf(g) - 1) / TokensOf(g);
      EXPECT_GE(from.size(), count);
      taken.pages.emplace_back(from.end() - static_cast<ptrdiff_t>(count), from.end());
      from.resize(from.size() - count);
    }
    for (const std::vector<int32_t>& pages : taken.pages) taken.tables.push_back({pages.data(), pages.size()});
    return taken;
  }
  // Writes the places into a struct of the API.
  template <typename Struct>
  void Put(const Tables& tables, Struct& out) const {
    if (grouping_ == Grouping::kOne) {
      out.page_table = tables.pages[0].data();
      out.page_count = tables.pages[0].size();
    } else {
      out.page_tables = tables.tables.data();
      out.page_table_count = static_cast<uint32_t>(tables.tables.size());
    }
  }
  engine::Status LookAgain(engine::Request& request, const Tables& tables) const {
    return grouping_ == Grouping::kOne ? request.LookAgain(tables.pages[0].data(), tables.pages[0].size())
                                       : request.LookAgain(tables.tables.data(), 2);
  }

  // Returns the address of the layer's key or value row at a position of a text in these pages.
  float* Row(const Tables& tables, uint32_t layer, bool keys, uint64_t position) {
    const engine::PagePlace& place = places_[layer - 1];
    const size_t g = layer == kNarrow && groups() == 2 ? 1 : 0;
    const uint64_t page_tokens = TokensOf(g);
    const auto page = static_cast<uint64_t>(tables.pages[g][position / page_tokens]);
    return reinterpret_cast<float*>(cache.data() + (keys ? place.key_offset : place.value_offset) +
                                    page * place.page_stride + position % page_tokens * place.token_stride);
  }
  static uint32_t Width(uint32_t layer, bool keys) { return layer == kWide ? kHeads * kDim : keys ? 4 : kDim; }
  static float Number(uint32_t layer, bool keys, int32_t token, uint32_t i) {
    return static_cast<float>(token) + 1000.0F * static_cast<float>(layer) + (keys ? 0.5F : 0.25F) +
           static_cast<float>(i) / 64;
  }
  // "Computes" the keys and values of some tokens in these pages, the first of them at `first`.
  void Compute(const Tables& tables, std::span<const int32_t> tokens, uint64_t first = 0) {
    ForEach(
        tables, tokens, first, [](float* at, float number) { *at = number; }, /*writes=*/true);
  }
  void Poison(const Tables& tables, uint64_t tokens) {
    const std::vector<int32_t> nothing(tokens);
    ForEach(
        tables, nothing, 0, [](float* at, float) { *at = -7; }, /*writes=*/true);
  }
  // Expects the numbers of the tokens there; stops at the first that differ.
  void ExpectLanded(const Tables& tables, std::span<const int32_t> tokens, uint64_t first) {
    int wrong = 0;
    ForEach(tables, tokens, first, [&wrong](const float* at, float number) { wrong += *at != number; });
    EXPECT_EQ(wrong, 0) << "numbers of positions " << first << " to " << first + tokens.size();
  }
  bool IsPoison(const Tables& tables, uint64_t position) {
    float wide = 0, narrow = 0;
    Fetch(&wide, Row(tables, kWide, true, position), 1);
    Fetch(&narrow, Row(tables, kNarrow, true, position), 1);
    return wide == -7 && narrow == -7;
  }

  // States whose numbers identify the text before them.
  engine::LinearTensors State(float number) {
    states_.emplace_back(kHeads * kDim * kDim + kHeads, number);
    float* const numbers = states_.back().data();
    for (uint32_t head = 0; head < kHeads; ++head) numbers[kHeads * kDim * kDim + head] = -0.5F;
    return {.layer = kLinear, .state = numbers, .transition = numbers + kHeads * kDim * kDim};
  }
  // Computes and publishes all runs that a request misses, each in separate pages, at a separate position.
  void PublishMissing(engine::Request& request) {
    uint32_t count = 0;
    const engine::Run* const runs = request.missing(&count);
    for (uint32_t i = 0; i < count; ++i) {
      const uint64_t first = 3 * i;
      const Tables pages = Take(first + runs[i].token_count);
      Compute(pages, {runs[i].tokens, runs[i].token_count}, first);
      const engine::LinearTensors tensors = State(static_cast<float>(runs[i].tokens[0]));
      engine::ComputedRun computed{.linear = &tensors, .linear_count = 1, .first_position = first};
      Put(pages, computed);
      uint8_t outcome = 0;
      ASSERT_GOOD(request.Publish(i, computed, &outcome));
      EXPECT_STREQ(engine::PublishName(outcome), "published");
    }
  }

  engine::Cache cache;

 private:
  template <typename Each>
  void ForEach(const Tables& tables, std::span<const int32_t> tokens, uint64_t first, Each each, bool writes = false) {
    for (uint64_t i = 0; i < tokens.size(); ++i) {
      for (const uint32_t layer : {kWide, kNarrow}) {
        for (const bool keys : {true, false}) {
          float* const at = Row(tables, layer, keys, first + i);
          float row[kHeads * kDim];
          const uint32_t width = Width(layer, keys);
          if (!writes) Fetch(row, at, width);
          for (uint32_t n = 0; n < width; ++n) each(row + n, Number(layer, keys, tokens[i], n));
          if (writes) Store(at, row, width);
        }
      }
    }
  }
  void Fetch(float* here, const float* there, size_t count) const {
    if (gpu_ != nullptr) return gpu_->CopyToHost(here, there, count * sizeof(float));
    std::memcpy(here, there, count * sizeof(float));
  }
  void Store(float* there, const float* here, size_t count) const {
    if (gpu_ != nullptr) return gpu_->CopyToDevice(there, here, count * sizeof(float));
    std::memcpy(there, here, count * sizeof(float));
  }
  static std::vector<int32_t> Shuffled(uint32_t count) {
    std::vector<int32_t> pages(count);
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), std::mt19937_64(count));
    return pages;
  }

  const Grouping grouping_;
  const kernels::Gpu* const gpu_;
  std::unique_ptr<kernels::ArenaMemory> arena_;
  engine::Layer layers_[3];
  const uint32_t wide_ = kWide, narrow_ = kNarrow;
  engine::LayerGroup groups_[2];
  std::vector<engine::PagePlace> places_;
  std::vector<std::vector<int32_t>> free_;  // indexed by set of page numbers
  std::vector<std::vector<float>> states_;
};

}  // namespace ashlar::integration
