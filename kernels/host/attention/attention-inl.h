// SPDX-License-Identifier: Apache-2.0
// One part of a call of attention: a block of query rows passes over blocks of keys with two products and a running
// softmax, so that scores never leave the cache. Included once for every target of Highway.
//
// Rows in scratch memory are padded with zeros to whole tiles, so that products have no remainder. Keys and values are
// read in place in their pages, unless they must be converted, rotated or padded.
#if defined(ASHLAR_KERNELS_HOST_ATTENTION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASHLAR_KERNELS_HOST_ATTENTION_INL_H_
#undef ASHLAR_KERNELS_HOST_ATTENTION_INL_H_
#else
#define ASHLAR_KERNELS_HOST_ATTENTION_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "kernels/host/attention/attention_plan.h"
#include "kernels/host/attention/attention_products-inl.h"
#include "kernels/host/attention/attention_tiles-inl.h"
#include "kernels/host/attention/key_block-inl.h"
#include "kernels/host/rows/rows_vector.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {
namespace attention {

static_assert(AttendPlan::kTile % kRowTile == 0);

// One thread's working memory; it grows to the largest call so far.
struct Scratch {
  KeyAngles angles;
  std::vector<float> memory;

  // Aligned areas of the given sizes, one after another, filled with zeros.
  template <size_t N>
  void Divide(const size_t (&floats)[N], float* (&areas)[N]) {
    constexpr size_t kAlign = 64 / sizeof(float);
    size_t total = kAlign;
    for (const size_t n : floats) total += RoundUp(n, kAlign);
    if (memory.size() < total) memory.resize(total);
    const size_t past = reinterpret_cast<uintptr_t>(memory.data()) / sizeof(float) % kAlign;
    float* at = memory.data() + (kAlign - past) % kAlign;
    for (size_t i = 0; i < N; ++i) {
      areas[i] = at;
      std::fill_n(at, floats[i], 0.0f);
      at += RoundUp(floats[i], kAlign);
    }
  }
};

// One plane of a block: keys, rotary key parts, or values.
struct Plane {
  int32_t dim = 0;
  size_t stride = 0;  // stride of staged rows: the padded dimension
  float* staged = nullptr;
  const KeyAngles* angles = nullptr;  // set if keys are rotated when they are loaded
  StageFunction stage = nullptr;      // null: rows are read in place
  size_t row_bytes = 0;
  DType dtype = DType::kF32;  // type of the rows that a product reads
  RawRows raw[2];             // rows of the current block and the next
  const std::byte* rows[kMaxBlock];

  // `whole`: dimensions per product. The matrix unit (`tiles`) takes rows of any type.
  void Read(const PagedSlots& slots, size_t whole, bool tiles) {
    const bool as_stored = angles == nullptr && slots.scales == nullptr && static_cast<size_t>(dim) % whole == 0;
    const bool in_place = as_stored && (tiles || slots.dtype == DType::kF32);
    stage = in_place ? nullptr : StageFunctionOf(slots.dtype);
    dtype = in_place ? slots.dtype : DType::kF32;
    row_bytes = static_cast<size_t>(dim) * ElementBytes(slots.dtype);
  }

