// SPDX-License-Identifier: Apache-2.0
// Keys and values of every type and kind of attention, from one engine's pages through an object to another engine's
// pages.
#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "kernels/testing/backends.h"
#include "kernels/testing/paged_rows.h"
#include "storage/testing/rig.h"
#include "storage/transfer/land_job.h"
#include "storage/transfer/publish_job.h"

namespace ashlar::storage {
namespace {

using kernels::testing::RowFormat;
using kernels::testing::Rows;

constexpr int64_t kTokens = 300, kSource = 5, kTarget = 83;
constexpr int32_t kPageTokens = 16, kPages = 25;
constexpr int32_t kKeyDim = 40, kValueDim = 24, kRotaryDim = 16;

class RowTypesTest : public ::testing::Test {
 protected:
  RowTypesTest() {
    for (int32_t page = kPages - 1; page >= 0; --page) table_.push_back(page);
  }

  void Open(const RowFormat& format, AttentionKind kind) {
    format_ = format;
    latent_ = kind == AttentionKind::kMla;
    heads_ = latent_ ? 1 : 3;
    AttentionLayer layer{.kind = kind,
                         .kv_heads = static_cast<uint32_t>(heads_),
                         .key_dim = kKeyDim,
                         .value_dim = kValueDim,
                         .dtype = format.dtype,
                         .scales = format.scaled};
    layer.rope = {.kind = RopeStyle::kHalfSplit, .rotary_dim = kRotaryDim, .frequencies = frequencies_};
    const Layout layout{.page_tokens = kPageTokens, .layers = {layer}};
    ASSERT_EQ(Validate(layout), absl::OkStatus());
    plan_ = *PlanObject(layout, {}, {}, ObjectKind::kSegment, kTokens);
  }

  // A plane's pages hold consecutive rows each.
  Rows MakePages(int32_t dim) { return Rows(format_, int64_t{kPages} * kPageTokens * heads_, dim); }
  Rows MakePages(int32_t dim, kernels::testing::Random& random) {
    return Rows(format_, int64_t{kPages} * kPageTokens * heads_, dim, random);
  }
  kernels::PagedSlots Slots(Rows& pages) const {
    return {.base = pages.bytes.data(),
            .page_stride = int64_t{kPageTokens} * heads_ * pages.dim,
            .token_stride = int64_t{heads_} * pages.dim,
            .head_stride = pages.dim,
            .page_tokens = kPageTokens,
            .dtype = format_.dtype,
            .scales = format_.scaled ? pages.scales.data() : nullptr,
            .scale_page_stride = int64_t{kPageTokens} * heads_,
            .scale_token_stride = heads_,
            .scale_head_stride = 1};
  }
  PagedRows Layer(Rows& keys, Rows& values) const {
    return {.heads = heads_,
            .key_dim = kKeyDim,
            .value_dim = kValueDim,
            .keys = Slots(keys),
            .values = Slots(values),
            .latent = latent_,
            .rotation = Rotation()};
  }
  kernels::Rotation Rotation() const { return {RopeStyle::kHalfSplit, kRotaryDim, frequencies_.data()}; }

  // The rows of the run whose first token is at `first`.
  Rows RunOf(const Rows& pages, int64_t first) const {
    Rows run(format_, kTokens * heads_, pages.dim);
    const auto row_bytes = static_cast<size_t>(pages.dim) * ElementBytes(format_.dtype);
    for (int64_t row = 0; row < run.rows; ++row) {
      const int64_t position = first + row / heads_;
      const int64_t slot = int64_t{table_[position / kPageTokens]} * kPageTokens + position % kPageTokens;
      const int64_t from = slot * heads_ + row % heads_;
      std::memcpy(run.bytes.data() + row * row_bytes, pages.bytes.data() + from * row_bytes, row_bytes);
      if (format_.scaled) run.scales[row] = pages.scales[from];
    }
    return run;
  }

  Rows Turned(const Rows& rows) const {
    Rows turned(rows.format, rows.rows, rows.dim);
    kernels::testing::Runner(kernels::Reference())
        .Run(kernels::RotateKeysArgs{.rotation = Rotation(),
                                     .delta = kTarget,
                                     .rows = rows.rows,
                                     .dim = rows.dim,
                                     .dtype = rows.format.dtype,
                                     .source = rows.bytes.data(),
                                     .target = turned.bytes.data(),
                                     .source_scales = rows.format.scaled ? rows.scales.data() : nullptr,
                                     .target_scales = rows.format.scaled ? turned.scales.data() : nullptr});
    return turned;
  }

