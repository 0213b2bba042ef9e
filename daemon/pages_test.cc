#include "daemon/pages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "ashlar/v1/cache.pb.h"
#include "daemon/testing/node.h"
#include "daemon/unique_fd.h"

namespace ashlar::daemon {
namespace {

using ::testing::StartsWith;

// Two attention layers of 2 heads, keys of 32 bytes and values of 24.
class PagesTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kPages = 64, kPageTokens = 4;
  static constexpr uint64_t kKeys = 2 * 32, kToken = 2 * (32 + 24);  // of one layer, all heads

  void SetUp() override {
    UniqueFd memfd;
    region_ = *Region::Host(1 << 20, &memfd);
    auto model = std::make_shared<Model>();
    model->layout = SmallLayout();
    model->layout.layers.push_back(model->layout.layers[1]);
    model_ = model;
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

TEST_F(PagesTest, LayersMayLieOneBehindTheOtherOrInterleave) {
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

}  // namespace
}  // namespace ashlar::daemon