  // Rows past the last repeat it, because products take `whole` keys at a time.
  void Load(size_t which, size_t count, size_t whole) {
    if (stage != nullptr) stage(raw[which], count, dim, angles, staged, stride);
    for (size_t j = 0; j < RoundUp(count, whole); ++j) {
      const size_t row = std::min(j, count - 1);
      rows[j] = stage != nullptr ? reinterpret_cast<const std::byte*>(staged + row * stride) : raw[which].row[row];
    }
  }
  // Only for fp32 rows.
  const float* const* floats() const { return reinterpret_cast<const float* const*>(rows); }
};

// Splits a plane's rows, as keys or as values of `columns` numbers, into parts. Returns their number.
inline size_t SplitKeys(const Plane& plane, Prefetcher& ahead, uint16_t* to) {
  size_t parts = 0;
  WithStored(plane.dtype, [&](auto e) HWY_ATTR {
    using E = decltype(e);
    parts = kTileParts<E>;
    SplitRowsLeft<E>(plane.rows, plane.stride, ahead, to);
  });
  return parts;
}
inline size_t SplitValues(const Plane& plane, size_t columns, Prefetcher& ahead, uint16_t* to) {
  size_t parts = 0;
  WithStored(plane.dtype, [&](auto e) HWY_ATTR {
    using E = decltype(e);
    parts = kTileParts<E>;
    SplitRowsRight<E>(plane.rows, columns, ahead, to);
  });
  return parts;
}

class Part {
 public:
  Part(const AttendPlan& plan, int64_t unit)
      : plan_(plan),
        shape_(plan.args.shape),
        mla_(shape_.kind == AttentionKind::kMla),
        group_(static_cast<size_t>(plan.group())),
        first_token_(plan.FirstToken(unit)),
        tokens_(static_cast<size_t>(plan.TokenCount(unit))),
        head_rows_(static_cast<size_t>(plan.head_rows)),
        rows_(static_cast<size_t>(plan.Rows())),
        tiles_(kPanelsAreTiles && plan.tiles) {
    key_ = {.dim = shape_.key_dim, .stride = RoundUp(static_cast<size_t>(shape_.key_dim), mla_ ? kColumns : kLanes)};
    other_ = {.dim = shape_.value_dim,
              .stride = RoundUp(static_cast<size_t>(shape_.value_dim), mla_ ? kLanes : kColumns)};
    query_stride_ = key_.stride + (mla_ ? other_.stride : 0);
    out_stride_ = mla_ ? key_.stride : other_.stride;
    block_ = tiles_ || query_stride_ <= 128 ? kMaxBlock : kMaxBlock / 2;
    depths_ = TileSteps(key_.stride) + (mla_ ? TileSteps(other_.stride) : 0);
    // For tiles: all heads' queries, a block's keys or values, its weights and its scores.
    const size_t step = tiles_ ? TileStepNumbers(kMaxTileParts) * sizeof(uint16_t) / sizeof(float) : 0;
    const size_t panels = TileBlocks(head_rows_);
    thread_local Scratch scratch;
    float* areas[10];
    scratch.Divide(
        {rows_ * query_stride_, head_rows_ * kMaxBlock, rows_ * out_stride_, 2 * rows_ + head_rows_,
         block_ * key_.stride, block_ * other_.stride, static_cast<size_t>(shape_.kv_heads) * panels * depths_ * step,
         std::max(depths_, TileBlocks(out_stride_)) * step, step, tiles_ ? panels * kTileBlock * kTileBlock : 0},
        areas);
    queries_ = areas[0];
    scores_ = areas[1];
    out_ = areas[2];
    largest_ = areas[3];
    sum_ = largest_ + rows_;
    factor_ = sum_ + rows_;
    key_.staged = areas[4];
    other_.staged = areas[5];
    query_tiles_ = reinterpret_cast<uint16_t*>(areas[6]);
    block_tiles_ = reinterpret_cast<uint16_t*>(areas[7]);
    weight_tiles_ = reinterpret_cast<uint16_t*>(areas[8]);
    products_ = areas[9];
    std::fill_n(largest_, rows_, -INFINITY);
    if (plan.stand == KeysStand::kUnrotated && plan.args.rotation.style != RopeStyle::kNone) {
      scratch.angles.Prepare(plan.args.rotation, block_);
      angles_ = &scratch.angles;
      (mla_ ? other_ : key_).angles = angles_;
    }
    const int64_t* const positions = plan.args.positions + first_token_;
    earliest_ = *std::min_element(positions, positions + tokens_);
    latest_ = *std::max_element(positions, positions + tokens_);
  }

  void Run(int64_t chunk) {
    int64_t begin = chunk * plan_.chunk_keys, end = std::min(plan_.keys, begin + plan_.chunk_keys);
    bool loaded = false;
    for (const KeySpan& span : plan_.args.spans) {
      // The part of the span inside the chunk that some query sees.
      int64_t first = std::max<int64_t>(begin, 0), last = std::min(end, span.tokens);
      begin -= span.tokens;
      end -= span.tokens;
      last = std::min(last, latest_ + 1 - span.position);
      if (shape_.window > 0) first = std::max(first, earliest_ - shape_.window + 1 - span.position);
      if (first >= last) continue;
      if (!loaded || plan_.stand == KeysStand::kZeroBased) {
        LoadQueries(plan_.stand == KeysStand::kZeroBased ? span.origin : 0);
        loaded = true;
      }
      AttendSpan(span, first, last);
    }
  }

  PartialRows Result() const { return {largest_, sum_, out_, static_cast<int64_t>(out_stride_)}; }

 private:
  static constexpr size_t kColumns = kVecs * kLanes;

  // Returns the index of a kv head's row among all rows.
  size_t RowOf(int32_t kv_head, size_t row) const { return static_cast<size_t>(kv_head) * head_rows_ + row; }

