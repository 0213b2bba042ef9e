// SPDX-License-Identifier: Apache-2.0
// Matrices of fp32 cut into parts of bf16, in the order in which the matrix unit reads them (tiles.h). Included once
// for every target of Highway; of use if a panel is as wide as two tiles.
//
// An fp32 number is the sum of three bf16 numbers: each part is the rounded remainder of the earlier parts. The product
// of two such sums is the sum of the six products of parts that exceed 2⁻²⁴ of it. That is six times the work, on a
// unit that does sixteen times as much work per cycle as two units of fused multiply-adds. fp16 numbers are exactly two
// parts, and bf16 numbers one.
//
// The unit treats numbers below the normal range as zero. Infinities, and numbers within 2⁻⁹ of the largest fp32
// number, make their products NaN.

#if defined(ASHLAR_KERNELS_HOST_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASHLAR_KERNELS_HOST_TILES_INL_H_
#undef ASHLAR_KERNELS_HOST_TILES_INL_H_
#else
#define ASHLAR_KERNELS_HOST_TILES_INL_H_
#endif

#include <cstddef>
#include <type_traits>

#include "kernels/host/simd/matrix-inl.h"
#include "kernels/host/simd/panel-inl.h"
#include "kernels/host/simd/tiles.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {

constexpr bool kPanelsAreTiles = kLanes == kTileRows && kWidth == kTileBlock;

// Returns whether products with keys of d_k dimensions run on the matrix unit: few dimensions would leave tiles mostly
// empty.
inline bool SuitsTiles(size_t d_k) {
  return kPanelsAreTiles && d_k >= kTileDepth && HasTiles();
}

// The parts of the pairs (low, high), one after another, `apart` numbers apart.
template <size_t kParts>
HWY_INLINE void SplitPairs(Vec low, Vec high, uint16_t* HWY_RESTRICT to, size_t apart) {
  const hn::RebindToUnsigned<Tag> bits;
  const auto half = hn::Set(bits, 0x8000u), upper = hn::Set(bits, 0xffff0000u);
  for (size_t part = 0; part < kParts; ++part) {
    auto low_bits = hn::BitCast(bits, low), high_bits = hn::BitCast(bits, high);
    // The last part is the exact remainder. Rounded, it could turn a NaN of all ones into zero.
    if (part + 1 < kParts) {
      low_bits = hn::Add(low_bits, half);
      high_bits = hn::Add(high_bits, half);
    }
    high_bits = hn::And(high_bits, upper);
    hn::Store(hn::Or(high_bits, hn::ShiftRight<16>(low_bits)), bits, reinterpret_cast<uint32_t*>(to + part * apart));
    low = hn::Sub(low, hn::BitCast(Tag(), hn::And(low_bits, upper)));
    high = hn::Sub(high, hn::BitCast(Tag(), high_bits));
  }
}

// Number of parts that represent every number of a type.
template <class E>
constexpr size_t kTileParts = E::kIsF32                ? kMaxTileParts
                              : std::is_same_v<E, F16> ? 2
                                                       : 1;

// The first numbers of a vector, as many as are left.
template <class E>
HWY_INLINE Vec LoadLeftOver(const typename E::Stored* HWY_RESTRICT from, size_t begin, size_t end) {
  if (begin + kLanes <= end) return E::Load(from + begin);
  return begin < end ? LoadPart<E>(from + begin, end - begin) : hn::Zero(Tag());
}

// A matrix of E with rows `stride` numbers apart, starting at some element; elements outside count as zero.
template <class E>
struct MatrixCorner {
  const typename E::Stored* from;
  size_t stride, rows, columns;  // rows and columns that remain

  MatrixCorner At(size_t row, size_t column) const {
    return {from + row * stride + column, stride, rows > row ? rows - row : 0, columns > column ? columns - column : 0};
  }
  HWY_INLINE Vec Load(size_t row, size_t column) const {
    return LoadLeftOver<E>(from + row * stride, column, row < rows ? columns : 0);
  }
};

// Tiles of every part of a left operand. Depths k and k + 16 form pairs, so that both halves come from whole vectors.
template <class E>
HWY_INLINE void SplitLeftTile(const MatrixCorner<E>& corner, uint16_t* HWY_RESTRICT to) {
  for (size_t i = 0; i < kTileRows; ++i) {
    SplitPairs<kTileParts<E>>(corner.Load(i, 0), corner.Load(i, kLanes), to + i * kTileDepth, TileStepNumbers(1));
  }
}
// The same of the matrix's transpose.
template <class E>
HWY_INLINE void SplitLeftTileTransposed(const MatrixCorner<E>& corner, uint16_t* HWY_RESTRICT to) {
  HWY_ALIGN uint16_t tiles[kTileParts<E> * kTileNumbers];
  for (size_t k = 0; k < kTileRows; ++k) {
    SplitPairs<kTileParts<E>>(corner.Load(k, 0), corner.Load(k + kTileRows, 0), tiles + k * kTileDepth, kTileNumbers);
  }
  for (size_t part = 0; part < kTileParts<E>; ++part) {
    // Pairs are moved as if they were numbers.
    Transpose(reinterpret_cast<const float*>(tiles + part * kTileNumbers), kTileRows, kTileRows, kTileRows,
              reinterpret_cast<float*>(to + part * TileStepNumbers(1)), kTileRows);
  }
}
// For a right operand.
template <class E>
HWY_INLINE void SplitRightTile(const MatrixCorner<E>& corner, uint16_t* HWY_RESTRICT to) {
  for (size_t i = 0; i < kTileRows; ++i) {
    SplitPairs<kTileParts<E>>(corner.Load(i, 0), corner.Load(i + kTileRows, 0), to + i * kTileDepth,
                              TileStepNumbers(1));
  }
}

// The operand's side in a product, and whether its memory holds the transpose.
enum class TileSide { kLeft, kLeftTransposed, kRight };

// All parts of a transition, or of a panel as kTileBlock rows or columns of a matrix of E.
template <TileSide kSide, class E>
HWY_NOINLINE void SplitOperand(MatrixCorner<E> matrix, size_t width, size_t depth, uint16_t* HWY_RESTRICT to) {
  for (size_t block = 0; block < width; block += kTileBlock) {
    for (size_t k = 0; k < depth; k += kTileDepth, to += TileStepNumbers(kTileParts<E>)) {
      for (size_t tile = 0; tile < 2; ++tile) {
        const size_t first = block + tile * kTileRows;
        if constexpr (kSide == TileSide::kLeft) {
          SplitLeftTile<E>(matrix.At(first, k), to + tile * kTileNumbers);
        } else if constexpr (kSide == TileSide::kLeftTransposed) {
          SplitLeftTileTransposed<E>(matrix.At(k, first), to + tile * kTileNumbers);
        } else {
          SplitRightTile<E>(matrix.At(k, first), to + tile * kTileNumbers);
        }
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();

#endif
