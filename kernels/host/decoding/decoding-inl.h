// SPDX-License-Identifier: Apache-2.0
// Decoding one head of one request from its state and buffer. Included once for every target of Highway.
//
// Let E be the position of the last filled slot. Slots' keys are decayed to E, new tokens' keys and queries from E on,
// and the state by G_E: then a vector x reads x·(e^{G_E} S_0) + Σ_j (x·k̃_j) u_j. All reads of all new tokens are rows
// of one product with S_0, so that S_0 is read once; reads among the tokens of one call are added afterwards.

#if defined(ASHLAR_KERNELS_HOST_DECODING_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASHLAR_KERNELS_HOST_DECODING_INL_H_
#undef ASHLAR_KERNELS_HOST_DECODING_INL_H_
#else
#define ASHLAR_KERNELS_HOST_DECODING_INL_H_
#endif

#include <algorithm>
#include <cstddef>

#include "hwy/highway.h"
#include "kernels/decoding.h"
#include "kernels/host/decoding/products-inl.h"
#include "kernels/host/decoding/slots-inl.h"
#include "kernels/host/decoding/state-inl.h"
#include "kernels/host/linear/decay-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {

constexpr size_t kReads = 2 * kMaxDrafts;  // a key and a query per token

struct DecodeScratch {
  // One slot more for a flushed token.
  HWY_ALIGN float slot_keys[(kSlotBlock + 1) * kMaxHeadDim];
  HWY_ALIGN float slot_writes[(kSlotBlock + 1) * kMaxHeadDim];
  HWY_ALIGN float log_decay[kMaxHeadDim];
  HWY_ALIGN float decay[kMaxHeadDim];
  // New tokens.
  HWY_ALIGN float keys[kMaxDrafts * kMaxHeadDim];
  HWY_ALIGN float queries[kMaxDrafts * kMaxHeadDim];
  HWY_ALIGN float log_decays[kMaxDrafts * kMaxHeadDim];
  HWY_ALIGN float decays[kMaxDrafts * kMaxHeadDim];
  HWY_ALIGN float writes[kMaxDrafts * kMaxHeadDim];
  HWY_ALIGN float reads[kReads * kMaxHeadDim];
  HWY_ALIGN float products[kReads * kMaxHeadDim];
  HWY_ALIGN float coefficients[kReads * kSlotBlock];
  HWY_ALIGN float state[kMaxHeadDim * kMaxHeadDim];
};

class HeadDecoder {
 public:
  HeadDecoder(const LinearShape& shape, const BufferedRequest& request, int32_t head, DecodeScratch& scratch)
      : shape_(shape),
        request_(request),
        head_(head),
        d_k_(static_cast<size_t>(shape.d_k)),
        d_v_(static_cast<size_t>(shape.d_v)),
        key_width_(RoundUp(d_k_, kLanes)),
        write_width_(RoundUp(d_v_, kLanes)),
        slots_(shape, request.buffer, head),
        s_(scratch) {}

  // Prefetches what Decode reads first, except the state.
  void PrefetchInputs(const TokenInputs& inputs, int64_t first, int32_t tokens) const {
    const size_t head = static_cast<size_t>(head_), key = head / static_cast<size_t>(shape_.heads / shape_.key_heads);
    for (int64_t t = first; t < first + tokens; ++t) {
      Prefetch(inputs.q + t * inputs.q_stride + key * d_k_, d_k_ * sizeof(float));
      Prefetch(inputs.k + t * inputs.k_stride + key * d_k_, d_k_ * sizeof(float));
      Prefetch(inputs.v + t * inputs.v_stride + head * d_v_, d_v_ * sizeof(float));
    }
    slots_.PrefetchAll();
  }

  // The state, to be prefetched during another head's Decode.
  Upcoming State() const {
    const StateView& start = StartOf(request_);
    if (start.heads == nullptr) return {};
    return {start.heads[head_], d_k_ * d_v_ * ElementBytes(start.dtype)};
  }