  // Queries times the scale of scores, rotated to their positions relative to `origin`.
  void LoadQueries(int64_t origin) {
    const AttendArgs& args = plan_.args;
    const int32_t turned = args.rotation.style == RopeStyle::kNone ? 0 : args.rotation.rotary_dim;
    const size_t second = mla_ ? key_.stride : 0;  // first rotated dimension
    for (size_t t = 0; t < tokens_; ++t) {
      const int64_t token = first_token_ + static_cast<int64_t>(t);
      std::optional<Turn> turn;
      if (turned > 0) turn.emplace(args.rotation, args.positions[token] - origin);
      for (int32_t head = 0; head < shape_.kv_heads; ++head) {
        float* const rows = queries_ + RowOf(head, t * group_) * query_stride_;
        for (size_t g = 0; g < group_; ++g) {
          const size_t query_head = static_cast<size_t>(head) * group_ + g;
          LoadQuery(args.q + token * args.q_stride + query_head * static_cast<size_t>(shape_.QueryDim()),
                    rows + g * query_stride_);
          for (int32_t i = 0; i < turned; ++i) rows[g * query_stride_ + second + i] *= args.rotation.scale;
        }
        if (!turn) continue;
        TurnRows(*turn,
                 {.rows = static_cast<int64_t>(group_),
                  .dim = static_cast<int32_t>(query_stride_),
                  .source = rows + second,
                  .target = rows + second},
                 Stores::kCached);
      }
    }
    if (tiles_) SplitAllQueries();
  }

  uint16_t* QueryTiles(size_t head, size_t panel) const {
    return query_tiles_ + (head * TileBlocks(head_rows_) + panel) * depths_ * TileStepNumbers(kMaxTileParts);
  }
  void SplitAllQueries() {
    if constexpr (kPanelsAreTiles) {
      for (size_t head = 0; head < static_cast<size_t>(shape_.kv_heads); ++head) {
        const float* const q = queries_ + head * head_rows_ * query_stride_;
        SplitQueries(q, query_stride_, head_rows_, key_.stride, 0, depths_, QueryTiles(head, 0));
        if (!mla_) continue;
        SplitQueries(q + key_.stride, query_stride_, head_rows_, other_.stride, TileSteps(key_.stride), depths_,
                     QueryTiles(head, 0));
      }
    }
  }

  void LoadQuery(const float* from, float* to) const {
    for (int32_t i = 0; i < shape_.key_dim; ++i) to[i] = from[i] * shape_.scale;
    if (!mla_) return;
    for (int32_t i = 0; i < shape_.value_dim; ++i) to[key_.stride + i] = from[shape_.key_dim + i] * shape_.scale;
  }

  // Keys first … last − 1 of a span, block by block, all heads of each block. While one head of a block is processed,
  // the next is prefetched.
  void AttendSpan(const KeySpan& span, int64_t first, int64_t last) {
    key_.Read(span.keys, mla_ ? kColumns : kLanes, tiles_);
    other_.Read(span.values, mla_ ? kLanes : kColumns, tiles_);
    if (angles_ != nullptr) angles_->MoveTo(span.position + first);
    const auto locate = [&](int64_t at, int32_t head, size_t which) {
      if (at >= last) return size_t{0};
      const auto count = static_cast<size_t>(std::min<int64_t>(static_cast<int64_t>(block_), last - at));
      Locate(span.keys, span.first_slot + at, head, count, key_.raw[which]);
      Locate(span.values, span.first_slot + at, head, count, other_.raw[which]);
      return count;
    };
    const size_t whole = tiles_ ? kMaxBlock : kKeyTile;
    size_t which = 0, count = locate(first, 0, 0);
    for (int64_t at = first; at < last; at += static_cast<int64_t>(block_)) {
      for (int32_t head = 0; head < shape_.kv_heads; ++head) {
        const bool wraps = head + 1 == shape_.kv_heads;
        const size_t next = locate(wraps ? at + static_cast<int64_t>(block_) : at, wraps ? 0 : head + 1, which ^ 1);
        key_.Load(which, count, whole);
        other_.Load(which, count, whole);
        tiles_ ? ScoreOnTiles(head, key_.raw[which ^ 1], next) : Score(head, count, key_.raw[which ^ 1], next);
        Weigh(head, span.position + at, count);
        tiles_ ? AddWeightedOnTiles(head, other_.raw[which ^ 1], next)
               : AddWeighted(head, count, other_.raw[which ^ 1], next);
        which ^= 1;
        count = next;
      }
      if (angles_ != nullptr) angles_->NextBlock();
    }
  }

