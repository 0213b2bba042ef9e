// SPDX-License-Identifier: Apache-2.0
// Invalid arguments of decoding abort with the field's name.
#include <gtest/gtest.h>

#include "kernels/testing/backends.h"
#include "kernels/testing/decoding_inputs.h"

namespace ashlar::kernels::testing {
namespace {

TEST(DecodingChecksTest, NameTheField) {
  Random random(1);
  const DecodeLayer layer(random, Family::kGdn, StateOrder::kKeyFirst, 4);
  TypedState state(layer.shape, DType::kF32);
  SlotPages pages(random, layer.shape, DType::kF32, 8, 4);
  const auto view = [&] { return BufferedRequest{.state = state.View(), .buffer = pages.View(0)}; };
  std::vector<float> out(static_cast<size_t>(4 * layer.shape.heads * layer.shape.d_v));
  Runner runner(Reference());
  const auto decode = [&](auto change) {
    BufferedRequest request = view();
    DecodeBufferedArgs args{.shape = layer.shape, .inputs = layer.View(0, 1), .out = out.data()};
    change(args, request);
    args.requests = {&request, 1};
    runner.Run(args);
  };
  const auto verify = [&](auto change) {
    BufferedRequest request = view();
    VerifyDraftsArgs args{.shape = layer.shape, .drafts = 4, .inputs = layer.View(0, 4), .out = out.data()};
    change(args, request);
    args.requests = {&request, 1};
    runner.Run(args);
  };
  EXPECT_DEATH(decode([](auto&, auto& request) { request.buffer.filled = -1; }), "filled is negative");
  EXPECT_DEATH(decode([](auto&, auto& request) { request.buffer.page_table = nullptr; }), "page_table is null");
  EXPECT_DEATH(decode([](auto&, auto& request) { request.buffer.writes = nullptr; }), "keys, writes and gates");
  EXPECT_DEATH(decode([](auto&, auto& request) { request.buffer.page_tokens = 0; }), "page_tokens must be positive");
  EXPECT_DEATH(decode([](auto&, auto& request) { request.buffer.dtype = DType::kF8E4M3; }), "buffer.dtype");
  EXPECT_DEATH(decode([](auto&, auto& request) { request.state.dtype = DType::kF8E4M3; }), "state.dtype");
  EXPECT_DEATH(decode([](auto&, auto& request) { request.flush = true, request.state = {}; }), "flush needs a state");
  TypedState rounded(layer.shape, DType::kBF16);
  EXPECT_DEATH(decode([&](auto&, auto& request) { request.rounded = request.state; }), "rounded.dtype");
  EXPECT_DEATH(decode([&](auto&, auto& request) { request.rounded = rounded.View(), request.state = {}; }),
               "rounded needs a state of fp32");
  EXPECT_DEATH(decode([&](auto&, auto& request) { request.state = request.rounded = rounded.View(); }),
               "rounded needs a state of fp32");
  EXPECT_DEATH(decode([](auto& args, auto&) { args.inputs.tokens = 2; }), "inputs.tokens");
  EXPECT_DEATH(decode([](auto& args, auto&) { args.inputs.q = nullptr; }), "inputs.q");
  EXPECT_DEATH(decode([](auto& args, auto&) { args.out = nullptr; }), "out");
  EXPECT_DEATH(verify([](auto&, auto& request) { request.flush = true; }), "flush must be false");
  EXPECT_DEATH(verify([](auto& args, auto&) { args.drafts = 0; }), "drafts must lie in");
  EXPECT_DEATH(verify([](auto& args, auto&) { args.drafts = kMaxDrafts + 1; }), "drafts must lie in");
  EXPECT_DEATH(verify([](auto& args, auto&) { args.drafts = 3; }), "inputs.tokens");
  EXPECT_DEATH(
      runner.Run(RebuildStateArgs{.shape = layer.shape, .request = view(), .tokens = 1, .target = state.View()}),
      "tokens must lie in 0");
  EXPECT_DEATH(runner.Run(RebuildStateArgs{.shape = layer.shape, .request = view()}), "state is null");
  std::vector<float> table(static_cast<size_t>(layer.shape.heads * layer.shape.d_k * layer.shape.d_v));
  EXPECT_DEATH(decode([&](auto& args, auto&) {
                 args.shape.family = Family::kMamba1;
                 args.shape.decay_table = table.data();
                 args.inputs.g = nullptr;
               }),
               "mamba1 has no buffers");
}

}  // namespace
}  // namespace ashlar::kernels::testing
