// One part of a call of attention: a block of query rows passes over blocks of keys with two products and a running
// softmax, so that scores never leave the cache. Included once for every target of Highway.
//
// Rows in scratch are padded with zeros to whole tiles, so that no product needs a remainder. Keys and values are read
// where they lie in their pages, unless they must be converted, turned or padded.
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
#include <cstring>
#include <vector>

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "kernels/host/attention_plan.h"
#include "kernels/host/key_block-inl.h"
#include "kernels/host/rows_vector.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {
namespace attention {

using Tag = hn::ScalableTag<float>;
using Vec = hn::Vec<Tag>;
inline constexpr size_t kLanes = hn::MaxLanes(Tag());
// Tiles of products that are held in registers, of which there are 32 with AVX-512 and Neon, 16 else.
inline constexpr bool kManyRegisters = kLanes >= 16 || HWY_TARGET == HWY_NEON;
inline constexpr size_t kRowTile = kManyRegisters ? 4 : 2;
inline constexpr size_t kKeyTile = 4;
inline constexpr size_t kVecs = 4;

constexpr size_t RoundUp(size_t n, size_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

#if HWY_TARGET != HWY_SCALAR
// to[0 … 3] ← the sum of a vector's blocks of four lanes.
template <class D>
HWY_INLINE void StoreSumOfBlocks(D d, hn::Vec<D> blocks, float* to) {
  if constexpr (hn::MaxLanes(D()) == 4) {
    hn::StoreU(blocks, d, to);
  } else {
    const hn::Half<D> half;
    StoreSumOfBlocks(half, hn::Add(hn::LowerHalf(half, blocks), hn::UpperHalf(half, blocks)), to);
  }
}
#endif

// to[0 … 3] ← the sums of four vectors' lanes.
HWY_INLINE void StoreSums(Vec a, Vec b, Vec c, Vec e, float* to) {
#if HWY_TARGET == HWY_SCALAR
  const Vec sums[] = {a, b, c, e};
  for (size_t i = 0; i < 4; ++i) to[i] = hn::GetLane(sums[i]);
#else
  const Tag d;
  const hn::Repartition<uint64_t, Tag> pairs;
  const auto ab = hn::BitCast(pairs, hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b)));
  const auto ce = hn::BitCast(pairs, hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e)));
  // In each block of four lanes: the sums of that block's lanes of a, b, c, e.
  StoreSumOfBlocks(
      d,
      hn::Add(hn::BitCast(d, hn::InterleaveLower(pairs, ab, ce)), hn::BitCast(d, hn::InterleaveUpper(pairs, ab, ce))),
      to);
#endif
}

// sums += the products of a tile of queries with four keys, over `dims` dimensions.
HWY_INLINE void AddScores(const float* q, size_t stride, const float* const* keys, size_t dims,
                          Vec (&sums)[kRowTile][kKeyTile]) {
  const Tag d;
  for (size_t i = 0; i < dims; i += kLanes) {
    Vec key[kKeyTile];
    for (size_t j = 0; j < kKeyTile; ++j) key[j] = hn::LoadU(d, keys[j] + i);
    for (size_t r = 0; r < kRowTile; ++r) {
      const Vec query = hn::LoadU(d, q + r * stride + i);
      for (size_t j = 0; j < kKeyTile; ++j) sums[r][j] = hn::MulAdd(query, key[j], sums[r][j]);
    }
  }
}

// A tile of rows, kVecs vectors wide: out ← factor × out + Σ weight × value.
HWY_INLINE void AddValues(const float* weights, const float* factors, const float* const* values, size_t keys,
                          size_t column, float* out, size_t stride) {
  const Tag d;
  Vec sums[kRowTile][kVecs];
  for (size_t r = 0; r < kRowTile; ++r) {
    for (size_t v = 0; v < kVecs; ++v) {
      sums[r][v] = hn::Mul(hn::LoadU(d, out + r * stride + v * kLanes), hn::Set(d, factors[r]));
    }
  }
  for (size_t j = 0; j < keys; ++j) {
    Vec value[kVecs];
    for (size_t v = 0; v < kVecs; ++v) value[v] = hn::LoadU(d, values[j] + column + v * kLanes);
    for (size_t r = 0; r < kRowTile; ++r) {
      const Vec weight = hn::Set(d, weights[r * kMaxBlock + j]);
      for (size_t v = 0; v < kVecs; ++v) sums[r][v] = hn::MulAdd(weight, value[v], sums[r][v]);
    }
  }
  for (size_t r = 0; r < kRowTile; ++r) {
    for (size_t v = 0; v < kVecs; ++v) hn::StoreU(sums[r][v], d, out + r * stride + v * kLanes);
  }
}