  // `tokens` of the inputs starting with `first`. `upcoming`: the memory that is needed next.
  void Decode(const TokenInputs& inputs, int64_t first, int32_t tokens, float* out, int64_t out_stride,
              Upcoming upcoming) {
    const int32_t filled = request_.buffer.filled;
    for (int32_t t = 0; t < tokens; ++t) ReadToken(inputs, first + t, t);
    upcoming.Fetch(kFixedSteps / kFixedParts);
    FillReads(tokens);
    upcoming.Fetch(kFixedSteps / kFixedParts);
    std::fill_n(s_.products, Reads(tokens) * write_width_, 0.0f);
    std::fill_n(s_.log_decay, key_width_, 0.0f);
    for (int32_t end = filled; end > 0; end = (end - 1) / kSlotBlock * kSlotBlock) {
      ReadSlotBlock((end - 1) / kSlotBlock * kSlotBlock, end, &upcoming);
      MeetSlots(tokens);
    }
    if (request_.state.heads != nullptr) {
      HeadState state(shape_, StartOf(request_), head_, s_.state);
      if (request_.flush && (filled > kSlotBlock || !state.UpdatesAsStored())) state.Load();
      MeetState(state, tokens);
      upcoming.Fetch(kFixedSteps / kFixedParts);
      Solve(inputs, first, tokens, out, out_stride);
      upcoming.Fetch(kFixedSteps / kFixedParts);
      if (request_.flush) Flush(state, &upcoming);
    } else {
      Solve(inputs, first, tokens, out, out_stride);
    }
    if (request_.flush) return;
    for (int32_t t = 0; t < tokens; ++t) {
      slots_.Append(filled + t, Key(t), Write(t), s_.log_decays + static_cast<size_t>(t) * key_width_);
    }
  }

  void Rebuild(int32_t tokens, const StateView& target) {
    HeadState state(shape_, target, head_, s_.state);
    state.LoadFrom(request_.state);
    for (int32_t begin = 0; begin < tokens; begin += kSlotBlock) {
      std::fill_n(s_.log_decay, key_width_, 0.0f);
      ReadSlotBlock(begin, std::min(begin + kSlotBlock, tokens));
      DecaysOfSlots();
      state.Update(s_.decay, SlotKeys(), SlotWrites());
    }
    state.Store();
  }

 private:
  // kFixedSteps: the time of the fixed work per head, in reads of a state's row. kFixedParts: the number of parts in
  // which that work prefetches.
  static constexpr size_t kFixedSteps = 96, kFixedParts = 4;

  size_t Reads(int32_t tokens) const { return static_cast<size_t>(tokens) * (Erases(shape_.family) ? 2 : 1); }
  float* Key(int32_t t) { return s_.keys + static_cast<size_t>(t) * key_width_; }
  float* Query(int32_t t) { return s_.queries + static_cast<size_t>(t) * key_width_; }
  float* Decay(int32_t t) { return s_.decays + static_cast<size_t>(t) * key_width_; }
  float* Write(int32_t t) { return s_.writes + static_cast<size_t>(t) * write_width_; }
  MutableRows SlotKeys() { return {s_.slot_keys, key_width_, slot_count_, key_width_}; }
  MutableRows SlotWrites() { return {s_.slot_writes, write_width_, slot_count_, write_width_}; }

  void ReadToken(const TokenInputs& inputs, int64_t token, int32_t t) {
    const int64_t key = int64_t{head_ / (shape_.heads / shape_.key_heads)} * shape_.d_k;
    const auto copy = [&](const float* from, float* to) {
      std::fill(std::copy_n(from + key, d_k_, to), to + key_width_, 0.0f);
    };
    copy(inputs.k + token * inputs.k_stride, Key(t));
    copy(inputs.q + token * inputs.q_stride, Query(t));
    float* const logs = s_.log_decays + static_cast<size_t>(t) * key_width_;
    std::fill_n(logs, key_width_, 0.0f);
    if (SlotGateWidth(shape_) > 1) {
      std::copy_n(GateRow(shape_, inputs, token, static_cast<size_t>(head_)), d_k_, logs);
      return DecaysOf(logs, key_width_, Decay(t));
    }
    const double log_decay = LogDecay(shape_, inputs, token, static_cast<size_t>(head_));
    logs[0] = static_cast<float>(log_decay);
    std::fill_n(Decay(t), key_width_, DecayOf(log_decay));
  }

  // Rows of reads: the keys' if tokens erase, then the queries', each decayed from the last slot.
  void FillReads(int32_t tokens) {
    HWY_ALIGN float decay[kMaxHeadDim];
    std::fill_n(decay, key_width_, 1.0f);
    for (int32_t t = 0; t < tokens; ++t) {
      Multiply(decay, Decay(t), key_width_, decay);
      if (Erases(shape_.family)) Multiply(Key(t), decay, key_width_, s_.reads + static_cast<size_t>(t) * key_width_);
      Multiply(Query(t), decay, key_width_, s_.reads + (Reads(tokens) - static_cast<size_t>(tokens - t)) * key_width_);
    }
  }

  void ReadSlotBlock(int32_t begin, int32_t end, Upcoming* upcoming = nullptr) {
    slot_count_ = static_cast<size_t>(end - begin);
    slots_.Read(begin, end - begin, SlotKeys(), SlotWrites(), s_.log_decay, upcoming);
  }

  // The factors by which the read slots decay the state before them.
  void DecaysOfSlots() {
    if (SlotGateWidth(shape_) > 1) return DecaysOf(s_.log_decay, key_width_, s_.decay);
    const Vec decay = DecayOf(hn::Set(Tag(), s_.log_decay[0]));
    for (size_t i = 0; i < key_width_; i += kLanes) hn::Store(decay, Tag(), s_.decay + i);
  }

