// SPDX-License-Identifier: Apache-2.0
// Plain types of the engine API (ashlar/engine.h): statuses, the model, its memory, the options of Open, prompts and
// plans.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/types.h"

namespace ashlar::engine {

using ashlar::DType;
using ashlar::Family;
using ashlar::RopeStyle;
using ashlar::StateOrder;
using ashlar::StoredKeys;
using ashlar::TailOrder;
using ashlar::TransitionForm;

enum class Code : int32_t {
  kOk = 0,
  // Errors. The numbers are those of gRPC.
  kInvalidArgument = 3,
  kPermissionDenied = 7,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kInternal = 13,
  kUnavailable = 14,
  // Not errors.
  kPending = 100,     // not done yet; call again
  kRestart = 101,     // the plan has changed; compute it again from its first step
  kOtherPages = 102,  // like kRestart, but give the request other pages first (Request::Move)
  kNoPages = 103,     // too few pages are free (Request::Admit); nothing has changed
};

struct Status {
  Code code = Code::kOk;
  char message[252] = "";  // null-terminated
  bool ok() const { return code == Code::kOk; }
};

// ---------------------------------------------------------------------------------------------------- the model

enum class LayerKind : uint8_t { kGqa = 1, kMla = 2, kLinear = 3, kOpaque = 4 };

struct Rope {
  RopeStyle style = RopeStyle::kNone;
  uint32_t rotary_dim = 0;
  double scale = 1.0;                   // factor of rotated queries and keys, applied once to each; 1: none
  const double* frequencies = nullptr;  // [rotary_dim / 2], radians per position
};

// One layer of the model before sharding. Only the fields of its kind are read.
struct Layer {
  LayerKind kind = LayerKind::kGqa;
  Rope rope;  // attention; a linear layer that rotates its keys needs scalar transitions

  // Attention.
  uint32_t kv_heads = 0;
  uint32_t key_dim = 0;    // MLA: width of the latent
  uint32_t value_dim = 0;  // MLA: width of the rotary part of the key
  DType dtype = DType::kF32;
  bool scales = false;  // fp8: one fp32 scale per token and head
  StoredKeys stored = StoredKeys::kZeroBased;

  // Linear.
  Family family = Family::kGdn;
  uint32_t key_heads = 0, value_heads = 0;
  uint32_t d_k = 0, d_v = 0;
  DType state_dtype = DType::kF32;
  StateOrder order = StateOrder::kKeyFirst;
  uint32_t conv_channels = 0, conv_kernel = 0;  // 0: no short convolution
  const float* decay_table = nullptr;           // retnet, lightning, mamba2: [value_heads]; mamba1: [heads, d_k, d_v]
  DType conv_dtype{};                           // type of tails and of a span's convolution inputs; 0: state_dtype
  TailOrder conv_order = TailOrder::kTokenFirst;

