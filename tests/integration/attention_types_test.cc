// SPDX-License-Identifier: Apache-2.0
// Attention of every kind and element type, with every kind of stored keys, through a real daemon: one engine publishes
// from its pages, and another lands in its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/session/client.h"
#include "kernels/testing/backends.h"
#include "kernels/testing/paged_rows.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using kernels::testing::Random;
using kernels::testing::RowFormat;
using kernels::testing::Rows;
using testing::Each;

constexpr uint32_t kPageTokens = 16, kPages = 32;
constexpr uint32_t kKeyDim = 40, kValueDim = 24, kRotaryDim = 16;
constexpr uint64_t kSource = 5;       // position of a run's token 0 in the pages from which it is published
constexpr size_t kRunTokens = 150;    // several units of each type but one
constexpr uint64_t kAlignment = 256;  // alignment of a layer's pages

struct RowType {
  RowFormat format;
  AttentionLayer layer;

  bool latent() const { return layer.kind == AttentionKind::kMla; }
  // Its keys, or, for a latent, the part of them that is stored with the values, are rotated when they land.
  bool turns() const { return layer.stored == StoredKeys::kZeroBased && layer.rope.kind != RopeStyle::kNone; }
  uint64_t RowBytes(uint32_t dim) const { return uint64_t{dim} * ElementBytes(layer.dtype); }
  uint64_t TokenBytes() const { return layer.kv_heads * RowBytes(kKeyDim + kValueDim); }
  uint64_t ScaleBytes() const { return format.scaled ? uint64_t{2} * layer.kv_heads * sizeof(float) : 0; }
  std::string Name() const {
    static constexpr const char* kRopes[] = {"none", "half-split", "interleaved"};
    return format.Name() + (latent() ? ", mla, " : ", gqa, ") + kRopes[static_cast<size_t>(layer.rope.kind)] +
           (layer.stored == StoredKeys::kZeroBased ? ", zero-based" : ", unrotated");
  }
};

// Every kind of attention layer that a layout can describe, each as a layer of one model.
std::vector<RowType> EveryType() {
  std::vector<RowType> types;
  for (const RowFormat format : kernels::testing::kRowFormats) {
    for (const AttentionKind kind : {AttentionKind::kGqa, AttentionKind::kMla}) {
      for (const RopeStyle rope : {RopeStyle::kNone, RopeStyle::kHalfSplit, RopeStyle::kInterleaved}) {
        for (const StoredKeys stored : {StoredKeys::kZeroBased, StoredKeys::kUnrotated}) {
          AttentionLayer layer{.kind = kind,
                               .kv_heads = kind == AttentionKind::kMla ? 1u : 3u,
                               .key_dim = kKeyDim,
                               .value_dim = kValueDim,
                               .dtype = format.dtype,
                               .scales = format.scaled,
                               .rope = {},
                               .stored = stored};
          if (rope != RopeStyle::kNone) {
            layer.rope = {
                .kind = rope, .rotary_dim = kRotaryDim, .frequencies = kernels::testing::Frequencies(kRotaryDim, 1e6)};
          }
          types.push_back({format, layer});
        }
      }
    }
  }
  return types;
}

// One layer's computed keys and values of a run.
struct RunRows {
  Rows keys, values;
};

