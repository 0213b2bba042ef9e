#include "kernels/host/rows.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "kernels/checksum.h"
#include "kernels/host/rows_vector.h"

namespace ashlar::kernels::host {
namespace {

// What one worker takes at a time: enough to make handing out cheap, little enough to share a few megabytes evenly.
constexpr int64_t kTaskBytes = 256 << 10;
// What is copied and then hashed before the next is begun, so that hashing reads it from the nearest caches.
constexpr int64_t kPieceBytes = 16 << 10;
// From here on targets are streamed: most of so much would leave a core's cache before anybody reads it.
constexpr int64_t kStreamingBytes = 2 << 20;

Stores StoresFor(int64_t bytes, int64_t batch_bytes = 0) {
  return std::max(bytes, batch_bytes) >= kStreamingBytes ? Stores::kStreaming : Stores::kCached;
}

// Calls fn(i) for every i in [0, count), several to a task; `bytes` is what one call writes or hashes.
template <typename Fn>
void ForEachUnit(Workers* workers, int64_t count, int64_t bytes, Stores stores, Fn fn) {
  const int64_t per_task = std::max<int64_t>(1, kTaskBytes / std::max<int64_t>(1, bytes));
  const int64_t tasks = (count + per_task - 1) / per_task;
  const auto run = [&](int64_t task) {
    for (int64_t i = task * per_task; i < std::min(count, (task + 1) * per_task); ++i) fn(i);
    if (stores == Stores::kStreaming) FinishStreaming();
  };
  if (workers != nullptr && tasks > 1) {
    ParallelFor(*workers, tasks, run);
  } else {
    for (int64_t task = 0; task < tasks; ++task) run(task);
  }
}

// Calls fn(slot, rows) for `tokens` tokens from `position` on, in the order in which they are stored: at `slot` stand
// `rows` rows (one a token and head) without gaps. Whole tokens, or all of a page's, where the strides allow it.
template <typename Fn>
void ForEachRun(const PagedSlots& slots, int64_t position, int64_t tokens, int32_t heads, int32_t dim, Fn fn) {
  const bool whole_tokens = heads == 1 || slots.head_stride == dim;
  const bool whole_pages = whole_tokens && slots.token_stride == int64_t{heads} * dim;
  for (const int64_t end = position + tokens; position < end;) {
    const int64_t in_page = position % slots.page_tokens;
    const int64_t count = std::min(end - position, slots.page_tokens - in_page);
    float* const first = static_cast<float*>(slots.base) +
                         slots.page_table[position / slots.page_tokens] * slots.page_stride +
                         in_page * slots.token_stride;
    if (whole_pages) {
      fn(first, count * heads);
    } else {
      for (int64_t t = 0; t < count; ++t) {
        float* const token = first + t * slots.token_stride;
        if (whole_tokens) {
          fn(token, int64_t{heads});
        } else {
          for (int32_t h = 0; h < heads; ++h) fn(token + h * slots.head_stride, int64_t{1});
        }
      }
    }
    position += count;
  }
}

// The tokens of one unit.
struct UnitTokens {
  UnitTokens(int64_t unit, int32_t unit_tokens, int64_t tokens)
      : begin(unit * unit_tokens), count(std::min<int64_t>(unit_tokens, tokens - begin)) {}
  const int64_t begin, count;
};

int64_t UnitCount(int64_t tokens, int32_t unit_tokens) {
  return (tokens + unit_tokens - 1) / unit_tokens;
}

void LandUnit(const LandArgs& args, const std::optional<Turn>& turn, Stores stores, int64_t unit) {
  const int32_t heads = args.source.heads, dim = args.source.dim;
  const int64_t token_bytes = int64_t{heads} * dim * static_cast<int64_t>(sizeof(float));
  const int64_t piece_tokens = std::max<int64_t>(1, kPieceBytes / token_bytes);
  const UnitTokens in_unit(unit, args.source.unit_tokens, args.source.tokens);
  const auto* source = static_cast<const float*>(args.source.units[unit]);
  std::optional<ChecksumStream> checksum;
  if (args.unit_checksums != nullptr) checksum.emplace();
  for (int64_t t = 0; t < in_unit.count; t += piece_tokens) {
    const int64_t count = std::min(piece_tokens, in_unit.count - t);
    const float* const piece = source;
    ForEachRun(args.target, args.first_position + in_unit.begin + t, count, heads, dim, [&](float* slot, int64_t rows) {
      if (turn) {
        TurnRows(*turn, rows, dim, source, slot, stores);
      } else {
        CopyBytes(source, slot, static_cast<size_t>(rows * dim) * sizeof(float), stores);
      }
      source += rows * dim;
    });
    if (checksum) checksum->Update(piece, static_cast<size_t>(count * token_bytes));
  }
  if (checksum) args.unit_checksums[unit] = checksum->Digest();
}

// Writes one unit front to back and hashes exactly what it writes, even where somebody changes the source meanwhile:
// bytes pass through a small buffer, are hashed there and copied on.
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

