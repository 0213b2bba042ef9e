// SPDX-License-Identifier: Apache-2.0
// Choosing the way of decoding a linear layer: the recurrence, or a buffer of some capacity (KVBuffer §3.2 and §3.4,
// counted with a flush that reads and writes the state in the pass that reads it anyway, and with only filled slots
// read). The cheapest way is chosen, by one of two kinds of costs:
//
//   bytes    decide where the memory's bandwidth is used up, as on GPUs (CostsOf)
//   seconds  decide elsewhere: a CPU core waits for its own reads, writes cost it nothing, and a slot takes
//            several times what its bytes would (MeasureDecoding in decoding_costs.h; docs/benchmarks/decoding.md)
#pragma once

#include <cstdint>
#include <optional>

#include "kernels/decoding.h"

namespace ashlar::kernels {

// Bytes of one request in one layer, of all its heads.
struct DecodeBytes {
  double state = 0;    // σ
  double slot = 0;     // b: one token's keys, writes and gates
  double rounded = 0;  // ρ: the state's copy of 16 bits; 0: none
};
// `rounded`: dtype of the state's 16-bit copy; nullopt: no copy.
DecodeBytes DecodeBytesOf(const LinearShape& shape, DType state, DType buffer,
                          std::optional<DType> rounded = std::nullopt);

// Bytes that decoding one token moves:
// reading and writing the state;
double RecurrentBytes(const DecodeBytes& bytes);
// the mean over `capacity` tokens of which the last flushes: σ + σ/c + b(c − 1)/2 + b(c − 1)/c. One token: recurrent.
// With a rounded copy, replace σ + σ/c by ρ(c − 1)/c + (2σ + ρ)/c; for c = 1 this exceeds the recurrence.
double ChunkwiseBytes(const DecodeBytes& bytes, int32_t capacity);

// The capacity that moves the fewest: √(2(σ − b)/b), with a rounded copy √(2(2σ − b)/b), rounded to a whole number. 1
// if slots are too large for any buffer. With a copy it may be larger even if no buffer moves fewer bytes than the
// recurrence.
int32_t BestCapacity(const DecodeBytes& bytes);

// The costs of one token of one request in one layer, all in the same unit.
struct DecodeCosts {
  double advance = 0;     // without a buffer, by AdvanceSeam
  double recurrent = 0;   // without a buffer, by a DecodeBuffered that flushes
  double read = 0;        // with an empty buffer: fills its first slot, and reads the state or its copy
  double flush = 0;       // with an empty buffer: reads and writes the state, and writes its copy
  double slot = 0;        // per filled slot, for a token that does not flush
  double flush_slot = 0;  // per filled slot, for a token that flushes
  double stateless = 0;   // without a state and with an empty buffer
};
DecodeCosts CostsOf(const DecodeBytes& bytes);

// The mean over `capacity` tokens of which the last flushes.
double ChunkwiseCost(const DecodeCosts& costs, int32_t capacity);

// Recurrent decoding does not use a rounded copy, and moves fewer bytes without one.
enum class DecodeForm : uint8_t { kRecurrent = 1, kChunkwise = 2, kKvOnly = 3 };

struct DecodeChoice {
  DecodeForm form = DecodeForm::kRecurrent;
  int32_t capacity = 1;  // flush the token that finds capacity − 1 filled slots; 0: none does, for kKvOnly, and for
                         // kRecurrent if AdvanceSeam is faster
  double cost = 0;       // a token, in the costs' unit
};
inline constexpr int32_t kMostCapacity = 64;
// A buffer costs memory and delayed states, and measured costs vary between runs: a buffer that costs more than this
// fraction of the recurrence is not chosen.
inline constexpr double kWorthwhile = 0.9;
// `buffered_context`: the number of tokens so far if all of them are in the buffer and no state exists yet; none if
// there is a state, which KV-only decoding cannot use.
DecodeChoice ChooseDecoding(const DecodeCosts& costs, std::optional<int64_t> buffered_context);

}  // namespace ashlar::kernels
