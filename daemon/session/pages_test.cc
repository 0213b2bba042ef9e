// SPDX-License-Identifier: Apache-2.0
#include "daemon/session/pages.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "ashlar/v1/cache.pb.h"
#include "daemon/runtime/unique_fd.h"
#include "daemon/testing/node.h"
#include "daemon/testing/test_engine.h"

namespace ashlar::daemon {
namespace {

using ::testing::StartsWith;

// Two attention layers of 2 heads, keys of 32 bytes and values of 24.
class PagesTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kPages = 64, kPageTokens = 4;
  static constexpr uint64_t kKeys = 2 * 32, kToken = 2 * (32 + 24);  // sizes of one layer, all heads

  void SetUp() override {
    region_ = *Region::Register(MakeMemfd(1 << 20, F_SEAL_SHRINK), 1 << 20);
    Layout layout = SmallLayout();
    layout.layers.push_back(layout.layers[1]);
    model_ = std::make_shared<Model>(std::make_shared<const Layout>(std::move(layout)));
  }

  // A layer whose token rows (keys of all heads, then values) begin at `offset`.
  static v1::PagedLayer Layer(uint32_t layer, uint64_t offset, uint64_t page_stride, uint64_t token_stride) {
    v1::PagedLayer paged;
    paged.set_layer(layer);
    paged.set_key_offset(offset);
    paged.set_value_offset(offset + kKeys);
    paged.set_page_stride(page_stride);
    paged.set_token_stride(token_stride);
    paged.set_key_head_stride(32);
    paged.set_value_head_stride(24);
    return paged;
  }

  absl::Status Declare(const v1::PagedLayer& first, const v1::PagedLayer& second) {
    v1::DeclarePagesRequest request;
    request.set_page_tokens(kPageTokens);
    request.set_pages(kPages);
    *request.add_layers() = first;
    *request.add_layers() = second;
    return Pages::Declare(model_, region_, request).status();
  }

  std::shared_ptr<const Region> region_;
  std::shared_ptr<const Model> model_;
};

TEST_F(PagesTest, LayersMayBeConsecutiveOrInterleaved) {
  constexpr uint64_t kPage = kPageTokens * kToken;
  EXPECT_EQ(Declare(Layer(1, 0, kPage, kToken), Layer(2, kPages * kPage, kPage, kToken)), absl::OkStatus());
  EXPECT_EQ(Declare(Layer(1, 0, 2 * kPage, kToken), Layer(2, kPage, 2 * kPage, kToken)), absl::OkStatus());
  EXPECT_EQ(Declare(Layer(1, 0, 2 * kPage, 2 * kToken), Layer(2, kToken, 2 * kPage, 2 * kToken)), absl::OkStatus());
}

TEST_F(PagesTest, PlanesThatShareMemoryAreRefusedByName) {
  constexpr uint64_t kPage = kPageTokens * kToken;
  const auto expect = [&](const v1::PagedLayer& first, const v1::PagedLayer& second, const std::string& error) {
    const absl::Status status = Declare(first, second);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), StartsWith(error));
  };
  const v1::PagedLayer first = Layer(1, 0, kPage, kToken);
  expect(first, Layer(2, 0, kPage, kToken), "layers[1].key_offset: rows overlap those of layers[0].key_offset");
  expect(first, Layer(2, kPages * kPage - kToken, kPage, kToken),
         "layers[1].key_offset: rows overlap those of layers[0].key_offset");
  expect(Layer(1, 0, 2 * kPage, kToken), Layer(2, kPage - 4, 2 * kPage, kToken),
         "layers[1].key_offset: rows overlap those of layers[0].value_offset");
  v1::PagedLayer aliased = first;
  aliased.set_value_offset(kKeys - 4);
  expect(aliased, Layer(2, kPages * kPage, kPage, kToken),
         "layers[0].value_offset: rows overlap those of layers[0].key_offset");
}

// The same layers, each in its own group.
class GroupedPagesTest : public PagesTest {
 protected:
  static constexpr uint64_t kPage = kPageTokens * kToken;

  static v1::DeclarePagesRequest Request(bool common_pages, uint64_t second_offset) {
    v1::DeclarePagesRequest request;
    for (const uint32_t layer : {1, 2}) {
      request.add_groups()->set_page_tokens(kPageTokens);
      request.mutable_groups(static_cast<int>(layer) - 1)->set_pages(kPages);
      *request.add_layers() = Layer(layer, layer == 1 ? 0 : second_offset, kPage, kToken);
      request.mutable_layers(static_cast<int>(layer) - 1)->set_group(layer - 1);
    }
    request.set_common_pages(common_pages);
    return request;
  }
  void ExpectRefused(const v1::DeclarePagesRequest& request, const std::string& error) const {
    const absl::Status status = Pages::Declare(model_, region_, request).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), StartsWith(error));
  }
};