  // Opaque: bytes that are stored and landed unchanged, for exact prefixes only. Both are totals over all
  // tensor-parallel ranks, in equal shares; at least one must be positive.
  uint32_t token_bytes = 0;  // bytes of one token in the pages; 0: no pages
  uint64_t state_bytes = 0;  // bytes of the state after a token; 0: no state
};

// A model's identity, and the exact shape of its cached state. A null string is empty.
struct Model {
  const char* model_id = nullptr;
  const char* weights_digest = nullptr;  // digest of the weights as loaded; required
  const char* dtype = nullptr;
  const char* quantization = nullptr;
  const char* tokenizer_digest = nullptr;
  const char* lora = nullptr;
  uint32_t page_tokens = 0;
  uint32_t head = 0, tail = 0;  // seam widths in tokens: of a segment of n tokens, [head, n − tail) is cached
  const Layer* layers = nullptr;
  uint32_t layer_count = 0;
  uint32_t tensor_parallel_rank = 0, tensor_parallel_size = 1;
  // Cost of prefill of the unsharded model, for eviction: n tokens take flops_per_token · n + flops_per_token_squared ·
  // n². If flops_per_token is 0, the daemon estimates both.
  double flops_per_token = 0, flops_per_token_squared = 0;
  double tokens_per_second = 0;  // prefill speed, for the break-even check of hits; 0: no check
};

// ---------------------------------------------------------------------------------------------------- the memory

enum class MemoryKind : uint8_t {
  kNone = 0,    // no pages: a scheduler that looks up but does not land
  kHosted = 1,  // the daemon allocates the memory for this engine
  kMemfd = 2,   // the engine's memfd, sealed with F_SEAL_SHRINK
  kShared = 3,  // the memory of OpenOptions::share_with
  kGpu = 4,     // the engine's memory on a GPU that the daemon serves
};

// Where the pages of one attention layer are in the memory. All fields are bytes. The row of head h of the token in
// slot s of page p is at offset + p × page_stride + s × token_stride + h × head_stride. An opaque layer with
// token_bytes has key_offset, page_stride and token_stride only. Comments below on attention layers also apply to it.
struct PagePlace {
  uint32_t layer = 0;
  uint64_t key_offset = 0, value_offset = 0;
  uint64_t page_stride = 0, token_stride = 0;
  uint64_t key_head_stride = 0, value_head_stride = 0;
  uint64_t key_scale_offset = 0, value_scale_offset = 0;
  uint64_t scale_page_stride = 0, scale_token_stride = 0, scale_head_stride = 0;
};

// Attention layers that share one page table.
struct LayerGroup {
  const uint32_t* layers = nullptr;  // attention layers; each belongs to exactly one group
  uint32_t layer_count = 0;
  uint32_t page_tokens = 0;  // 0: the model's
  uint32_t pages = 0;        // 0: Memory::pages
};

struct Memory {
  MemoryKind kind = MemoryKind::kHosted;
  uint32_t pages = 0;
  // One place per attention layer of this process's shard, ascending by layer. Null: the cache chooses the places in
  // hosted memory, and Cache::places returns them.
  const PagePlace* places = nullptr;
  uint32_t place_count = 0;
  uint64_t bytes = 0;  // size of the memory; ignored if the cache places the pages
  int32_t memfd = -1;  // the caller keeps ownership
  // Null: one page table serves all attention layers. Otherwise calls take one table per group (page_tables instead of
  // page_table).
  const LayerGroup* groups = nullptr;
  uint32_t group_count = 0;
  // True: all groups draw page numbers from one pool and have the same number of pages; a page belongs to one group at
  // a time, like the blocks of vLLM's pool. Layers of different groups may share memory, page by page, and do so if the
  // cache places them. False: each group numbers its own pages, and groups share no memory.
  bool common_pages = false;
  // kGpu: an allocation of CUDA's virtual memory management (cuMemCreate) of exactly `bytes` bytes, which the engine
  // has mapped at `gpu_data` and exported as the POSIX file descriptor `gpu_descriptor`. The caller keeps both, and may
  // close the descriptor after Open. `gpu` is CUDA's UUID of the GPU (cuDeviceGetUuid_v2); all zero: the daemon's only
  // GPU.
  int32_t gpu_descriptor = -1;
  uint8_t* gpu_data = nullptr;
  uint8_t gpu[16] = {};
  // In-place sharing (MEPIC §3.2): the daemon allocates the page numbers, and all requests of this cache read one copy
  // of each segment and of each block of an exact prefix (Request::Admit). Only with kHosted memory and one page table.
  bool share_in_place = false;
};

// ---------------------------------------------------------------------------------------------------- opening

class Cache;

// Threads that the engine lends to kernels in this process. `run` calls body(body_context, i) once for every i in
// [0, count) on up to `size` threads, the calling thread included, and returns when all calls have returned. Several
// threads may call `run` at once. It must outlive the cache, its requests and its jobs.
struct Workers {
  void* context = nullptr;
  int32_t size = 0;
  void (*run)(void* context, int64_t count, void (*body)(void* body_context, int64_t index),
              void* body_context) = nullptr;  // null: kernels use the calling thread only
};

// Who composes in Request::Advance: this process's kernels, on the CPU, or the daemon.
enum class ComposeBy : uint8_t { kProcess = 1, kDaemon = 2 };

struct OpenOptions {
  const char* rpc_socket = nullptr;
  const char* session_socket = nullptr;
  const char* name = nullptr;  // shown in the daemon's logs
  uint32_t timeout_ms = 5000;  // limit of one call to the daemon
  // If set, the new cache shares this cache's session, and with kShared its memory: for an engine that serves several
  // layouts or adapters. The sockets are ignored.
  const Cache* share_with = nullptr;

  Model model;
  Memory memory;

