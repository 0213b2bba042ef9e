// SPDX-License-Identifier: Apache-2.0
// The interface of gpu/device_isa.cuh for a CPU: that header says what each instruction does, this one emulates
// it.
#pragma once

#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/cuda/emulator/block.h"
#include "kernels/cuda/emulator/cuda_runtime.h"
#include "kernels/dtype.h"

namespace ashlar::kernels::cuda {

template <typename T>
T* SharedMemory() {
  return static_cast<T*>(emulator::SharedBytes());
}
inline void SyncThreads() {
  emulator::Barrier();
}
inline void SyncWarp() {
  const char nothing = 0;
  emulator::Exchange("SyncWarp", &nothing, 1);
}
template <typename T>
T Shuffle(T value, int lane) {
  return emulator::Exchange("Shuffle", &value, sizeof(T)).template of<T>(lane);
}
template <typename T>
T ShuffleXor(T value, int mask) {
  return Shuffle(value, emulator::Lane() ^ mask);
}
inline uint64_t HighProduct(uint64_t x, uint64_t y) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint64_t>(static_cast<Wide>(x) * y >> 64);
}
inline void AtomicMax(uint32_t* to, uint32_t value) {
  *to = std::max(*to, value);
}

inline void CopyAsync16(void* shared, const void* global, bool valid) {
  const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
  if (!aligned(shared) || !aligned(global)) {
    std::fprintf(stderr, "CopyAsync16: off a multiple of 16\n");
    std::abort();
  }
  emulator::CopyLater(shared, valid ? global : nullptr, 16);
}
inline void CommitCopies() {
  emulator::CloseGroup();
}
template <int kPending>
void WaitForCopies() {
  emulator::WaitForGroups(kPending);
}

template <bool kTransposed>
void LoadMatrices(uint32_t (&to)[4], const void* row) {
  const uint16_t* const from = static_cast<const uint16_t*>(row);
  const emulator::Deposits rows = emulator::Exchange("LoadMatrices", &from, sizeof(from));
  const int g = emulator::Lane() / 4, t = emulator::Lane() % 4;
  for (int m = 0; m < 4; ++m) {
    uint32_t pair[2];
    for (int e = 0; e < 2; ++e) {
      const int row_index = kTransposed ? 2 * t + e : g, column = kTransposed ? g : 2 * t + e;
      pair[e] = rows.of<const uint16_t*>(8 * m + row_index)[column];
    }
    to[m] = pair[0] | pair[1] << 16;
  }
}

enum class Half16 { kF16, kBF16 };

template <Half16 kType>
uint16_t FromFloat(float value) {
  return static_cast<uint16_t>(kType == Half16::kF16 ? Half::From(value) : BFloat16::From(value));
}
template <Half16 kType>
uint32_t Pack(float first, float second) {
  return FromFloat<kType>(first) | uint32_t{FromFloat<kType>(second)} << 16;
}
template <Half16 kType>
float ToFloat(uint16_t bits) {
  return kType == Half16::kF16 ? Half::To(bits) : BFloat16::To(bits);
}
inline uint32_t FloatBits(float value) {
  return std::bit_cast<uint32_t>(value);
}
inline float FloatOf(uint32_t bits) {
  return std::bit_cast<float>(bits);
}

template <Half16 kType>
void MultiplyAdd(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Operands {
    uint32_t a[4], b[2];
  };
  const Operands mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const emulator::Deposits lanes = emulator::Exchange("MultiplyAdd", &mine, sizeof(mine));
  const auto half = [](uint32_t pair, int k) { return ToFloat<kType>(static_cast<uint16_t>(pair >> (16 * (k % 2)))); };
  const int g = emulator::Lane() / 4, t = emulator::Lane() % 4;
  for (int e = 0; e < 4; ++e) {
    const int row = g, upper = e / 2, column = 2 * t + e % 2;
    for (int k = 0; k < 16; ++k) {
      const int holder = k % 8 / 2;
      const float x = half(lanes.of<Operands>(4 * row + holder).a[upper + 2 * (k / 8)], k);
      const float y = half(lanes.of<Operands>(4 * column + holder).b[k / 8], k);
      c[e] += x * y;
    }
  }
}

inline float RoundToTf32(float value) {
  return FloatOf((FloatBits(value) + 0x1000u) & ~0x1fffu);
}
inline void MultiplyAddTf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
  struct Operands {
    float a[4], b[2];
  };
  const auto read = [](float x) { return FloatOf(FloatBits(x) & ~0x1fffu); };
  const Operands mine = {{read(a[0]), read(a[1]), read(a[2]), read(a[3])}, {read(b0), read(b1)}};
  const emulator::Deposits lanes = emulator::Exchange("MultiplyAddTf32", &mine, sizeof(mine));
  const int g = emulator::Lane() / 4, t = emulator::Lane() % 4;
  for (int e = 0; e < 4; ++e) {
    for (int k = 0; k < 8; ++k) {
      c[e] += lanes.of<Operands>(4 * g + k % 4).a[e / 2 + 2 * (k / 4)] *
              lanes.of<Operands>(4 * (2 * t + e % 2) + k % 4).b[k / 4];
    }
  }
}

}  // namespace ashlar::kernels::cuda