// What one thread works in; it grows to the largest call so far.
struct Scratch {
  KeyAngles angles;
  std::vector<float> memory;

  // Aligned rooms of the given sizes, one after another, filled with zeros.
  template <size_t N>
  void Divide(const size_t (&floats)[N], float* (&rooms)[N]) {
    constexpr size_t kAlign = 64 / sizeof(float);
    size_t total = kAlign;
    for (const size_t n : floats) total += RoundUp(n, kAlign);
    if (memory.size() < total) memory.resize(total);
    const size_t past = reinterpret_cast<uintptr_t>(memory.data()) / sizeof(float) % kAlign;
    float* at = memory.data() + (kAlign - past) % kAlign;
    for (size_t i = 0; i < N; ++i) {
      rooms[i] = at;
      std::fill_n(at, floats[i], 0.0f);
      at += RoundUp(floats[i], kAlign);
    }
  }
};

// One of a block's planes: keys, rotary key parts, or values.
struct Plane {
  int32_t dim = 0;
  size_t stride = 0;  // of staged rows: dim, padded
  float* staged = nullptr;
  const KeyAngles* angles = nullptr;  // of keys that are turned while they are loaded
  StageFunction stage = nullptr;      // null: rows are read in place
  size_t row_bytes = 0;
  RawRows raw[2];  // of this block and the next
  const float* rows[kMaxBlock];

  // `whole`: dimensions that a product takes at once.
  void Read(const PagedSlots& slots, size_t whole) {
    const bool in_place = slots.dtype == DType::kF32 && angles == nullptr && static_cast<size_t>(dim) % whole == 0;
    stage = in_place ? nullptr : StageFunctionOf(slots.dtype);
    row_bytes = static_cast<size_t>(dim) * ElementBytes(slots.dtype);
  }

  // Rows past the last repeat it: products take whole tiles of keys.
  void Load(size_t which, size_t count) {
    if (stage != nullptr) stage(raw[which], count, dim, angles, staged, stride);
    for (size_t j = 0; j < RoundUp(count, kKeyTile); ++j) {
      const size_t row = std::min(j, count - 1);
      rows[j] = stage != nullptr ? staged + row * stride : reinterpret_cast<const float*>(raw[which].row[row]);
    }
  }
};

class Part {
 public:
  Part(const AttendPlan& plan, int64_t unit)
      : plan_(plan),
        shape_(plan.args.shape),
        group_(static_cast<size_t>(plan.group())),
        first_token_(plan.FirstToken(unit)),
        tokens_(static_cast<size_t>(plan.TokenCount(unit))),
        kv_head_(plan.KvHead(unit)),
        rows_(tokens_ * group_),
        padded_rows_(RoundUp(rows_, kRowTile)) {
    const bool mla = shape_.kind == AttentionKind::kMla;
    key_ = {.dim = shape_.key_dim, .stride = RoundUp(static_cast<size_t>(shape_.key_dim), mla ? kColumns : kLanes)};
    other_ = {.dim = shape_.value_dim,
              .stride = RoundUp(static_cast<size_t>(shape_.value_dim), mla ? kLanes : kColumns)};
    query_stride_ = key_.stride + (mla ? other_.stride : 0);
    out_stride_ = mla ? key_.stride : other_.stride;
    block_ = query_stride_ <= 256 ? kMaxBlock : kMaxBlock / 2;
    thread_local Scratch scratch;
    float* rooms[6];
    scratch.Divide({padded_rows_ * query_stride_, padded_rows_ * kMaxBlock, padded_rows_ * out_stride_,
                    3 * padded_rows_, block_ * key_.stride, block_ * other_.stride},
                   rooms);
    queries_ = rooms[0];
    scores_ = rooms[1];
    out_ = rooms[2];
    largest_ = rooms[3];
    sum_ = largest_ + padded_rows_;
    factor_ = sum_ + padded_rows_;
    key_.staged = rooms[4];
    other_.staged = rooms[5];
    std::fill_n(largest_, padded_rows_, -INFINITY);
    std::fill_n(factor_, padded_rows_, 1.0f);
    if (plan.stand == KeysStand::kUnrotated && plan.args.rotation.style != RopeStyle::kNone) {
      scratch.angles.Prepare(plan.args.rotation, block_);
      angles_ = &scratch.angles;
      (mla ? other_ : key_).angles = angles_;
    }
    const int64_t* const positions = plan.args.positions + first_token_;
    earliest_ = *std::min_element(positions, positions + tokens_);
    latest_ = *std::max_element(positions, positions + tokens_);
  }

