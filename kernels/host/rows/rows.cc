// SPDX-License-Identifier: Apache-2.0
#include "kernels/host/rows/rows.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <optional>

#include "kernels/checksum.h"
#include "kernels/host/rows/rows_vector.h"

namespace ashlar::kernels::host {
namespace {

// The bytes that one worker takes at a time: enough to make distribution cheap, and few enough to share a few megabytes
// evenly.
constexpr int64_t kTaskBytes = 256 << 10;
// The bytes that are copied and then hashed before the next piece begins, so that hashing reads from the nearest
// caches.
constexpr int64_t kPieceBytes = 16 << 10;
// From this size on targets are streamed: most of the bytes would leave a core's cache before they are read.
constexpr int64_t kStreamingBytes = 2 << 20;

Stores StoresFor(int64_t bytes, int64_t batch_bytes = 0) {
  return std::max(bytes, batch_bytes) >= kStreamingBytes ? Stores::kStreaming : Stores::kCached;
}

// Calls fn(i) for every i in [0, count), several per task; `bytes` is what one call writes or hashes.
template <typename Fn>
void ForEachUnit(Workers* workers, int64_t count, int64_t bytes, Stores stores, Fn fn) {
  const int64_t per_task = std::max<int64_t>(1, kTaskBytes / std::max<int64_t>(1, bytes));
  const int64_t tasks = (count + per_task - 1) / per_task;
  ParallelFor(workers, tasks, [&](int64_t task) {
    for (int64_t i = task * per_task; i < std::min(count, (task + 1) * per_task); ++i) fn(i);
    if (stores == Stores::kStreaming) FinishStreaming();
  });
}

// Rows (one per token and head) that are contiguous in pages, beginning with this token's and head's.
struct RowRun {
  std::byte* slot;
  int64_t rows;
  int64_t position;
  int32_t head;
};

// Calls fn(RowRun) for `tokens` tokens starting at `position`, in storage order: whole tokens, or a whole page's tokens
// if the strides allow it.
template <typename Fn>
void ForEachRun(const PagedSlots& slots, int64_t position, int64_t tokens, int32_t heads, int32_t dim, Fn fn) {
  const auto element = static_cast<int64_t>(ElementBytes(slots.dtype));
  const bool whole_tokens = heads == 1 || slots.head_stride == dim;
  const bool whole_pages = whole_tokens && slots.token_stride == int64_t{heads} * dim;
  for (const int64_t end = position + tokens; position < end;) {
    const int64_t in_page = position % slots.page_tokens;
    const int64_t count = std::min(end - position, slots.page_tokens - in_page);
    std::byte* const first =
        static_cast<std::byte*>(slots.base) +
        element * (slots.page_table[position / slots.page_tokens] * slots.page_stride + in_page * slots.token_stride);
    if (whole_pages) {
      fn(RowRun{first, count * heads, position, 0});
    } else {
      for (int64_t t = 0; t < count; ++t) {
        std::byte* const token = first + element * t * slots.token_stride;
        if (whole_tokens) {
          fn(RowRun{token, heads, position + t, 0});
        } else {
          for (int32_t h = 0; h < heads; ++h) fn(RowRun{token + element * h * slots.head_stride, 1, position + t, h});
        }
      }
    }
    position += count;
  }
}

// Calls fn(scale, i) for the scales of `rows` rows from this token and head on, in the order in which they are stored.
template <typename Fn>
void ForEachScale(const PagedSlots& slots, int64_t position, int32_t head, int64_t rows, int32_t heads, Fn fn) {
  for (int64_t i = 0; i < rows; ++i) {
    float* const token = slots.scales + slots.page_table[position / slots.page_tokens] * slots.scale_page_stride +
                         position % slots.page_tokens * slots.scale_token_stride;
    fn(token[head * slots.scale_head_stride], i);
    if (++head == heads) head = 0, ++position;
  }
}

// The tokens of one unit.
struct UnitTokens {
  UnitTokens(int64_t unit, int32_t unit_tokens, int64_t tokens)
      : begin(unit * unit_tokens), count(std::min<int64_t>(unit_tokens, tokens - begin)) {}
  const int64_t begin, count;
};

bool Turns(const Rotation& rotation, int64_t delta) {
  return rotation.style != RopeStyle::kNone && delta != 0;
}

int64_t UnitCount(int64_t tokens, int32_t unit_tokens) {
  return (tokens + unit_tokens - 1) / unit_tokens;
}

// Rotates one run. Scales are separate in pages, so they are computed in a small buffer.
void TurnRun(const LandArgs& args, const Turn& turn, Stores stores, const RowRun& run, const std::byte* source,
             const float* scales) {
  const int64_t row_bytes = args.source.dim * static_cast<int64_t>(ElementBytes(args.source.dtype));
  float turned_scales[64];
  const int64_t at_once = scales == nullptr ? run.rows : static_cast<int64_t>(std::size(turned_scales));
  for (int64_t row = 0; row < run.rows; row += at_once) {
    const int64_t rows = std::min(at_once, run.rows - row);
    TurnRows(turn,
             {.dtype = args.source.dtype,
              .rows = rows,
              .dim = args.source.dim,
              .source = source + row * row_bytes,
              .target = run.slot + row * row_bytes,
              .source_scales = scales == nullptr ? nullptr : scales + row,
              .target_scales = turned_scales},
             stores);
    if (scales == nullptr) continue;
    const int64_t first = run.head + row;
    ForEachScale(args.target, run.position + first / args.source.heads, static_cast<int32_t>(first % args.source.heads),
                 rows, args.source.heads, [&](float& scale, int64_t i) { scale = turned_scales[i]; });
  }
}

void LandUnit(const LandArgs& args, const std::optional<Turn>& turn, Stores stores, int64_t unit) {
  const int32_t heads = args.source.heads, dim = args.source.dim;
  const int64_t row_bytes = dim * static_cast<int64_t>(ElementBytes(args.source.dtype));
  const int64_t piece_tokens = std::max<int64_t>(1, kPieceBytes / (heads * row_bytes));
  const UnitTokens in_unit(unit, args.source.unit_tokens, args.source.tokens);
  const auto* source = static_cast<const std::byte*>(args.source.units[unit]);
  const float* const unit_scales = args.source.scales == nullptr ? nullptr : args.source.scales[unit];
  const float* scales = unit_scales;
  std::optional<ChecksumStream> checksum;
  if (args.unit_checksums != nullptr) checksum.emplace();
  for (int64_t t = 0; t < in_unit.count; t += piece_tokens) {
    const int64_t count = std::min(piece_tokens, in_unit.count - t);
    const std::byte* const piece = source;
    ForEachRun(args.target, args.first_position + in_unit.begin + t, count, heads, dim, [&](const RowRun& run) {
      if (turn) {
        TurnRun(args, *turn, stores, run, source, scales);
      } else {
        CopyBytes(source, run.slot, static_cast<size_t>(run.rows * row_bytes), stores);
      }
      source += run.rows * row_bytes;
      if (scales != nullptr) scales += run.rows;
    });
    if (checksum) checksum->Update(piece, static_cast<size_t>(count * heads * row_bytes));
  }
  if (checksum) args.unit_checksums[unit] = checksum->Digest();
  if (unit_scales == nullptr) return;
  const int64_t rows = in_unit.count * heads;
  if (!turn) {
    ForEachScale(args.target, args.first_position + in_unit.begin, 0, rows, heads,
                 [&](float& scale, int64_t i) { scale = unit_scales[i]; });
  }
  if (args.scale_checksums != nullptr) {
    args.scale_checksums[unit] = UnitChecksum(unit_scales, static_cast<size_t>(rows) * sizeof(float));
  }
}

// Writes one unit front to back and hashes exactly what it writes, even if the source changes meanwhile: bytes pass
// through a small buffer, are hashed there and copied on.
class UnitWriter {
 public:
  UnitWriter(void* target, Stores stores) : target_(static_cast<std::byte*>(target)), stores_(stores) {}