  void Score(int32_t head, size_t count, const RawRows& next, size_t next_count) {
    const Tag d;
    const float* const queries = queries_ + RowOf(head, 0) * query_stride_;
    const size_t dims = std::max<size_t>(query_stride_ / (kVecsOfStep * kLanes), 1);
    const size_t steps = head_rows_ / kRowTile * (RoundUp(count, kKeyTile) / kKeyTile) * dims;
    Prefetcher ahead(next, next_count, key_.row_bytes, steps);
    for (size_t r = 0; r < head_rows_; r += kRowTile) {
      const float* const q = queries + r * query_stride_;
      for (size_t j = 0; j < count; j += kKeyTile) {
        Vec sums[kRowTile][kKeyTile];
        for (auto& row : sums) {
          for (Vec& sum : row) sum = hn::Zero(d);
        }
        AddScores(q, query_stride_, key_.floats() + j, key_.stride, ahead, sums);
        if (mla_) AddScores(q + key_.stride, query_stride_, other_.floats() + j, other_.stride, ahead, sums);
        for (size_t i = 0; i < kRowTile; ++i) {
          StoreSums(sums[i][0], sums[i][1], sums[i][2], sums[i][3], scores_ + (r + i) * kMaxBlock + j);
        }
      }
    }
  }

  // For keys in two planes, possibly of different types, one product is added to the other.
  void ScoreOnTiles(int32_t head, const RawRows& next, size_t next_count) {
    if constexpr (kPanelsAreTiles) {
      std::fill_n(products_, TileBlocks(head_rows_) * kTileBlock * kTileBlock, 0.0f);
      Prefetcher ahead(next, next_count, key_.row_bytes, depths_ * kTileBlock);
      AddScoresOnTiles(head, key_, 0, ahead);
      if (mla_) AddScoresOnTiles(head, other_, TileSteps(key_.stride), ahead);
      for (size_t r = 0; r < head_rows_; r += kTileBlock) {
        Transpose(products_ + r * kTileBlock, kTileBlock, std::min(kTileBlock, head_rows_ - r), kMaxBlock,
                  scores_ + r * kMaxBlock, kMaxBlock);
      }
    }
  }
  // Depths of queries from `first` on are the plane's.
  void AddScoresOnTiles(int32_t head, const Plane& plane, size_t first, Prefetcher& ahead) {
    const size_t parts = SplitKeys(plane, ahead, block_tiles_);
    AheadTuple nothing;
    for (size_t r = 0; r < head_rows_; r += kTileBlock) {
      float* const product = products_ + r * kTileBlock;
      AddTileProduct(
          {.transition = block_tiles_,
           .parts = parts,
           .transition_left = true,
           .half_panel = head_rows_ - r == kTileRows,
           .blocks = 1,
           .steps = TileSteps(plane.stride),
           .panel = QueryTiles(static_cast<size_t>(head), r / kTileBlock) + first * TileStepNumbers(kMaxTileParts),
           .addend = product,
           .addend_stride = kTileBlock,
           .sum = product,
           .sum_stride = kTileBlock},
          nothing);
    }
  }

  void AddWeightedOnTiles(int32_t head, const RawRows& next, size_t next_count) {
    if constexpr (kPanelsAreTiles) {
      const Plane& values = mla_ ? key_ : other_;
      const size_t blocks = TileBlocks(out_stride_);
      Prefetcher ahead(next, next_count, other_.row_bytes, blocks * kTileRows);
      const size_t parts = SplitValues(values, out_stride_, ahead, block_tiles_);
      float* const out = out_ + RowOf(head, 0) * out_stride_;
      AheadTuple nothing;
      for (size_t r = 0; r < head_rows_; r += kTileBlock) {
        const size_t rows = std::min(kTileBlock, head_rows_ - r);
        ScaleRows(out + r * out_stride_, rows, factor_ + r);
        SplitOperand<TileSide::kLeft>(MatrixCorner<F32>{scores_ + r * kMaxBlock, kMaxBlock, rows, kMaxBlock},
                                      kTileBlock, kTileDepth, weight_tiles_);
        AddTileProduct({.transition = block_tiles_,
                        .parts = parts,
                        .transition_left = false,
                        .half_panel = rows == kTileRows,
                        .blocks = blocks,
                        .steps = 1,
                        .panel = weight_tiles_,
                        .addend = out + r * out_stride_,
                        .addend_stride = out_stride_,
                        .sum = out + r * out_stride_,
                        .sum_stride = out_stride_},
                       nothing);
      }
    }
  }
  void ScaleRows(float* out, size_t rows, const float* factors) const {
    for (size_t r = 0; r < rows; ++r, out += out_stride_) {
      if (factors[r] == 1.0f) continue;
      const Vec factor = hn::Set(Tag(), factors[r]);
      for (size_t i = 0; i < out_stride_; i += kLanes) {
        hn::StoreU(hn::Mul(factor, hn::LoadU(Tag(), out + i)), Tag(), out + i);
      }
    }
  }