  void MeetSlots(int32_t tokens) {
    std::fill_n(s_.coefficients, Reads(tokens) * kSlotBlock, 0.0f);
    AddDots(s_.reads, key_width_, Reads(tokens), Const(SlotKeys()), s_.coefficients, kSlotBlock);
    AddProduct(s_.coefficients, kSlotBlock, Reads(tokens), Const(SlotWrites()), s_.products, write_width_);
  }

  void MeetState(HeadState& state, int32_t tokens) {
    DecaysOfSlots();
    for (size_t r = 0; r < Reads(tokens); ++r) {
      Multiply(s_.reads + r * key_width_, s_.decay, key_width_, s_.reads + r * key_width_);
    }
    state.AddReads(s_.reads, Reads(tokens), s_.products);
  }

  // Writes and outputs, from the tokens' reads of slots, of the state and of each other.
  void Solve(const TokenInputs& inputs, int64_t first, int32_t tokens, float* out, int64_t out_stride) {
    HWY_ALIGN float key[kMaxHeadDim];
    float* const outputs = s_.products + (Reads(tokens) - static_cast<size_t>(tokens)) * write_width_;
    for (int32_t t = 0; t < tokens; ++t) {
      MakeWrite(inputs, first + t, t);
      std::copy_n(Key(t), key_width_, key);
      for (int32_t later = t; later < tokens; ++later) {
        if (later > t) Multiply(key, Decay(later), key_width_, key);
        const size_t row = static_cast<size_t>(later) * write_width_;
        if (later > t && Erases(shape_.family)) AddScaled(Dot(Key(later), key), Write(t), s_.products + row);
        AddScaled(Dot(Query(later), key), Write(t), outputs + row);
      }
      std::copy_n(outputs + static_cast<size_t>(t) * write_width_, d_v_,
                  out + (first + t) * out_stride + int64_t{head_} * shape_.d_v);
    }
  }

  // u_t, once the products hold everything that token t reads.
  void MakeWrite(const TokenInputs& inputs, int64_t token, int32_t t) {
    const float* value = inputs.v + token * inputs.v_stride + int64_t{head_} * shape_.d_v;
    const float* read = s_.products + static_cast<size_t>(t) * write_width_;
    const float beta = BetaOf(shape_, inputs, token, static_cast<size_t>(head_));
    float* write = Write(t);
    for (size_t j = 0; j < d_v_; ++j) write[j] = beta * (Erases(shape_.family) ? value[j] - read[j] : value[j]);
    std::fill(write + d_v_, write + write_width_, 0.0f);
  }

  float Dot(const float* a, const float* b) const {
    float sum = 0;
    AddDots(a, key_width_, 1, ConstRows{b, key_width_, 1, key_width_}, &sum, 1);
    return sum;
  }

  void AddScaled(float factor, const float* from, float* to) const {
    AddProduct(&factor, 1, 1, ConstRows{from, write_width_, 1, write_width_}, to, write_width_);
  }

  // Applies all slots and token 0 to the state.
  void Flush(HeadState& state, Upcoming* upcoming) {
    const int32_t filled = request_.buffer.filled;
    const int32_t last = std::max(0, filled - 1) / kSlotBlock * kSlotBlock;
    for (int32_t begin = 0; begin < last; begin += kSlotBlock) {
      std::fill_n(s_.log_decay, key_width_, 0.0f);
      ReadSlotBlock(begin, begin + kSlotBlock);
      DecaysOfSlots();
      state.Update(s_.decay, SlotKeys(), SlotWrites(), upcoming);
    }
    if (last > 0) {  // otherwise the only block, and its decay, are still there
      std::fill_n(s_.log_decay, key_width_, 0.0f);
      ReadSlotBlock(last, filled);
      DecaysOfSlots();
    }
    for (size_t j = 0; j < slot_count_; ++j) Multiply(SlotKeys()[j], Decay(0), key_width_, SlotKeys()[j]);
    Multiply(s_.decay, Decay(0), key_width_, s_.decay);
    ++slot_count_;
    std::copy_n(Key(0), key_width_, SlotKeys()[slot_count_ - 1]);
    std::copy_n(Write(0), write_width_, SlotWrites()[slot_count_ - 1]);
    state.Update(s_.decay, SlotKeys(), SlotWrites(), upcoming);
    state.Store();
    if (request_.rounded.heads != nullptr) state.StreamTo(request_.rounded);
  }

  const LinearShape& shape_;
  const BufferedRequest& request_;
  const int32_t head_;
  const size_t d_k_, d_v_, key_width_, write_width_;  // widths: padded to whole vectors
  const HeadSlots slots_;
  DecodeScratch& s_;
  size_t slot_count_ = 0;  // slots of the last block that was read
};

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();

#endif
