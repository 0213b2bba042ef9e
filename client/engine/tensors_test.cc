// SPDX-License-Identifier: Apache-2.0
#include "client/engine/tensors.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace ashlar::engine {
namespace {

ashlar::Layout OneLayer(TailOrder order) {
  return {.page_tokens = 16,
          .layers = {LinearLayer{.key_heads = 2,
                                 .value_heads = 2,
                                 .d_k = 3,
                                 .d_v = 4,
                                 .conv_channels = 6,
                                 .conv_kernel = 4,
                                 .conv_dtype = DType::kBF16,
                                 .conv_order = order}}};
}

TEST(CheckTensors, RefusesStridesThatOverlap) {
  const ashlar::Layout layout = OneLayer(TailOrder::kTokenFirst);
  float state[24] = {};
  uint16_t tail[18] = {};
  LinearTensors tensors{.layer = 0, .state = state, .conv_tail = tail};
  const auto say = [&] { return std::string(CheckTensors(layout, {}, {&tensors, 1}, false, "linear").message); };
  EXPECT_EQ(say(), "");
  for (const int64_t stride : {-1, 1, 11}) {
    tensors.state_head_stride = stride;
    EXPECT_EQ(say(), absl::StrCat("linear[0].state_head_stride: ", stride, "; heads overlap"));
  }
  tensors.state_head_stride = int64_t{1} << 62;  // in bytes, this wraps to 0
  EXPECT_EQ(say(), "linear[0].state_head_stride: 4611686018427387904; expected at most 1099511627776");
  tensors.state_head_stride = 12;
  EXPECT_EQ(say(), "");
  for (const int64_t stride : {-1, 1, 5}) {
    tensors.conv_row_stride = stride;
    EXPECT_EQ(say(), absl::StrCat("linear[0].conv_row_stride: ", stride, "; rows overlap"));
  }
  tensors.conv_row_stride = INT64_MAX;
  EXPECT_EQ(say(), "linear[0].conv_row_stride: 9223372036854775807; expected at most 1099511627776");
  tensors.conv_row_stride = 6;
  EXPECT_EQ(say(), "");
}

}  // namespace
}  // namespace ashlar::engine
