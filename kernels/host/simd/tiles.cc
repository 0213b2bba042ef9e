// SPDX-License-Identifier: Apache-2.0
#include "kernels/host/simd/tiles.h"

#include <atomic>

namespace ashlar::kernels::host {
namespace {

std::atomic<bool> allowed{true};

}  // namespace

void AllowTiles(bool allow) {
  allowed.store(allow, std::memory_order_relaxed);
}

}  // namespace ashlar::kernels::host

#if defined(__x86_64__) && defined(__linux__)

#include <cpuid.h>
#include <hwy/base.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

HWY_PUSH_ATTRIBUTES("amx-tile,amx-bf16")
namespace ashlar::kernels::host {
namespace {

constexpr size_t kSumsWide = 16;
constexpr int kTileStride = 64;  // bytes

// The operand of LDTILECFG.
struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes_a_row[16];
  uint8_t rows[16];
};
constexpr TileConfig kWholeTiles = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// The unit is on while one of these exists: while it is off, a thread switch saves no tiles.
class TilesOn {
 public:
  TilesOn() {
    _tile_loadconfig(&kWholeTiles);
    // The compiler does not know that tile loads read memory.
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
  ~TilesOn() { _tile_release(); }
  TilesOn(const TilesOn&) = delete;
  TilesOn& operator=(const TilesOn&) = delete;
};

// Tiles 0 to 3 are the sum, 4 and 5 the left operand, 6 and 7 the right one. For a half panel on the right, tiles 1, 3
// and 7 are not used; for one on the left, tiles 2, 3 and 5.
template <size_t kParts, bool kTransitionLeft, bool kHalf>
struct Unit {
  static constexpr bool kLower = kTransitionLeft || !kHalf, kRight = !kTransitionLeft || !kHalf;

  static void LoadSum(const float* from, size_t stride) {
    const auto bytes = static_cast<int64_t>(stride * sizeof(float));
    _tile_loadd(0, from, bytes);
    if constexpr (kRight) _tile_loadd(1, from + kSumsWide, bytes);
    if constexpr (kLower) _tile_loadd(2, from + kTileRows * stride, bytes);
    if constexpr (kLower && kRight) _tile_loadd(3, from + kTileRows * stride + kSumsWide, bytes);
  }
  static void StoreSum(float* to, size_t stride) {
    const auto bytes = static_cast<int64_t>(stride * sizeof(float));
    _tile_stored(0, to, bytes);
    if constexpr (kRight) _tile_stored(1, to + kSumsWide, bytes);
    if constexpr (kLower) _tile_stored(2, to + kTileRows * stride, bytes);
    if constexpr (kLower && kRight) _tile_stored(3, to + kTileRows * stride + kSumsWide, bytes);
  }
  static void LoadLeft(const uint16_t* tiles) {
    _tile_loadd(4, tiles, kTileStride);
    if constexpr (kLower) _tile_loadd(5, tiles + kTileNumbers, kTileStride);
  }
  static void LoadRight(const uint16_t* tiles) {
    _tile_loadd(6, tiles, kTileStride);
    if constexpr (kRight) _tile_loadd(7, tiles + kTileNumbers, kTileStride);
  }
  static void LoadTransition(const uint16_t* parts, size_t part) {
    parts += part * TileStepNumbers(1);
    kTransitionLeft ? LoadLeft(parts) : LoadRight(parts);
  }
  static void LoadPanel(const uint16_t* parts, size_t part) {
    parts += part * TileStepNumbers(1);
    kTransitionLeft ? LoadRight(parts) : LoadLeft(parts);
  }
  static void AddProducts(AheadTuple& ahead) {
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kRight) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kLower) _tile_dpbf16ps(2, 5, 6);
    if constexpr (kLower && kRight) _tile_dpbf16ps(3, 5, 7);
    ahead.Fetch();
  }

  // One step in depth: the smaller products first, in an order that loads few tiles twice.
  static void AddStep(const uint16_t* transition, const uint16_t* panel, AheadTuple& ahead) {
    if constexpr (kParts == 3) {
      LoadTransition(transition, 2);
      LoadPanel(panel, 0);
      AddProducts(ahead);
    }
    if constexpr (kParts >= 2) {
      LoadTransition(transition, 1);
      if constexpr (kParts == 2) LoadPanel(panel, 0);
      AddProducts(ahead);
      LoadPanel(panel, 1);
      AddProducts(ahead);
    }
    LoadTransition(transition, 0);
    if constexpr (kParts == 1) LoadPanel(panel, 1);
    AddProducts(ahead);
    LoadPanel(panel, 2);
    AddProducts(ahead);
    LoadPanel(panel, 0);
    AddProducts(ahead);
  }

  static void Add(const TileProduct& product, AheadTuple& ahead) {
    AheadTuple fetches = ahead;  // in registers
    const uint16_t* transition = product.transition;
    const TilesOn on;
    for (size_t block = 0; block < product.blocks; ++block) {
      const size_t first = block * kTileBlock;
      LoadSum(product.addend + (kTransitionLeft ? first * product.addend_stride : first), product.addend_stride);
      for (size_t step = 0; step < product.steps; ++step, transition += TileStepNumbers(kParts)) {
        AddStep(transition, product.panel + step * TileStepNumbers(kMaxTileParts), fetches);
      }
      StoreSum(product.sum + (kTransitionLeft ? first * product.sum_stride : first), product.sum_stride);
    }
    ahead = fetches;
  }
};

template <size_t kParts>
void AddInParts(const TileProduct& product, AheadTuple& ahead) {
  if (product.transition_left) {
    product.half_panel ? Unit<kParts, true, true>::Add(product, ahead) : Unit<kParts, true, false>::Add(product, ahead);
  } else {
    product.half_panel ? Unit<kParts, false, true>::Add(product, ahead)
                       : Unit<kParts, false, false>::Add(product, ahead);
  }
}

bool AskForTiles() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return (d & kBf16) != 0 && (d & kTile) != 0 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

bool HasTiles() {
  static const bool has = AskForTiles();
  return has && allowed.load(std::memory_order_relaxed);
}

void AddTileProduct(const TileProduct& product, AheadTuple& ahead) {
  if (product.parts == 1) return AddInParts<1>(product, ahead);
  if (product.parts == 2) return AddInParts<2>(product, ahead);
  AddInParts<3>(product, ahead);
}

}  // namespace ashlar::kernels::host
HWY_POP_ATTRIBUTES

#else  // no such CPU, or a kernel with a different interface

#include <cstdlib>

namespace ashlar::kernels::host {

bool HasTiles() {
  return false;
}

void AddTileProduct(const TileProduct&, AheadTuple&) {
  std::abort();  // never called without the unit
}

}  // namespace ashlar::kernels::host

#endif
