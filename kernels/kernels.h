// The mathematics of a cached prompt: composing tuples of linear layers, advancing seams, landing keys and values.
//
// One interface, several back ends (reference, host; later cuda), each checked against `reference` by the tests beside
// this file with the tolerance declared per operation. Formulas: HYPIC §4.2–4.3 (equations 2, 4, 6, 8).
//
// Rules that hold for every operation
// - Arguments are plain structs of pointers. Everything they point to belongs to the caller and must stay valid and
//   unchanged until the returned event is complete. Nothing inside blocks on the queue's work or allocates per call.
// - `batch_bytes` says how much this call and its neighbours write together, where a caller cuts a large transfer into
//   calls of its own: a back end may then write past the caches, which a small call alone would not merit. 0: this
//   call.
// - Numbers are fp32 and row-major. Inputs and outputs must not overlap unless a field says "in and out".
// - Per-head pointers (`const float* const*`) name each head's matrix by itself: an object's matrices never straddle
//   two extents, but neighbouring heads may lie in different ones.
// - Arguments that make no sense (negative counts, null pointers that are needed, heads not a multiple of key heads)
//   abort with the field's name: they are errors of the program, never of data. Check data before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "kernels/device.h"

namespace ashlar::kernels {

// How a state lies in memory. kKeyFirst: S is [d_k, d_v], a transition acts from the left, S' = T S.
// kValueFirst: the state is Sᵀ, [d_v, d_k], the stored transition is Tᵀ and acts from the right, Sᵀ' = Sᵀ Tᵀ.
enum class StateOrder : uint8_t { kKeyFirst = 1, kValueFirst = 2 };

// One linear-attention layer (or the slice of it that one tensor-parallel rank holds), family gdn:
// S_t = e^{g_t} (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ, o_t = S_tᵀ q_t. Decay acts before the erase.
struct LinearShape {
  int32_t heads = 0;      // value heads; each has a state of its own
  int32_t key_heads = 0;  // divides `heads`; value head h reads key head h / (heads / key_heads)
  int32_t d_k = 0;        // ≤ kMaxHeadDim
  int32_t d_v = 0;        // ≤ kMaxHeadDim
  StateOrder order = StateOrder::kKeyFirst;
};
inline constexpr int32_t kMaxHeadDim = 256;

// The tuple of one segment's interior in one layer: dense transition and zero-start end state per head.
struct TupleView {
  const float* const* transition = nullptr;  // [heads] → [d_k, d_k], in the shape's order
  const float* const* state = nullptr;       // [heads] → [d_k, d_v] or [d_v, d_k], in the shape's order
};

// Per-token inputs of a linear layer. Keys and queries are what the recurrence sees: after convolution, activation,
// L2 normalisation and the query's scale. Strides are in floats, from one token to the next.
struct TokenInputs {
  int64_t tokens = 0;
  const float* q = nullptr;     // [tokens][key_heads, d_k]; may be null where no output is asked for
  const float* k = nullptr;     // [tokens][key_heads, d_k]
  const float* v = nullptr;     // [tokens][heads, d_v]
  const float* g = nullptr;     // [tokens][heads], log decay, ≤ 0
  const float* beta = nullptr;  // [tokens][heads]
  int64_t q_stride = 0, k_stride = 0, v_stride = 0, g_stride = 0, beta_stride = 0;
};

// Composes a chain of interiors onto a running state: S ← T_n(… T_1 S + S_1 …) + S_n (HYPIC equation 6).
struct ComposeArgs {
  LinearShape shape;
  std::span<const TupleView> interiors;
  float* const* state = nullptr;  // in and out, [heads]
};

// Composes a chain of tuples into one tuple: (T_n … T_1, the chain's zero-start end state). Outputs must not alias.
struct ComposeTransitionsArgs {
  LinearShape shape;
  std::span<const TupleView> interiors;
  float* const* transition = nullptr;  // out, [heads] → [d_k, d_k]
  float* const* state = nullptr;       // out, [heads]
};

// The tuple of a run of tokens: transition and zero-start end state (starting from S = 0, T = I). The caller passes
// exactly the interior's tokens: a tuple that starts at token 0 of the segment is wrong at its seams.
struct CaptureArgs {
  LinearShape shape;
  TokenInputs inputs;
  float* const* transition = nullptr;  // out, [heads]; null where only the end state is wanted
  float* const* state = nullptr;       // out, [heads]
};

// One step of a prompt's chain in one layer: either compose a cached interior, or run tokens [begin, end) of the
// inputs through the recurrence and emit their outputs.
struct SeamStep {
  const TupleView* interior = nullptr;  // null: a computed run
  int64_t begin = 0, end = 0;           // the run's tokens in `inputs`; runs ascend and do not overlap
  float* const* checkpoint = nullptr;   // out, [heads]: a copy of the state after this step, or null
};

// Interior, seam, interior, seam … in one call (HYPIC §4.3, figure 8). A full prefill is one run and no interior.
struct AdvanceSeamArgs {
  LinearShape shape;
  std::span<const SeamStep> steps;
  TokenInputs inputs;
  float* const* state = nullptr;  // in and out, [heads]
  float* out = nullptr;  // [tokens][heads, d_v], outputs S_tᵀ q_t of every token that lies in a run; may be null
  int64_t out_stride = 0;
};

enum class RopeStyle : uint8_t { kNone = 0, kHalfSplit = 1, kInterleaved = 2 };

// Rotation of the first `rotary_dim` of each head's dimensions. Pair i turns by position × frequencies[i]; half-split
// pairs dimension i with i + rotary_dim / 2, interleaved pairs 2i with 2i + 1. Angles are formed in fp64.
struct Rotation {
  RopeStyle style = RopeStyle::kNone;
  int32_t rotary_dim = 0;               // even, ≤ kMaxRotaryDim
  const double* frequencies = nullptr;  // [rotary_dim / 2]
};
inline constexpr int32_t kMaxRotaryDim = 1024;

// Turns keys by `delta` positions (HYPIC equation 8): K_b = R(b − a) K_a. In place when source == target.
struct RotateKeysArgs {
  Rotation rotation;
  int64_t delta = 0;
  int64_t rows = 0;  // keys, each `dim` long
  int32_t dim = 0;
  const float* source = nullptr;  // [rows, dim]
  float* target = nullptr;        // [rows, dim]
};

// An engine's paged slots of one layer's keys (or values). Strides are in floats. Token position p, head h lies at
// base + page_table[p / page_tokens] × page_stride + (p % page_tokens) × token_stride + h × head_stride.
struct PagedSlots {
  float* base = nullptr;
  int64_t page_stride = 0, token_stride = 0, head_stride = 0;
  int32_t page_tokens = 0;
  const int32_t* page_table = nullptr;  // pages of the whole sequence; only entries that are touched are read
};

// Keys or values as an object stores them: units of `unit_tokens` tokens, each unit dense [unit_tokens, heads, dim].
// The last unit may be partly filled.
struct StoredRows {
  const float* const* units = nullptr;  // [ceil(tokens / unit_tokens)]
  int32_t unit_tokens = 0;
  int64_t tokens = 0;
  int32_t heads = 0;
  int32_t dim = 0;
};

// Copies stored rows into paged slots, turning keys by `delta` on the way, and hashes the source bytes in the same
// pass so that what is verified is what was written.
struct LandArgs {
  StoredRows source;
  Rotation rotation;  // kNone for values
  int64_t delta = 0;  // the position at which the segment starts
  PagedSlots target;
  int64_t first_position = 0;          // where the first stored token stands in the sequence
  uint64_t* unit_checksums = nullptr;  // out, one a unit (see ChecksumArgs); null: do not hash
  int64_t batch_bytes = 0;
};

// Gathers paged slots into stored rows, hashing what was written: the copy that publishing makes.
struct GatherArgs {
  PagedSlots source;  // base is only read
  int64_t first_position = 0;
  float* const* units = nullptr;  // out; padding of a partly filled last unit is left as it is and not hashed
  int32_t unit_tokens = 0;
  int64_t tokens = 0;
  int32_t heads = 0;
  int32_t dim = 0;
  uint64_t* unit_checksums = nullptr;  // out, one a unit; null: do not hash
  int64_t batch_bytes = 0;
};

// Hashes units, copying them on the way where `target` is given. A unit's checksum is XXH3-64 (seed 0) of its bytes.
struct ChecksumArgs {
  std::span<const void* const> units;
  size_t unit_bytes = 0;               // of every unit but the last
  size_t last_unit_bytes = 0;          // of the last
  void* const* target = nullptr;       // null: only hash
  uint64_t* unit_checksums = nullptr;  // out, one a unit
  int64_t batch_bytes = 0;
};

// A part's checksum: XXH3-64 of its units' checksums as little-endian words. Two levels, so that units can be hashed
// in any order, by any number of threads, on either side of a bus.
uint64_t CombineChecksums(std::span<const uint64_t> unit_checksums);

class Kernels {
 public:
  virtual ~Kernels() = default;

