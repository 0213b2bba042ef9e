// SPDX-License-Identifier: Apache-2.0
// Attention over a long context of cached segments: one decoding query, and the queries of a seam.
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/testing/names.h"
#include "tools/bench/kernel_cases.h"
#include "tools/bench/paged_planes.h"

namespace ashlar::bench {
namespace {

using kernels::AttendArgs;
using kernels::AttentionShape;

using Attend = kernels::Event (kernels::Kernels::*)(const AttendArgs&, kernels::Queue&) const;
constexpr std::pair<Attend, const char*> kOperations[] = {
    {&kernels::Kernels::AttendLanded, "AttendLanded"},
    {&kernels::Kernels::AttendUnrotated, "AttendUnrotated"},
    {&kernels::Kernels::AttendRotatedQuery, "AttendRotatedQuery"}};

// Attention layers of Qwen3-Next; latents as in large models.
constexpr AttentionShape kGqa = {
    .query_heads = 16, .kv_heads = 2, .key_dim = 256, .value_dim = 256, .scale = 1.0f / 16};
constexpr AttentionShape kMla = {
    .kind = AttentionKind::kMla, .query_heads = 32, .kv_heads = 1, .key_dim = 512, .value_dim = 64, .scale = 0.07f};
constexpr int32_t kRotatedDim = 64;
constexpr int64_t kSegmentTokens = 1024;

struct Context {
  AttentionShape shape;
  RowFormat format;
  int64_t tokens;
  int64_t queries;

  double Bytes() const {
    const size_t token = format.RowBytes(shape.key_dim) + format.RowBytes(shape.value_dim);
    return static_cast<double>(tokens * shape.kv_heads) * static_cast<double>(token);
  }
  double Flops() const {
    return 2.0 * (shape.QueryDim() + shape.OutDim()) * static_cast<double>(queries * shape.query_heads * tokens);
  }
  std::string Shape() const {
    return std::to_string(queries) + " queries, " + std::to_string(tokens) + " keys, heads " +
           std::to_string(shape.query_heads) + ":" + std::to_string(shape.kv_heads) + ", " +
           std::to_string(shape.key_dim) + "+" + std::to_string(shape.value_dim) + format.Suffix();
  }
};

// The context's pages, and queries at the end of the context.
class Prompt {
 public:
  explicit Prompt(const Context& context)
      : shape_(context.shape),
        keys_(context.format, context.tokens, shape_.kv_heads, shape_.key_dim, numbers_),
        values_(context.format, context.tokens, shape_.kv_heads, shape_.value_dim, numbers_),
        queries_(Floats(context.queries * shape_.query_heads * shape_.QueryDim())),
        out_(Floats(context.queries * shape_.query_heads * shape_.OutDim())),
        lse_(Floats(context.queries * shape_.query_heads)),
        frequencies_(kRotatedDim / 2) {
    for (size_t i = 0; i < frequencies_.size(); ++i) {
      frequencies_[i] = std::pow(1e7, -2.0 * static_cast<double>(i) / kRotatedDim);
    }
    for (int64_t at = 0; at < context.tokens; at += kSegmentTokens) {
      spans_.push_back({.keys = keys_.View(),
                        .values = values_.View(),
                        .first_slot = at,
                        .tokens = std::min(kSegmentTokens, context.tokens - at),
                        .position = at,
                        .origin = at});
    }
    for (int64_t i = 0; i < context.queries; ++i) positions_.push_back(context.tokens + i);
  }

  AttendArgs Args() {
    return {.shape = shape_,
            .rotation = {RopeStyle::kHalfSplit, kRotatedDim, frequencies_.data()},
            .spans = spans_,
            .tokens = static_cast<int64_t>(positions_.size()),
            .q = queries_.data(),
            .positions = positions_.data(),
            .out = out_.data(),
            .lse = lse_.data(),
            .q_stride = int64_t{shape_.query_heads} * shape_.QueryDim(),
            .out_stride = int64_t{shape_.query_heads} * shape_.OutDim()};
  }

 private:
  std::vector<float> Floats(int64_t count) {
    std::vector<float> floats(static_cast<size_t>(count));
    for (float& x : floats) x = numbers_.Next(1);
    return floats;
  }

  Numbers numbers_;
  const AttentionShape shape_;
  PagedPlane keys_, values_;
  std::vector<float> queries_, out_, lse_;
  std::vector<double> frequencies_;
  std::vector<kernels::KeySpan> spans_;
  std::vector<int64_t> positions_;
};

KernelCase AttendCase(const Context& context, Attend attend, const char* op) {
  KernelCase result{.op = op,
                    .family = context.shape.kind == AttentionKind::kMla ? "mla" : "gqa",
                    .dtype = kernels::testing::Name(context.format.dtype),
                    .shape = context.Shape(),
                    .bytes = context.Bytes(),
                    .flops = context.Flops()};
  result.prepare = [context, attend](const kernels::Kernels& kernels, kernels::Queue& queue) {
    constexpr double kColdBytes = 400 << 20;  // more than the caches hold
    auto prompts = std::make_shared<std::vector<std::unique_ptr<Prompt>>>();
    for (double bytes = 0; bytes < kColdBytes; bytes += context.Bytes()) {
      prompts->push_back(std::make_unique<Prompt>(context));
    }
    return [=, &kernels, &queue, round = size_t{0}]() mutable {
      (kernels.*attend)((*prompts)[round++ % prompts->size()]->Args(), queue).Wait();
    };
  };
  return result;
}

}  // namespace

std::vector<KernelCase> AttentionCases(bool quick) {
  const int64_t tokens = quick ? 2048 : 32768, queries = quick ? 4 : 64;
  std::vector<KernelCase> cases;
  for (const auto& [attend, op] : kOperations) {
    for (const RowFormat format : kFormats) {
      cases.push_back(AttendCase({kGqa, format, tokens, 1}, attend, op));
      cases.push_back(AttendCase({kMla, format, tokens, 1}, attend, op));
    }
    cases.push_back(AttendCase({kGqa, {}, tokens, queries}, attend, op));
    cases.push_back(AttendCase({kGqa, {DType::kBF16}, tokens, queries}, attend, op));
  }
  return cases;
}

}  // namespace ashlar::bench