  void Run(int64_t chunk) {
    int64_t begin = chunk * plan_.chunk_keys, end = std::min(plan_.keys, begin + plan_.chunk_keys);
    bool loaded = false;
    for (const KeySpan& span : plan_.args.spans) {
      // Of the span, what lies in the chunk and what some query sees.
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

  // Queries times the scale of scores, turned to their positions counted from `origin`. Rows are [tokens, group].
  void LoadQueries(int64_t origin) {
    const AttendArgs& args = plan_.args;
    const bool mla = shape_.kind == AttentionKind::kMla;
    const int32_t turned = args.rotation.style == RopeStyle::kNone ? 0 : args.rotation.rotary_dim;
    for (size_t t = 0; t < tokens_; ++t) {
      const int64_t token = first_token_ + static_cast<int64_t>(t);
      float* const rows = queries_ + t * group_ * query_stride_;
      const size_t second = mla ? key_.stride : 0;  // where the dimensions that turn begin
      for (size_t g = 0; g < group_; ++g) {
        const float* from =
            args.q + token * args.q_stride + (int64_t{kv_head_} * group_ + g) * int64_t{shape_.QueryDim()};
        float* const to = rows + g * query_stride_;
        for (int32_t i = 0; i < shape_.key_dim; ++i) to[i] = from[i] * shape_.scale;
        if (mla) {
          for (int32_t i = 0; i < shape_.value_dim; ++i) to[second + i] = from[shape_.key_dim + i] * shape_.scale;
        }
        for (int32_t i = 0; i < turned; ++i) to[second + i] *= args.rotation.scale;
      }
      if (turned == 0) continue;
      const Turn turn(args.rotation, args.positions[token] - origin);
      TurnRows(turn,
               {.rows = static_cast<int64_t>(group_),
                .dim = static_cast<int32_t>(query_stride_),
                .source = rows + second,
                .target = rows + second},
               Stores::kCached);
    }
  }

  // Keys first … last − 1 of a span. While one block is worked on, the next is asked for.
  void AttendSpan(const KeySpan& span, int64_t first, int64_t last) {
    const bool mla = shape_.kind == AttentionKind::kMla;
    key_.Read(span.keys, mla ? kColumns : kLanes);
    other_.Read(span.values, mla ? kLanes : kColumns);
    if (angles_ != nullptr) angles_->MoveTo(span.position + first);
    const auto locate = [&](int64_t at, size_t which) {
      const size_t count = static_cast<size_t>(std::min<int64_t>(static_cast<int64_t>(block_), last - at));
      Locate(span.keys, span.first_slot + at, kv_head_, count, key_.raw[which]);
      Locate(span.values, span.first_slot + at, kv_head_, count, other_.raw[which]);
      return count;
    };
    size_t which = 0;
    for (size_t count = locate(first, 0), next = 0; first < last; count = next, which ^= 1) {
      const int64_t following = first + static_cast<int64_t>(count);
      next = following < last ? locate(following, which ^ 1) : 0;
      key_.Load(which, count);
      other_.Load(which, count);
      Score(count, key_.raw[which ^ 1], next);
      Weigh(span.position + first, count);
      AddWeighted(count, other_.raw[which ^ 1], next);
      if (angles_ != nullptr && next > 0) angles_->NextBlock();
      first = following;
    }
  }

  void Score(size_t count, const RawRows& next, size_t next_count) {
    const Tag d;
    const bool mla = shape_.kind == AttentionKind::kMla;
    for (size_t r = 0; r < padded_rows_; r += kRowTile) {
      const float* const q = queries_ + r * query_stride_;
      for (size_t j = 0; j < count; j += kKeyTile) {
        if (r == 0) Prefetch(next, std::min(j, next_count), std::min(j + kKeyTile, next_count), key_.row_bytes);
        Vec sums[kRowTile][kKeyTile];
        for (auto& row : sums) {
          for (Vec& sum : row) sum = hn::Zero(d);
        }
        AddScores(q, query_stride_, key_.rows + j, key_.stride, sums);
        if (mla) AddScores(q + key_.stride, query_stride_, other_.rows + j, other_.stride, sums);
        for (size_t i = 0; i < kRowTile; ++i) {
          StoreSums(sums[i][0], sums[i][1], sums[i][2], sums[i][3], scores_ + (r + i) * kMaxBlock + j);
        }
      }
    }
  }

  // Scores of keys that stand from `position` on become weights e^{score − largest so far}.
  void Weigh(int64_t position, size_t count) {
    for (size_t t = 0; t < tokens_; ++t) {
      const int64_t query = plan_.args.positions[first_token_ + static_cast<int64_t>(t)];
      const auto keys = static_cast<int64_t>(count);
      const auto end = static_cast<size_t>(std::clamp<int64_t>(query - position + 1, 0, keys));
      const auto begin = static_cast<size_t>(
          shape_.window > 0 ? std::clamp<int64_t>(query - shape_.window + 1 - position, 0, keys) : 0);
      for (size_t row = t * group_; row < (t + 1) * group_; ++row) WeighRow(row, begin, end);
    }
  }

  // Keys begin … end − 1 of the block are seen.
  void WeighRow(size_t row, size_t begin, size_t end) {
    const Tag d;
    float* const scores = scores_ + row * kMaxBlock;
    std::fill(scores, scores + begin, -INFINITY);
    std::fill(scores + std::max(begin, end), scores + block_, -INFINITY);
    Vec most = hn::Set(d, largest_[row]);
    for (size_t j = 0; j < block_; j += kLanes) most = hn::Max(most, hn::LoadU(d, scores + j));
    const float largest = hn::GetLane(hn::MaxOfLanes(d, most));
    if (largest == -INFINITY) {
      std::fill(scores, scores + block_, 0.0f);
      return;
    }
    factor_[row] = largest == largest_[row] ? 1.0f : std::exp(largest_[row] - largest);
    largest_[row] = largest;
    Vec sum = hn::Zero(d);
    for (size_t j = 0; j < block_; j += kLanes) {
      const Vec weights = hn::Exp(d, hn::Sub(hn::LoadU(d, scores + j), hn::Set(d, largest)));
      sum = hn::Add(sum, weights);
      hn::StoreU(weights, d, scores + j);
    }
    sum_[row] = sum_[row] * factor_[row] + hn::GetLane(hn::SumOfLanes(d, sum));
  }

  void AddWeighted(size_t count, const RawRows& next, size_t next_count) {
    const Plane& values = shape_.kind == AttentionKind::kMla ? key_ : other_;
    const size_t columns = out_stride_ / kColumns;
    const size_t ahead = (next_count + columns - 1) / columns;  // rows to ask for at each column
    for (size_t r = 0; r < padded_rows_; r += kRowTile) {
      for (size_t c = 0; c < columns; ++c) {
        if (r == 0) {
          Prefetch(next, std::min(c * ahead, next_count), std::min((c + 1) * ahead, next_count), other_.row_bytes);
        }
        AddValues(scores_ + r * kMaxBlock, factor_ + r, values.rows, count, c * kColumns,
                  out_ + r * out_stride_ + c * kColumns, out_stride_);
      }
    }
  }

  const AttendPlan& plan_;
  const AttentionShape& shape_;
  const size_t group_;
  const int64_t first_token_;
  const size_t tokens_;
  const int32_t kv_head_;
  const size_t rows_, padded_rows_;
  Plane key_, other_;  // `other_`: gqa: values; mla: rotary key parts
  size_t query_stride_, out_stride_, block_;
  KeyAngles* angles_ = nullptr;
  int64_t earliest_, latest_;  // positions of the queries
  float *queries_, *scores_, *out_, *largest_, *sum_, *factor_;
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