TEST_F(GroupedPagesTest, CommonPagesMayShareMemoryPageByPage) {
  EXPECT_TRUE(Pages::Declare(model_, region_, Request(true, 0)).ok());
  EXPECT_TRUE(Pages::Declare(model_, region_, Request(true, kPages * kPage)).ok());
  EXPECT_TRUE(Pages::Declare(model_, region_, Request(false, kPages * kPage)).ok());
  ExpectRefused(Request(false, 0), "layers[1].key_offset: rows overlap those of layers[0].key_offset");
  constexpr char kOtherwise[] = "layers[1].value_offset: rows of two groups overlap; groups may only share whole pages";
  ExpectRefused(Request(true, kPage), kOtherwise);
  ExpectRefused(Request(true, 4 * 32), kOtherwise);
  v1::DeclarePagesRequest request = Request(true, 0);
  request.mutable_layers(1)->set_page_stride(2 * kPage);
  ExpectRefused(request, "layers[1].key_offset: rows of two groups overlap");
  // Rows of one group must not overlap, whatever the other group does.
  request = Request(true, 0);
  request.mutable_layers(0)->set_value_offset(0);
  ExpectRefused(request, "layers[0].value_offset: rows overlap those of layers[0].key_offset");
  request = Request(true, 0);
  request.mutable_layers(1)->set_group(0);
  ExpectRefused(request, "layers[1].key_offset: rows overlap those of layers[0].key_offset");
}

TEST_F(GroupedPagesTest, RefusesInvalidGroups) {
  const auto expect = [&](auto change, const std::string& error) {
    v1::DeclarePagesRequest request = Request(false, kPages * kPage);
    change(request);
    ExpectRefused(request, error);
  };
  using R = v1::DeclarePagesRequest;
  expect([](R& r) { r.set_page_tokens(kPageTokens); }, "page_tokens: must be 0 with groups, which set it per group");
  expect([](R& r) { r.set_pages(kPages); }, "pages: must be 0 with groups, which set it per group");
  expect([](R& r) { r.mutable_groups(1)->set_page_tokens(0); }, "groups[1].page_tokens: out of range");
  expect([](R& r) { r.mutable_groups(0)->set_pages(0); }, "groups[0].pages: out of range; expected 1 to");
  expect([](R& r) { r.mutable_layers(1)->set_group(2); }, "layers[1].group: 2; expected less than 2");
  expect([](R& r) { r.clear_groups(); }, "page_tokens: out of range");
  expect([](R& r) { r.set_common_pages(true), r.mutable_groups(1)->set_pages(8); },
         "groups[1].pages: must be equal in all groups with common_pages");
  v1::DeclarePagesRequest plain;
  plain.set_page_tokens(kPageTokens);
  plain.set_pages(kPages);
  plain.set_common_pages(true);
  ExpectRefused(plain, "common_pages: requires groups");
}

// A daemon without support for groups refuses such a request, because all fields of a request without groups are
// missing.
TEST_F(GroupedPagesTest, RefusesMissingFields) {
  v1::DeclarePagesRequest request = Request(true, 0);
  request.clear_groups();
  request.clear_common_pages();
  for (v1::PagedLayer& layer : *request.mutable_layers()) layer.clear_group();
  ExpectRefused(request, "page_tokens: out of range");
}

TEST_F(GroupedPagesTest, DivideAPageTable) {
  const auto pages = Pages::Declare(model_, region_, Request(false, kPages * kPage));
  ASSERT_TRUE(pages.ok()) << pages.status();
  const std::vector<uint32_t> counts = {2, 3};
  const std::vector<int32_t> table = {5, 6, 7, 8, 64};
  const auto tables = (*pages)->Divide(table.size(), counts);
  ASSERT_TRUE(tables.ok()) << tables.status();
  const std::vector<storage::PagedRows> rows = (*pages)->RowsIn(table, *tables);
  EXPECT_EQ(*rows[0].keys.page_table, 5);
  EXPECT_EQ(*rows[1].values.page_table, 7);
  EXPECT_EQ((*pages)->CheckPositions(table, *tables, 0, 2 * kPageTokens), absl::OkStatus());
  const auto expect = [&](const absl::Status& status, const std::string& error) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), error);
  };
  expect((*pages)->CheckPositions(table, *tables, 1, 2 * kPageTokens),
         "page_table: 2 entries are too few for 8 positions from 1 (group 0)");
  std::vector<int32_t> wrong = table;
  wrong[3] = 64;
  expect((*pages)->CheckPositions(wrong, *tables, 0, 2 * kPageTokens),
         "page_table[3]: page 64 is out of range; 64 pages are declared");
  expect((*pages)->Divide(5, std::vector<uint32_t>{5}).status(), "group_pages: 1 tables for 2 groups");
  expect((*pages)->Divide(6, counts).status(), "group_pages: 5 entries in total, but page_table has 6");
  expect((*pages)->Divide(5, {}).status(), "group_pages: 0 tables for 2 groups");
  EXPECT_EQ((*pages)->Divide(0, {}).value(), std::vector<size_t>(3)) << "nothing is to be written";
}