class Engine {
 public:
  Engine(const DaemonProcess& daemon, const std::vector<RowType>& types)
      : types_(types), client_(*Client::Connect(daemon.client_options())) {
    Layout layout{.page_tokens = kPageTokens, .layers = {}};
    PagedCache pages{.page_tokens = kPageTokens, .pages = kPages, .layers = {}};
    uint64_t end = 0;
    const auto take = [&end](uint64_t bytes) {
      const uint64_t begin = end;
      end = (begin + bytes + kAlignment - 1) / kAlignment * kAlignment;
      return begin;
    };
    for (const RowType& type : types_) {
      const uint64_t keys = take(type.TokenBytes() * kPageTokens * kPages);
      const uint64_t scales = take(type.ScaleBytes() * kPageTokens * kPages);
      PagedLayer layer{.layer = static_cast<uint32_t>(layout.layers.size()),
                       .key_offset = keys,
                       .value_offset = keys + type.layer.kv_heads * type.RowBytes(kKeyDim),
                       .page_stride = type.TokenBytes() * kPageTokens,
                       .token_stride = type.TokenBytes(),
                       .key_head_stride = type.RowBytes(kKeyDim),
                       .value_head_stride = type.RowBytes(kValueDim)};
      if (type.format.scaled) {
        layer.key_scale_offset = scales;
        layer.value_scale_offset = scales + type.layer.kv_heads * sizeof(float);
        layer.scale_page_stride = type.ScaleBytes() * kPageTokens;
        layer.scale_token_stride = type.ScaleBytes();
        layer.scale_head_stride = sizeof(float);
      }
      pages.layers.push_back(layer);
      layout.layers.push_back(type.layer);
    }
    region_ = *client_->HostRegion(end);
    model_.emplace(*client_->OpenModel(TestEngine::identity(), layout));
    EXPECT_EQ(model_->DeclarePages(region_, pages), absl::OkStatus());
    pages_ = pages;
    for (int32_t page = kPages - 1; page >= 0; --page) table_.push_back(page);
  }

  Model& model() { return *model_; }
  std::span<const int32_t> table() const { return table_; }

  void Publish(ObjectKind kind, const Tokens& run, const std::vector<RunRows>& rows) {
    for (size_t i = 0; i < types_.size(); ++i) {
      RunRows own = rows[i];
      Move(i, kSource, own, /*into_pages=*/true);
    }
    const ObjectRun object{kind, run};
    const Reservation reservation = model_->Reserve({&object, 1}).front();
    ASSERT_EQ(reservation.outcome, ReserveOutcome::kGranted);
    ASSERT_EQ(model_->Publish(reservation, {.region = region_, .page_table = table_, .first_position = kSource}),
              PublishOutcome::kPublished);
  }

  RunRows Landed(size_t layer, uint64_t first, size_t tokens) {
    const RowType& type = types_[layer];
    const auto rows = static_cast<int64_t>(tokens * type.layer.kv_heads);
    RunRows run{Rows(type.format, rows, kKeyDim), Rows(type.format, rows, kValueDim)};
    Move(layer, first, run, /*into_pages=*/false);
    return run;
  }

 private:
  // Between a run's rows and the slots from `first` on.
  void Move(size_t layer, uint64_t first, RunRows& run, bool into_pages) {
    const RowType& type = types_[layer];
    const PagedLayer& at = pages_.layers[layer];
    const uint32_t heads = type.layer.kv_heads;
    const auto copy = [into_pages](std::byte* paged, void* own, uint64_t bytes) {
      into_pages ? std::memcpy(paged, own, bytes) : std::memcpy(own, paged, bytes);
    };
    for (int64_t row = 0; row < run.keys.rows; ++row) {
      const uint64_t position = first + row / heads, head = row % heads;
      const auto slot = [&](uint64_t page_stride, uint64_t token_stride) {
        return region_.data() + table_[position / kPageTokens] * page_stride + position % kPageTokens * token_stride;
      };
      std::byte* const paged = slot(at.page_stride, at.token_stride);
      const uint64_t key = type.RowBytes(kKeyDim), value = type.RowBytes(kValueDim);
      copy(paged + at.key_offset + head * at.key_head_stride, run.keys.bytes.data() + row * key, key);
      copy(paged + at.value_offset + head * at.value_head_stride, run.values.bytes.data() + row * value, value);
      if (!type.format.scaled) continue;
      std::byte* const scales = slot(at.scale_page_stride, at.scale_token_stride) + head * at.scale_head_stride;
      copy(scales + at.key_scale_offset, &run.keys.scales[row], sizeof(float));
      copy(scales + at.value_scale_offset, &run.values.scales[row], sizeof(float));
    }
  }