  // The checksum of all that was appended, which is then written.
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
  const auto for_each_run = [&](auto fn) {
    ForEachRun(args.source, args.first_position + in_unit.begin, in_unit.count, args.heads, args.dim,
               [&](const float* slot, int64_t rows) { fn(slot, static_cast<size_t>(rows * args.dim)); });
  };
  auto* target = static_cast<float*>(args.units[unit]);
  if (args.unit_checksums == nullptr) {
    for_each_run([&](const float* slot, size_t floats) {
      CopyBytes(slot, target, floats * sizeof(float), stores);
      target += floats;
    });
    return;
  }
  UnitWriter writer(target, stores);
  for_each_run([&](const float* slot, size_t floats) { writer.Append(slot, floats * sizeof(float)); });
  args.unit_checksums[unit] = writer.Finish();
}

// The checksum of bytes that are read only to be hashed. XXH3 itself asks for memory too late: with lines requested
// this far ahead it reads a fifth faster what no cache holds.
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
  const bool in_place = args.source == args.target;
  const int64_t row_bytes = args.dim * static_cast<int64_t>(sizeof(float));
  const Stores stores = in_place ? Stores::kCached : StoresFor(args.rows * row_bytes);
  std::optional<Turn> turn;
  if (args.rotation.style != RopeStyle::kNone) turn.emplace(args.rotation, args.delta);
  const int64_t rows_at_once = std::max<int64_t>(1, kPieceBytes / row_bytes);
  const int64_t pieces = (args.rows + rows_at_once - 1) / rows_at_once;
  ForEachUnit(workers, pieces, rows_at_once * row_bytes, stores, [&](int64_t piece) {
    const int64_t row = piece * rows_at_once, rows = std::min(rows_at_once, args.rows - row);
    const float* const source = static_cast<const float*>(args.source) + row * args.dim;
    float* const target = static_cast<float*>(args.target) + row * args.dim;
    if (turn) {
      TurnRows(*turn, rows, args.dim, source, target, stores);
    } else if (!in_place) {
      CopyBytes(source, target, static_cast<size_t>(rows * row_bytes), stores);
    }
  });
}

void Land(const LandArgs& args, Workers* workers) {
  const StoredRows& source = args.source;
  const int64_t token_bytes = int64_t{source.heads} * source.dim * static_cast<int64_t>(sizeof(float));
  const Stores stores = StoresFor(source.tokens * token_bytes, args.batch_bytes);
  std::optional<Turn> turn;
  if (args.rotation.style != RopeStyle::kNone) turn.emplace(args.rotation, args.delta);
  ForEachUnit(workers, UnitCount(source.tokens, source.unit_tokens), source.unit_tokens * token_bytes, stores,
              [&](int64_t unit) { LandUnit(args, turn, stores, unit); });
}

void Gather(const GatherArgs& args, Workers* workers) {
  const int64_t token_bytes = int64_t{args.heads} * args.dim * static_cast<int64_t>(sizeof(float));
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
