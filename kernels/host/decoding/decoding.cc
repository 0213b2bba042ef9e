// SPDX-License-Identifier: Apache-2.0
// Drives decoding from buffers: the heads of all requests form one list of work, cut into runs of neighbours.
#include "kernels/host/decoding/decoding.h"

#include <algorithm>
#include <memory>

#include "kernels/host/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/decoding/decoding.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "kernels/host/decoding/decoding-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {

DecodeScratch& Scratch() {
  static thread_local const std::unique_ptr<DecodeScratch> scratch(new DecodeScratch);
  return *scratch;
}

// Decodes heads [begin, end), counted over all requests. While it decodes one head it prefetches the memory of the
// next.
void DecodeHeads(const VerifyDraftsArgs& args, int64_t begin, int64_t end) {
  const auto request_of = [&](int64_t i) -> const BufferedRequest& {
    return args.requests[static_cast<size_t>(i / args.shape.heads)];
  };
  const auto decoder_of = [&](int64_t i) {
    return HeadDecoder(args.shape, request_of(i), static_cast<int32_t>(i % args.shape.heads), Scratch());
  };
  for (int64_t i = begin; i < end; ++i) {
    Upcoming next_state;
    if (i + 1 < end) {
      const HeadDecoder next = decoder_of(i + 1);
      next.PrefetchInputs(args.inputs, (i + 1) / args.shape.heads * args.drafts, args.drafts);
      next_state = next.State();
    }
    decoder_of(i).Decode(args.inputs, i / args.shape.heads * args.drafts, args.drafts, args.out, args.out_stride,
                         next_state);
  }
  FinishStreaming();
}

void RebuildHead(const RebuildStateArgs& args, int32_t head) {
  HeadDecoder(args.shape, args.request, head, Scratch()).Rebuild(args.tokens, args.target);
}

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ashlar::kernels::host {
namespace {

HWY_EXPORT(DecodeHeads);
HWY_EXPORT(RebuildHead);

// Below this many floats of state in all heads, waking a worker takes longer than a token.
constexpr int64_t kFloatsWorthWaking = 1 << 17;
// Runs per worker: enough that none waits long for the last one, and few enough that most heads are followed by another
// one, whose memory they prefetch.
constexpr int64_t kRunsPerWorker = 8;

// Calls fn(begin, end) for runs of `heads` heads.
template <typename Fn>
void ForEachRun(const LinearShape& shape, int64_t heads, Workers* workers, const Fn& fn) {
  if (workers == nullptr || heads * shape.d_k * shape.d_v < kFloatsWorthWaking) return fn(0, heads);
  const int64_t length = std::max<int64_t>(1, heads / (workers->Size() * kRunsPerWorker));
  ParallelFor(*workers, (heads + length - 1) / length,
              [&](int64_t run) { fn(run * length, std::min(heads, (run + 1) * length)); });
}

}  // namespace

void DecodeBuffered(const DecodeBufferedArgs& args, Workers* workers) {
  // One draft of each request, which need not be accepted.
  VerifyDrafts({.shape = args.shape,
                .requests = args.requests,
                .drafts = 1,
                .inputs = args.inputs,
                .out = args.out,
                .out_stride = args.out_stride},
               workers);
}

void VerifyDrafts(const VerifyDraftsArgs& args, Workers* workers) {
  ForEachRun(args.shape, static_cast<int64_t>(args.requests.size()) * args.shape.heads, workers,
             [&](int64_t begin, int64_t end) {
               HWY_DYNAMIC_DISPATCH(DecodeHeads)
               (args, begin, end);
             });
}

void RebuildState(const RebuildStateArgs& args, Workers* workers) {
  ForEachRun(args.shape, args.shape.heads, workers, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      HWY_DYNAMIC_DISPATCH(RebuildHead)(args, static_cast<int32_t>(head));
    }
  });
}

}  // namespace ashlar::kernels::host
#endif