  // Exact prefixes (Commit): the engine can capture states inside a prompt at multiples of this. 0: do not use
  // prefixes.
  uint32_t capture_tokens = 0;
  // Buffered spans (KVBuffer §6): the engine captures the linear layers' inputs for up to this many last tokens of a
  // text (Text::span). The cache may then keep an earlier checkpoint and rebuild the state by the recurrence. 0: none.
  uint32_t span_tokens = 0;
  DType span_dtype = DType::kF32;

  // Largest error ‖T − T̃‖₂ of a dense transition that is stored in a smaller form; 0: store each as it is.
  double epsilon = 1e-6;
  ComposeBy compose = ComposeBy::kProcess;
  // land_ms: how long WaitLayer and Finish wait for a landing before the plan changes to computing.
  // quiet_ms: how long Finish waits until the daemon has stopped writing before it returns kOtherPages.
  uint32_t land_ms = 5000;
  uint32_t quiet_ms = 10000;

  Workers workers;
};

// ---------------------------------------------------------------------------------------------------- requests

// A multimodal input of a text: the index of its first token, and the hash of its content. A segment contains all of
// its tokens or none.
struct Media {
  uint64_t offset = 0;
  uint8_t hash[32] = {};
};

// The pages of one group of layers (Memory::groups): pages[p / page_tokens] holds position p. Calls take one table per
// group, in the order of the groups.
struct PageTable {
  const int32_t* pages = nullptr;
  uint64_t count = 0;
};

// One prompt. Its segments follow each other from position 0. The first segment is a prefix, cached whole; of the other
// segments the interior is cached. Tokens after the last segment are always computed, and so is the prompt's last
// token.
struct Prompt {
  const int32_t* tokens = nullptr;  // must stay valid until the request ends
  uint64_t token_count = 0;
  const uint64_t* segment_lengths = nullptr;
  uint64_t segment_count = 0;
  // The prompt's pages: page_table[p / page_tokens] holds position p. Null: this request lands nothing (PlanBytes,
  // Admit).
  const int32_t* page_table = nullptr;
  uint64_t page_count = 0;
  // Random bytes that name a conversation: the prompt may resume from the conversation's own states. Zero: none.
  uint8_t conversation[16] = {};
  uint64_t needed_in_ms = 0;     // without a page table: time until the request will need the hits, from now
  bool fill = false;             // the engine computes the runs of missing(); needs pages, except with cold_parallel
  const Media* media = nullptr;  // offsets ascend
  uint64_t media_count = 0;
  // With `fill`: other engines that offer prefill (Cache::ServePrefill) may compute missed segments if that is faster.
  // missing() lists this engine's part. Compute it, call WaitCold, then LookAgain. A cache without pages reserves
  // nothing: another process of the engine publishes this part.
  bool cold_parallel = false;
  // Instead of page_table if the memory's layers are in groups (Memory::groups).
  const PageTable* page_tables = nullptr;
  uint32_t page_table_count = 0;
  // With `fill`, for an engine that only stores: Begin does not look the prompt up, and missing() lists the segments
  // (of a tensor-parallel model: this rank's shards) that the cache lacks. Publish them and end the request. LookAgain
  // looks the prompt up.
  bool store_only = false;
  // Up to 4,096 bytes, for example a user's number; salt_bytes 0: no salt. Prompts with different salts share nothing,
  // so response times reveal nothing about other prompts. A daemon before protocol 4 misses every salted prompt.
  const void* salt = nullptr;
  uint64_t salt_bytes = 0;
  // [segment_count]: the rotary position of a segment's keys minus its position in the page table. For models that
  // count the positions of a medium differently from its tokens. Null: all 0; the first shift must be 0. Not with
  // Memory::share_in_place. A daemon before protocol 3 misses shifted segments.
  const int64_t* rotary_shifts = nullptr;
};

// A plan from another process, and the pages to land it in; see Prompt.
struct PlanToLand {
  const uint8_t* plan = nullptr;
  uint64_t plan_bytes = 0;
  const int32_t* page_table = nullptr;
  uint64_t page_count = 0;
  // The pages already hold the keys and values of this many first tokens, for example because running requests share
  // them. If a prefix lands, its whole blocks within these tokens are not written. A block is the smallest whole number
  // of pages with 256 tokens or more.
  uint64_t present_tokens = 0;
  const PageTable* page_tables = nullptr;  // replaces page_table; see Prompt
  uint32_t page_table_count = 0;
  const int64_t* rotary_shifts = nullptr;  // one per segment of the plan; see Prompt
  uint64_t rotary_shift_count = 0;
};

enum class StepKind : uint8_t {
  kCompute = 1,     // run tokens [begin, end) through the model
  kCheckpoint = 2,  // take [0, end) from the cache and replace the running states by its states
  kInterior = 3,    // take [begin, end) from the cache: compose its tuples onto the running states (HYPIC §4.3)
};

// Steps follow each other and cover the prompt.
struct Step {
  static constexpr uint32_t kPrefix = UINT32_MAX;
  StepKind kind = StepKind::kCompute;
  bool capture = false;         // kCompute only: capture the states at `end` for Commit
  uint32_t segment = 0;         // other kinds: index of the cached segment; kPrefix: a prefix that is not a segment
  uint64_t begin = 0, end = 0;  // positions
};

struct Segment {
  uint64_t start = 0, tokens = 0;
  uint64_t bytes = 0;  // size of the cached object
  uint8_t reason = 0;  // 0: hit; otherwise why it missed (MissName)
  uint8_t tier = 0;    // the tier of the hit (TierName)
  bool used = false;   // whether the plan takes it from the cache
};

// Valid until the request ends, or a call on it returns kRestart or kOtherPages.
struct Plan {
  const Step* steps = nullptr;
  uint32_t step_count = 0;
  const Segment* segments = nullptr;
  uint32_t segment_count = 0;
  uint64_t prefix_tokens = 0;  // tokens of the first step, if it is a prefix that is not a segment (Step::kPrefix)
  uint64_t cached_tokens = 0;  // tokens of all steps that are not computed
  bool own = false;            // true: the prefix is from the conversation's private states
  bool exact = true;           // the computed tokens are exact: no interior and no composed prefix
  uint8_t prefix_tier = 0;     // the slowest tier that a part of the prefix is in (TierName)
  // Last tokens of the prefix whose states the cache rebuilds from a buffered span (OpenOptions::span_tokens).
  uint32_t prefix_span_tokens = 0;
  // With Memory::share_in_place: number of the prefix's first tokens that are in shared pages, a multiple of
  // page_tokens. 0 for a conversation's own prefix.
  uint64_t shared_prefix_tokens = 0;
};

// A segment that the engine computes by itself and publishes: from a zero state, its token 0 at position 0, in any free
// pages.
struct Run {
  const int32_t* tokens = nullptr;
  uint64_t token_count = 0;
  uint32_t segment = 0;
  // The tuple covers tokens [capture_begin, capture_end). With a transition, its state is zero at capture_begin.
  uint64_t capture_begin = 0, capture_end = 0;
  bool transition = false;
};

// ---------------------------------------------------------------------------------------------------- in-place sharing

// The pages that Request::Admit lacks. Every page is free, reclaimable or held.
struct PageShortage {
  uint64_t needed = 0;  // excludes pages that the request's segments and blocks already have
  uint64_t free = 0;
  uint64_t reclaimable = 0;  // pages of segments and blocks that no request references
  uint64_t held = 0;         // pages of running requests, or of segments and blocks that this request would share
};

// One segment of an admitted request, or its prefix. Token i of the segment is at slot first_slot + i, counted from the
// start of its page table. Tokens [first_token, end_token) are in shared pages; the others (the seams) are in the
// request's own pages. Rotated keys are rotated to their slot: token i by first_slot + i, in every request.
struct SharedSegment {
  uint64_t first_slot = 0;
  uint64_t first_token = 0, end_token = 0;
  const int32_t* pages = nullptr;  // pages of slots 0, page_tokens, …; −1: a page that is not shared
  uint64_t page_count = 0;
};

// The pages of an admitted request. Valid until the next Admit on the request, kOtherPages, or its end.
struct AdmittedPages {
  // One per segment of the prompt. Segments that neither the plan reads nor the engine fills have no pages.
  const SharedSegment* segments = nullptr;
  uint32_t segment_count = 0;
  const int32_t* own_pages = nullptr;  // ordered as Admit added them
  uint64_t own_page_count = 0;
  // The blocks of the prefix that were shared when Admit was first called: token i is at position and slot i. The plan
  // reads the first Plan::shared_prefix_tokens tokens there. The tokens after them, up to Plan::prefix_tokens, land on
  // the first own pages, in order.
  SharedSegment prefix;
};

}  // namespace ashlar::engine