// Two attention layers of fp8 keys and values, with scales after all rows.
class ScaledPagesTest : public PagesTest {
 protected:
  static constexpr uint64_t kRow = 2 * (8 + 6), kRows = kPages * kPageTokens * kRow;  // sizes of one layer
  static constexpr uint64_t kScales = kPages * kPageTokens * 2 * sizeof(float);       // scales of one plane

  void SetUp() override {
    PagesTest::SetUp();
    Layout layout = model_->layout;
    for (const size_t i : {1, 2}) {
      auto& layer = std::get<AttentionLayer>(layout.layers[i]);
      layer.dtype = DType::kF8E4M3;
      layer.scales = true;
    }
    model_ = std::make_shared<Model>(std::make_shared<const Layout>(std::move(layout)));
  }

  static v1::PagedLayer Scaled(uint32_t layer) {
    const uint64_t first = (layer - 1) * kRows;
    v1::PagedLayer paged = Layer(layer, first, kPageTokens * kRow, kRow);
    paged.set_key_head_stride(8);
    paged.set_value_offset(first + 2 * 8);
    paged.set_value_head_stride(6);
    paged.set_key_scale_offset(2 * kRows + 2 * (layer - 1) * kScales);
    paged.set_value_scale_offset(paged.key_scale_offset() + kScales);
    paged.set_scale_page_stride(kPageTokens * 2 * sizeof(float));
    paged.set_scale_token_stride(2 * sizeof(float));
    paged.set_scale_head_stride(sizeof(float));
    return paged;
  }
};

TEST_F(ScaledPagesTest, LocateRowsAndScales) {
  v1::DeclarePagesRequest request;
  request.set_page_tokens(kPageTokens);
  request.set_pages(kPages);
  *request.add_layers() = Scaled(1);
  *request.add_layers() = Scaled(2);
  const absl::StatusOr<std::shared_ptr<const Pages>> pages = Pages::Declare(model_, region_, request);
  ASSERT_TRUE(pages.ok()) << pages.status();
  const storage::PagedRows rows = (*pages)->RowsIn({}, std::vector<size_t>{0, 0})[1];
  EXPECT_EQ(rows.keys.dtype, DType::kF8E4M3);
  EXPECT_EQ(rows.keys.base, region_->data() + kRows);
  EXPECT_EQ(rows.keys.token_stride, static_cast<int64_t>(kRow)) << "in elements of one byte";
  EXPECT_EQ(reinterpret_cast<std::byte*>(rows.values.scales), region_->data() + 2 * kRows + 3 * kScales);
  EXPECT_EQ(rows.values.scale_page_stride, int64_t{kPageTokens * 2});
  EXPECT_EQ(rows.values.scale_token_stride, 2);
  EXPECT_EQ(rows.values.scale_head_stride, 1);
}

TEST_F(ScaledPagesTest, RefusesInvalidScales) {
  const auto expect = [&](auto change, const std::string& error) {
    v1::PagedLayer second = Scaled(2);
    change(second);
    const absl::Status status = Declare(Scaled(1), second);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), StartsWith(error));
  };
  expect([](v1::PagedLayer& l) { l.set_key_scale_offset(l.key_scale_offset() + 2); },
         "layers[1].key_scale_offset: must be aligned to 4 bytes");
  expect([](v1::PagedLayer& l) { l.set_scale_page_stride(30); },
         "layers[1].scale_page_stride: must be aligned to 4 bytes");
  expect([](v1::PagedLayer& l) { l.set_scale_head_stride(0); }, "layers[1].scale_head_stride: rows overlap");
  expect([](v1::PagedLayer& l) { l.set_value_scale_offset(1 << 20); },
         "layers[1].value_scale_offset: the last page exceeds");
  expect([](v1::PagedLayer& l) { l.set_value_scale_offset(0); },
         "layers[1].value_scale_offset: rows overlap those of layers[0].key_offset");
}

}  // namespace
}  // namespace ashlar::daemon