  const std::vector<RowType>& types_;
  PagedCache pages_;
  std::vector<int32_t> table_;
  std::unique_ptr<Client> client_;
  Region region_;
  std::optional<Model> model_;
};

// Returns the rows that the pages must hold if the run's token 0 is at `first`.
Rows Turned(const RowType& type, const Rows& rows, uint64_t first) {
  Rows turned(rows.format, rows.rows, rows.dim);
  const auto style = type.layer.rope.kind == RopeStyle::kHalfSplit ? RopeStyle::kHalfSplit : RopeStyle::kInterleaved;
  kernels::testing::Runner(kernels::Reference())
      .Run(kernels::RotateKeysArgs{.rotation = {style, kRotaryDim, type.layer.rope.frequencies.data()},
                                   .delta = static_cast<int64_t>(first),
                                   .rows = rows.rows,
                                   .dim = rows.dim,
                                   .dtype = rows.format.dtype,
                                   .source = rows.bytes.data(),
                                   .target = turned.bytes.data(),
                                   .source_scales = rows.format.scaled ? rows.scales.data() : nullptr,
                                   .target_scales = rows.format.scaled ? turned.scales.data() : nullptr});
  return turned;
}

void ExpectLanded(const RowType& type, const RunRows& landed, const RunRows& published, uint64_t first) {
  const Rows& moved = type.latent() ? landed.values : landed.keys;
  const Rows& stored = type.latent() ? published.values : published.keys;
  if (type.turns()) {
    EXPECT_LE(LargestDifference(moved, Turned(type, stored, first), 1e-6), 1);
    EXPECT_TRUE(first == 0 || !(moved == stored)) << "not turned";
  } else {
    EXPECT_TRUE(moved == stored);
  }
  EXPECT_TRUE((type.latent() ? landed.keys : landed.values) == (type.latent() ? published.keys : published.values));
}

TEST(AttentionTypes, AllTypesRoundTripThroughDaemon) {
  const uint64_t seed = kernels::testing::FreshSeed();
  SCOPED_TRACE("ASHLAR_SEED=" + std::to_string(seed));
  Random random(seed);
  const std::vector<RowType> types = EveryType();
  ASSERT_EQ(types.size(), 7u * 2 * 3 * 2);
  const std::vector<Tokens> prompt = MakePrompt(1, 2, kRunTokens);
  std::vector<std::vector<RunRows>> rows(prompt.size());
  for (std::vector<RunRows>& run : rows) {
    for (const RowType& type : types) {
      const auto count = static_cast<int64_t>(kRunTokens * type.layer.kv_heads);
      run.push_back({Rows(type.format, count, kKeyDim, random), Rows(type.format, count, kValueDim, random)});
    }
  }

  DaemonProcess daemon;
  Engine publisher(daemon, types), lander(daemon, types);
  for (size_t i = 0; i < prompt.size(); ++i) {
    ASSERT_NO_FATAL_FAILURE(publisher.Publish(KindOfSegment(i), prompt[i], rows[i]));
  }
  Tokens tokens = prompt[0];
  tokens.insert(tokens.end(), prompt[1].begin(), prompt[1].end());
  const std::vector<uint64_t> lengths = {kRunTokens, kRunTokens};
  MatchAndLanding found = lander.model().LookupAndLand(Prompt{tokens, lengths}, lander.table());
  ASSERT_EQ(found.segments.size(), prompt.size());
  ASSERT_THAT(found.landing.Wait(kPatience), Each(MissReason::kNone));
  for (size_t i = 0; i < types.size(); ++i) {
    SCOPED_TRACE(types[i].Name());
    for (size_t run = 0; run < prompt.size(); ++run) {
      SCOPED_TRACE(run);
      const uint64_t first = run * kRunTokens;
      ExpectLanded(types[i], lander.Landed(i, first, kRunTokens), rows[run][i], first);
    }
  }
}

}  // namespace
}  // namespace ashlar::integration