  virtual std::string_view name() const = 0;

  // A queue that runs work as it is submitted, on the calling thread and `workers` (null: the calling thread alone).
  // `workers` must outlive the queue. One thread at a time submits to a queue.
  virtual std::unique_ptr<Queue> MakeQueue(Workers* workers) const = 0;

  // Each checks its arguments, then has the back end do the work.
  Event Compose(const ComposeArgs& args, Queue& queue) const;
  Event ComposeTransitions(const ComposeTransitionsArgs& args, Queue& queue) const;
  Event Capture(const CaptureArgs& args, Queue& queue) const;
  Event AdvanceSeam(const AdvanceSeamArgs& args, Queue& queue) const;
  Event RotateKeys(const RotateKeysArgs& args, Queue& queue) const;
  Event Land(const LandArgs& args, Queue& queue) const;
  Event Gather(const GatherArgs& args, Queue& queue) const;
  Event Checksum(const ChecksumArgs& args, Queue& queue) const;

 protected:
  virtual Event DoCompose(const ComposeArgs& args, Queue& queue) const = 0;
  virtual Event DoComposeTransitions(const ComposeTransitionsArgs& args, Queue& queue) const = 0;
  virtual Event DoCapture(const CaptureArgs& args, Queue& queue) const = 0;
  virtual Event DoAdvanceSeam(const AdvanceSeamArgs& args, Queue& queue) const = 0;
  virtual Event DoRotateKeys(const RotateKeysArgs& args, Queue& queue) const = 0;
  virtual Event DoLand(const LandArgs& args, Queue& queue) const = 0;
  virtual Event DoGather(const GatherArgs& args, Queue& queue) const = 0;
  virtual Event DoChecksum(const ChecksumArgs& args, Queue& queue) const = 0;
};

// Back ends of this build that can run on this machine. They live as long as the process.
const Kernels& Reference();  // plain loops, fp64 accumulation: the truth
const Kernels& Host();       // Highway, dispatched at run time to what the processor has
std::span<const Kernels* const> Available();

}  // namespace ashlar::kernels