  // Converts scores of keys from `position` into weights e^{score − largest so far}.
  void Weigh(int32_t head, int64_t position, size_t count) {
    for (size_t t = 0; t < tokens_; ++t) {
      const int64_t query = plan_.args.positions[first_token_ + static_cast<int64_t>(t)];
      const auto keys = static_cast<int64_t>(count);
      const auto end = static_cast<size_t>(std::clamp<int64_t>(query - position + 1, 0, keys));
      const auto begin = static_cast<size_t>(
          shape_.window > 0 ? std::clamp<int64_t>(query - shape_.window + 1 - position, 0, keys) : 0);
      for (size_t row = t * group_; row < (t + 1) * group_; ++row) WeighRow(head, row, begin, end);
    }
  }

  // Keys begin … end − 1 of the block are seen.
  void WeighRow(int32_t head, size_t row, size_t begin, size_t end) {
    const Tag d;
    float* const scores = scores_ + row * kMaxBlock;
    float &largest_so_far = largest_[RowOf(head, row)], &sum_so_far = sum_[RowOf(head, row)];
    std::fill(scores, scores + begin, -INFINITY);
    std::fill(scores + std::max(begin, end), scores + block_, -INFINITY);
    // A NaN score is never the largest; its weight is NaN, and so is the row's result.
    Vec most = hn::Set(d, largest_so_far);
    for (size_t j = 0; j < block_; j += kLanes) {
      const Vec score = hn::LoadU(d, scores + j);
      most = hn::IfThenElse(hn::Gt(score, most), score, most);
    }
    const float largest = hn::GetLane(hn::MaxOfLanes(d, most));
    factor_[row] = largest == largest_so_far ? 1.0f : std::exp(largest_so_far - largest);
    largest_so_far = largest;
    const Vec base = hn::Set(d, largest == -INFINITY ? 0.0f : largest);
    Vec sum = hn::Zero(d);
    for (size_t j = 0; j < block_; j += kLanes) {
      const Vec score = hn::Sub(hn::LoadU(d, scores + j), base);
      const Vec weights = hn::IfThenElse(hn::Eq(score, score), hn::Exp(d, score), score);  // Exp makes 0 of NaN
      sum = hn::Add(sum, weights);
      hn::StoreU(weights, d, scores + j);
    }
    sum_so_far = sum_so_far * factor_[row] + hn::GetLane(hn::SumOfLanes(d, sum));
  }

  void AddWeighted(int32_t head, size_t count, const RawRows& next, size_t next_count) {
    const Plane& values = mla_ ? key_ : other_;
    const size_t columns = out_stride_ / kColumns;
    float* const out = out_ + RowOf(head, 0) * out_stride_;
    Prefetcher ahead(next, next_count, other_.row_bytes,
                     head_rows_ / kRowTile * columns * (RoundUp(count, kVecsOfStep) / kVecsOfStep));
    for (size_t r = 0; r < head_rows_; r += kRowTile) {
      for (size_t c = 0; c < columns; ++c) {
        AddValues(scores_ + r * kMaxBlock, factor_ + r, values.floats(), count, c * kColumns, ahead,
                  out + r * out_stride_ + c * kColumns, out_stride_);
      }
    }
  }

  const AttendPlan& plan_;
  const AttentionShape& shape_;
  const bool mla_;
  const size_t group_;
  const int64_t first_token_;
  const size_t tokens_;
  const size_t head_rows_, rows_;  // rows per kv head; rows of all kv heads
  const bool tiles_;               // products are made on the matrix unit
  Plane key_, other_;              // `other_`: gqa: values; mla: rotary key parts
  size_t query_stride_, out_stride_, block_;
  KeyAngles* angles_ = nullptr;
  int64_t earliest_, latest_;                // positions of the queries
  float *queries_, *out_, *largest_, *sum_;  // buffers of all rows
  float *scores_, *factor_;                  // buffers of the current head
  size_t depths_;                            // steps of scores on the matrix unit
  uint16_t *query_tiles_, *block_tiles_, *weight_tiles_;
  float* products_;  // scores by key, a panel of rows after the other
};

PartialRows RunPart(const AttendPlan& plan, int64_t unit, int64_t chunk) {
  Part part(plan, unit);
  part.Run(chunk);
  return part.Result();
}

}  // namespace attention
}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();
#endif  // per-target guard