  void Append(const void* data, size_t bytes) {
    const auto* from = static_cast<const std::byte*>(data);
    while (bytes > 0) {
      const size_t count = std::min(bytes, sizeof(staged_) - filled_);
      std::memcpy(staged_ + filled_, from, count);
      from += count;
      bytes -= count;
      filled_ += count;
      if (filled_ == sizeof(staged_)) Flush();
    }
  }

  // Returns the checksum of all appended bytes, which are then written.
  uint64_t Finish() {
    Flush();
    return checksum_.Digest();
  }

 private:
  void Flush() {
    checksum_.Update(staged_, filled_);
    CopyBytes(staged_, target_, filled_, stores_);
    target_ += filled_;
    filled_ = 0;
  }

  ChecksumStream checksum_;
  std::byte* target_;
  const Stores stores_;
  size_t filled_ = 0;
  alignas(64) std::byte staged_[kPieceBytes];
};

void GatherUnit(const GatherArgs& args, Stores stores, int64_t unit) {
  const UnitTokens in_unit(unit, args.unit_tokens, args.tokens);
  const int64_t row_bytes = args.dim * static_cast<int64_t>(ElementBytes(args.source.dtype));
  const auto for_each_run = [&](auto fn) {
    ForEachRun(args.source, args.first_position + in_unit.begin, in_unit.count, args.heads, args.dim,
               [&](const RowRun& run) { fn(run.slot, static_cast<size_t>(run.rows * row_bytes)); });
  };
  if (args.source.scales != nullptr) {
    // Hashed at the target, because the engine may change its own memory meanwhile.
    const int64_t rows = in_unit.count * args.heads;
    ForEachScale(args.source, args.first_position + in_unit.begin, 0, rows, args.heads,
                 [&](float scale, int64_t i) { args.scales[unit][i] = scale; });
    if (args.scale_checksums != nullptr) {
      args.scale_checksums[unit] = UnitChecksum(args.scales[unit], static_cast<size_t>(rows) * sizeof(float));
    }
  }
  auto* target = static_cast<std::byte*>(args.units[unit]);
  if (args.unit_checksums == nullptr) {
    for_each_run([&](const std::byte* slot, size_t bytes) {
      CopyBytes(slot, target, bytes, stores);
      target += bytes;
    });
    return;
  }
  UnitWriter writer(target, stores);
  for_each_run([&](const std::byte* slot, size_t bytes) { writer.Append(slot, bytes); });
  args.unit_checksums[unit] = writer.Finish();
}

// The checksum of bytes that are read only to be hashed. XXH3 itself prefetches too late: with lines requested this far
// ahead it reads uncached memory a fifth faster.
uint64_t HashFromMemory(const void* data, size_t bytes) {
  constexpr size_t kStep = 2 << 10, kAhead = 2 * kStep, kLine = 64;
  const auto* at = static_cast<const std::byte*>(data);
  ChecksumStream checksum;
  for (size_t left = bytes; left > 0;) {
    for (size_t i = kAhead; i < std::min(left, kAhead + kStep); i += kLine) __builtin_prefetch(at + i, 0, 2);
    const size_t count = std::min(left, kStep);
    checksum.Update(at, count);
    at += count;
    left -= count;
  }
  return checksum.Digest();
}

}  // namespace

void RotateKeys(const RotateKeysArgs& args, Workers* workers) {
  const bool in_place = args.source == args.target, each = args.positions != nullptr;
  const int64_t row_bytes = args.dim * static_cast<int64_t>(ElementBytes(args.dtype));
  const Stores stores = in_place ? Stores::kCached : StoresFor(args.rows * row_bytes);
  const float scale = args.scaled && args.rotation.style != RopeStyle::kNone ? args.rotation.scale : 1;
  const auto turns = [&](int64_t delta) { return Turns(args.rotation, delta) || scale != 1; };
  std::optional<Turn> turn;
  if (!each && turns(args.delta)) turn.emplace(args.rotation, args.delta, scale);
  const int64_t rows_at_once = each ? args.rows_per_position : std::max<int64_t>(1, kPieceBytes / row_bytes);
  const int64_t pieces = (args.rows + rows_at_once - 1) / rows_at_once;
  ForEachUnit(workers, pieces, rows_at_once * row_bytes, stores, [&](int64_t piece) {
    const int64_t row = piece * rows_at_once, rows = std::min(rows_at_once, args.rows - row);
    const bool scaled = args.source_scales != nullptr;
    const KeyRows keys = {.dtype = args.dtype,
                          .rows = rows,
                          .dim = args.dim,
                          .source = static_cast<const std::byte*>(args.source) + row * row_bytes,
                          .target = static_cast<std::byte*>(args.target) + row * row_bytes,
                          .source_scales = scaled ? args.source_scales + row : nullptr,
                          .target_scales = scaled ? args.target_scales + row : nullptr};
    if (turn) return TurnRows(*turn, keys, stores);
    if (each && turns(args.delta + args.positions[piece])) {
      return TurnRows(Turn(args.rotation, args.delta + args.positions[piece], scale), keys, stores);
    }
    if (!in_place) CopyBytes(keys.source, keys.target, static_cast<size_t>(rows * row_bytes), stores);
    if (scaled && keys.source_scales != keys.target_scales) {
      std::copy_n(keys.source_scales, rows, keys.target_scales);
    }
  });
}

void Land(const LandArgs& args, Workers* workers) {
  const StoredRows& source = args.source;
  const int64_t token_bytes = int64_t{source.heads} * source.dim * static_cast<int64_t>(ElementBytes(source.dtype));
  const Stores stores = StoresFor(source.tokens * token_bytes, args.batch_bytes);
  std::optional<Turn> turn;
  if (Turns(args.rotation, args.delta)) turn.emplace(args.rotation, args.delta);
  ForEachUnit(workers, UnitCount(source.tokens, source.unit_tokens), source.unit_tokens * token_bytes, stores,
              [&](int64_t unit) { LandUnit(args, turn, stores, unit); });
}

void Gather(const GatherArgs& args, Workers* workers) {
  const int64_t token_bytes = int64_t{args.heads} * args.dim * static_cast<int64_t>(ElementBytes(args.source.dtype));
  const Stores stores = StoresFor(args.tokens * token_bytes, args.batch_bytes);
  ForEachUnit(workers, UnitCount(args.tokens, args.unit_tokens), args.unit_tokens * token_bytes, stores,
              [&](int64_t unit) { GatherUnit(args, stores, unit); });
}

void Checksum(const ChecksumArgs& args, Workers* workers) {
  const auto units = static_cast<int64_t>(args.units.size());
  const auto unit_bytes = static_cast<int64_t>(args.unit_bytes);
  const Stores stores = args.target == nullptr ? Stores::kCached : StoresFor(units * unit_bytes, args.batch_bytes);
  ForEachUnit(workers, units, unit_bytes, stores, [&](int64_t unit) {
    const size_t bytes = unit + 1 == units ? args.last_unit_bytes : args.unit_bytes;
    if (args.target == nullptr) {
      args.unit_checksums[unit] = HashFromMemory(args.units[unit], bytes);
      return;
    }
    UnitWriter writer(args.target[unit], stores);
    writer.Append(args.units[unit], bytes);
    args.unit_checksums[unit] = writer.Finish();
  });
}

}  // namespace ashlar::kernels::host