  std::optional<ObjectHeader> Publish(Rows& keys, Rows& values) {
    PublishSource source{.rows = {Layer(keys, values)},
                         .page_table = std::make_shared<std::vector<int32_t>>(table_),
                         .first_position = kSource};
    EXPECT_TRUE(Fits(source, plan_));
    PublishJob job(kernels::Host(), workers_, *tier_, nullptr, plan_, *slot_, std::move(source), CancelFlag());
    job.Run();
    return job.Finish();
  }
  // Returns whether the object was found whole.
  bool Land(const ObjectHeader& header, Rows& keys, Rows& values) {
    LandTarget target{.rows = {Layer(keys, values)}, .page_table = table_};
    EXPECT_TRUE(Fits(target, header, {.first_position = kTarget}));
    LandJob job(kernels::Host(), workers_, nullptr,
                {{.header = &header, .slot = &*slot_, .first_position = kTarget, .tier = &*tier_}}, std::move(target),
                CancelFlag());
    job.Run(
        UINT64_MAX, SIZE_MAX, [] {}, [] { return false; });
    EXPECT_TRUE(job.finished());
    return !job.corrupt(0);
  }

  const uint64_t seed_ = kernels::testing::FreshSeed();
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, "ASHLAR_SEED=" + std::to_string(seed_)};
  kernels::testing::Random random_{seed_};
  const std::vector<double> frequencies_ = kernels::testing::Frequencies(kRotaryDim, 1e6);
  std::vector<int32_t> table_;
  InlineWorkers workers_;
  std::unique_ptr<MemoryTier> tier_ = TestTier({{1, 64}});
  std::optional<Slot> slot_;
  RowFormat format_;
  bool latent_ = false;
  int32_t heads_ = 0;
  ObjectHeader plan_;
};

TEST_F(RowTypesTest, RoundTripThroughAnObject) {
  for (const RowFormat format : kernels::testing::kRowFormats) {
    for (const AttentionKind kind : {AttentionKind::kGqa, AttentionKind::kMla}) {
      SCOPED_TRACE(format.Name() + (kind == AttentionKind::kMla ? ", mla" : ", gqa"));
      ASSERT_NO_FATAL_FAILURE(Open(format, kind));
      slot_ = *tier_->Allocate(1, plan_.Extents());
      Rows keys = MakePages(kKeyDim, random_), values = MakePages(kValueDim, random_);
      const std::optional<ObjectHeader> header = Publish(keys, values);
      ASSERT_TRUE(header.has_value());
      Rows landed_keys = MakePages(kKeyDim), landed_values = MakePages(kValueDim);
      ASSERT_TRUE(Land(*header, landed_keys, landed_values));
      // The rows that are rotated, and the rows that are copied bit by bit.
      const Rows& turning = latent_ ? values : keys;
      const Rows& landed = latent_ ? landed_values : landed_keys;
      EXPECT_LE(LargestDifference(RunOf(landed, kTarget), Turned(RunOf(turning, kSource)), 1e-6), 1);
      EXPECT_TRUE(RunOf(latent_ ? landed_keys : landed_values, kTarget) == RunOf(latent_ ? keys : values, kSource));
      tier_->Free(*slot_);
    }
  }
}

TEST_F(RowTypesTest, ACorruptScaleIsFound) {
  ASSERT_NO_FATAL_FAILURE(Open({DType::kF8E4M3, true}, AttentionKind::kGqa));
  slot_ = *tier_->Allocate(1, plan_.Extents());
  Rows keys = MakePages(kKeyDim, random_), values = MakePages(kValueDim, random_);
  const std::optional<ObjectHeader> header = Publish(keys, values);
  ASSERT_TRUE(header.has_value());
  for (const PartForm form : {PartForm::kKeyScales, PartForm::kValueScales}) {
    const Part& part = *header->Find(0, form);
    std::byte& last = ObjectBytes(*tier_, *slot_).Unit(part, part.units - 1)[part.last_unit_bytes - 1];
    last ^= std::byte{1};
    EXPECT_FALSE(Land(*header, keys, values)) << Name(form);
    last ^= std::byte{1};
  }
  EXPECT_TRUE(Land(*header, keys, values));
}

}  // namespace
}  // namespace ashlar::storage
