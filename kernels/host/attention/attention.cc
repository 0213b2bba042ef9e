// SPDX-License-Identifier: Apache-2.0
// Drives attention: splits a call into parts, and merges the partial results of each query.
#include "kernels/host/attention/attention.h"

#include <cmath>
#include <vector>

#include "kernels/host/attention/attention_plan.h"
#include "kernels/host/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/attention/attention.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "kernels/host/attention/attention-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {

PartialRows RunPart(const AttendPlan& plan, int64_t unit, int64_t chunk) {
  return attention::RunPart(plan, unit, chunk);
}

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ashlar::kernels::host {
namespace {

HWY_EXPORT(RunPart);

// One output row from a unit's parts, and with `merge` also from an earlier call's result.
void FinishRow(const AttendArgs& args, const PartialRows* parts, int64_t count, int64_t row, float* out, float* lse) {
  const int64_t width = args.shape.OutDim();
  const double before = args.merge ? double{*lse} : -INFINITY;
  double largest = before;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, double{parts[i].largest[row]});
  if (largest == -INFINITY) largest = 0;  // all scores are NaN or −∞: the sum is zero or NaN
  double sum = std::exp(before - largest);
  for (int64_t i = 0; i < count; ++i) sum += std::exp(parts[i].largest[row] - largest) * parts[i].sum[row];
  if (sum == 0) {  // nothing is visible
    std::fill(out, out + width, 0.0f);
    if (lse != nullptr) *lse = -INFINITY;
    return;
  }
  const auto kept = static_cast<float>(std::exp(before - largest) / sum);
  for (int64_t d = 0; d < width; ++d) out[d] = kept == 0 ? 0.0f : out[d] * kept;
  for (int64_t i = 0; i < count; ++i) {
    const auto weight = static_cast<float>(std::exp(parts[i].largest[row] - largest) / sum);
    const float* const seen = parts[i].out + row * parts[i].out_stride;
    for (int64_t d = 0; d < width; ++d) out[d] += weight * seen[d];
  }
  if (lse != nullptr) *lse = static_cast<float>(largest + std::log(sum));
}

void Finish(const AttendPlan& plan, int64_t unit, const PartialRows* parts, int64_t count) {
  const AttendArgs& args = plan.args;
  const int64_t group = plan.group(), heads = args.shape.query_heads;
  for (int64_t t = 0; t < plan.TokenCount(unit); ++t) {
    const int64_t token = plan.FirstToken(unit) + t;
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t row = head / group * plan.head_rows + t * group + head % group;
      FinishRow(args, parts, count, row, args.out + token * args.out_stride + head * args.shape.OutDim(),
                args.lse == nullptr ? nullptr : args.lse + token * heads + head);
    }
  }
}

// Memory for all parts of all units, [units, chunks], during a call.
class Parts {
 public:
  explicit Parts(const AttendPlan& plan) : plan_(plan) {
    thread_local std::vector<float> memory;
    thread_local std::vector<PartialRows> parts;
    const auto floats = static_cast<size_t>(plan.units * plan.chunks * Stride());
    if (memory.size() < floats) memory.resize(floats);
    if (parts.size() < static_cast<size_t>(plan.units * plan.chunks)) parts.resize(plan.units * plan.chunks);
    memory_ = memory.data();
    parts_ = parts.data();
  }

  void Keep(int64_t unit, int64_t chunk, const PartialRows& part) {
    const int64_t rows = plan_.Rows(), width = plan_.args.shape.OutDim();
    float* const to = memory_ + (unit * plan_.chunks + chunk) * Stride();
    std::copy_n(part.largest, rows, to);
    std::copy_n(part.sum, rows, to + rows);
    for (int64_t row = 0; row < rows; ++row) {
      std::copy_n(part.out + row * part.out_stride, width, to + 2 * rows + row * width);
    }
    parts_[unit * plan_.chunks + chunk] = {to, to + rows, to + 2 * rows, width};
  }

  const PartialRows* Of(int64_t unit) const { return parts_ + unit * plan_.chunks; }

 private:
  int64_t Stride() const { return plan_.Rows() * (2 + plan_.args.shape.OutDim()); }

  const AttendPlan& plan_;
  float* memory_;
  PartialRows* parts_;
};

void Attend(const AttendArgs& args, KeysStand stand, Workers* workers) {
  const AttendPlan plan(args, stand, workers == nullptr ? 1 : workers->Size());
  const auto run = HWY_DYNAMIC_DISPATCH(RunPart);
  if (plan.chunks == 1) {
    ParallelFor(workers, plan.units, [&](int64_t unit) {
      const PartialRows part = run(plan, unit, 0);
      Finish(plan, unit, &part, 1);
    });
    return;
  }
  Parts parts(plan);
  ParallelFor(workers, plan.units * plan.chunks, [&](int64_t i) {
    const int64_t unit = i / plan.chunks, chunk = i % plan.chunks;
    parts.Keep(unit, chunk, run(plan, unit, chunk));
  });
  ParallelFor(workers, plan.units, [&](int64_t unit) { Finish(plan, unit, parts.Of(unit), plan.chunks); });
}

}  // namespace

void AttendLanded(const AttendArgs& args, Workers* workers) {
  Attend(args, KeysStand::kLanded, workers);
}

void AttendUnrotated(const AttendArgs& args, Workers* workers) {
  Attend(args, KeysStand::kUnrotated, workers);
}

void AttendRotatedQuery(const AttendArgs& args, Workers* workers) {
  Attend(args, KeysStand::kZeroBased, workers);
}

}  // namespace ashlar::kernels::host
#endif
