// SPDX-License-Identifier: Apache-2.0
// The plain types of the engine's API (ashlar/engine.h): statuses, the model, its memory, the options of Open, prompts
// and their plans.
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
  // Errors have the numbers of gRPC's.
  kInvalidArgument = 3,
  kPermissionDenied = 7,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kInternal = 13,
  kUnavailable = 14,
  // No errors.
  kPending = 100,     // not yet: ask again
  kRestart = 101,     // the plan has changed: compute it again from its first step
  kOtherPages = 102,  // as kRestart, and the request needs other pages first (Request::Move)
};

struct Status {
  Code code = Code::kOk;
  char message[252] = "";  // ends with a zero
  bool ok() const { return code == Code::kOk; }
};

// ---------------------------------------------------------------------------------------------------- the model

enum class LayerKind : uint8_t { kGqa = 1, kMla = 2, kLinear = 3 };

struct Rope {
  RopeStyle style = RopeStyle::kNone;
  uint32_t rotary_dim = 0;
  double scale = 1.0;
  const double* frequencies = nullptr;  // [rotary_dim / 2], radians a position
};

// One layer of the whole model. Fields of the other kind are not read.
struct Layer {
  LayerKind kind = LayerKind::kGqa;
  Rope rope;  // of a linear layer: on keys inside the layer, with scalar transitions only

  // Attention.
  uint32_t kv_heads = 0;
  uint32_t key_dim = 0;    // mla: of the latent
  uint32_t value_dim = 0;  // mla: of the rotary key part
  DType dtype = DType::kF32;
  bool scales = false;  // fp8: one fp32 a token and head
  StoredKeys stored = StoredKeys::kZeroBased;

  // Linear.
  Family family = Family::kGdn;
  uint32_t key_heads = 0, value_heads = 0;
  uint32_t d_k = 0, d_v = 0;
  DType state_dtype = DType::kF32;
  StateOrder order = StateOrder::kKeyFirst;
  uint32_t conv_channels = 0, conv_kernel = 0;  // 0: no short convolution
  const float* decay_table = nullptr;           // retnet, lightning, mamba2: [value_heads]; mamba1: [heads, d_k, d_v]
  DType conv_dtype{};                           // of tails, and of convolution inputs in spans; 0: state_dtype
  TailOrder conv_order = TailOrder::kTokenFirst;
};

// A model's identity, and the exact shape of its cached state. Null strings are empty.
struct Model {
  const char* model_id = nullptr;
  const char* weights_digest = nullptr;  // of the weights as loaded; never empty
  const char* dtype = nullptr;
  const char* quantization = nullptr;
  const char* tokenizer_digest = nullptr;
  const char* lora = nullptr;
  uint32_t page_tokens = 0;
  uint32_t head = 0, tail = 0;  // seam widths: of a segment of n tokens [head, n − tail) is cached
  const Layer* layers = nullptr;
  uint32_t layer_count = 0;
  uint32_t tensor_parallel_rank = 0, tensor_parallel_size = 1;
  // Of the whole model, for eviction. If flops_per_token is 0, the daemon estimates both from the layout.
  double flops_per_token = 0, flops_per_token_squared = 0;
  double tokens_per_second = 0;  // of prefill, for the break-even check; 0: every hit is taken
};

// ---------------------------------------------------------------------------------------------------- the memory

enum class MemoryKind : uint8_t {
  kNone = 0,    // no pages: a scheduler, which looks up and lands nothing
  kHosted = 1,  // the daemon makes it for this engine
  kMemfd = 2,   // the engine's, sealed with F_SEAL_SHRINK
  kBeside = 3,  // that of OpenOptions::beside
  kGpu = 4,     // the engine's, on a GPU that the daemon serves
};

// The place of one attention layer's pages in the memory, in bytes. The row of head h of the token in slot s of page p:
// offset + p × page_stride + s × token_stride + h × head_stride.
struct PagePlace {
  uint32_t layer = 0;
  uint64_t key_offset = 0, value_offset = 0;
  uint64_t page_stride = 0, token_stride = 0;
  uint64_t key_head_stride = 0, value_head_stride = 0;
  uint64_t key_scale_offset = 0, value_scale_offset = 0;
  uint64_t scale_page_stride = 0, scale_token_stride = 0, scale_head_stride = 0;
};

// Attention layers whose pages one page table names.
struct LayerGroup {
  const uint32_t* layers = nullptr;  // attention layers; each is in one group
  uint32_t layer_count = 0;
  uint32_t page_tokens = 0;  // 0: the model's
  uint32_t pages = 0;        // 0: Memory::pages
};

struct Memory {
  MemoryKind kind = MemoryKind::kHosted;
  uint32_t pages = 0;
  // One place an attention layer of this process's shard, ascending. Null: the cache places the pages, in memory that
  // it hosts, and Cache::places returns the places.
  const PagePlace* places = nullptr;
  uint32_t place_count = 0;
  uint64_t bytes = 0;  // of the memory; not read if the cache places the pages
  int32_t memfd = -1;  // stays the caller's
  // Null: one page table serves all attention layers. Else calls take a table a group (PageTable), and no page_table.
  const LayerGroup* groups = nullptr;
  uint32_t group_count = 0;
  // Page numbers are one set for all groups, of as many pages each: a page belongs to one group at a time, as blocks of
  // vLLM's pool do. Places of layers of different groups may share memory, page by page; the cache places them so.
  // Else each group numbers its pages apart, and places share nothing.
  bool common_pages = false;
  // Of kGpu: an allocation of CUDA's virtual memory management (cuMemCreate) of exactly `bytes` bytes, which the engine
  // has mapped at `gpu_data` and exported as the POSIX file descriptor `gpu_descriptor`. Both stay the caller's,
  // and the descriptor is not needed behind Open. `gpu`: CUDA's UUID of the GPU (cuDeviceGetUuid_v2); all zero: the
  // daemon's only one.
  int32_t gpu_descriptor = -1;
  uint8_t* gpu_data = nullptr;
  uint8_t gpu[16] = {};
};

// ---------------------------------------------------------------------------------------------------- opening

class Cache;

// Threads that the engine lends to kernels in this process: run calls body(body_context, i) once for every i in
// [0, count), from up to `size` threads of which the calling one is one, and returns when all have returned. It may be
// called from several threads at once. Outlives the cache, its requests and its jobs.
struct Workers {
  void* context = nullptr;
  int32_t size = 0;
  void (*run)(void* context, int64_t count, void (*body)(void* body_context, int64_t index),
              void* body_context) = nullptr;  // null: the calling thread works alone
};

// The place of composition in Request::Advance: kernels in this process, on the processor; or the daemon, for this
// engine.
enum class ComposeBy : uint8_t { kProcess = 1, kDaemon = 2 };

struct OpenOptions {
  const char* rpc_socket = nullptr;
  const char* session_socket = nullptr;
  const char* name = nullptr;  // for the daemon's logs
  uint32_t timeout_ms = 5000;  // of every call of the daemon
  // Shares the session of this cache, and with memory kBeside also its memory: for an engine that serves several
  // layouts or adapters. The sockets are not read.
  const Cache* beside = nullptr;

  Model model;
  Memory memory;

  // Exact prefixes (Commit): the engine can capture states inside a prompt at multiples of this. 0: no prefixes are
  // used.
  uint32_t capture_tokens = 0;
  // The engine captures inputs of up to so many last tokens (SpanRows). 0: none.
  uint32_t span_tokens = 0;
  DType span_dtype = DType::kF32;

  // The greatest error ‖T − T̃‖₂ of a published dense transition; 0: each is stored as it is.
  double epsilon = 1e-6;
  ComposeBy compose = ComposeBy::kProcess;
  // land_ms: how long a layer, and then the verdict, is waited for before missing layers are computed instead.
  // quiet_ms: how long Finish waits for slots in doubt before it asks for other pages.
  uint32_t land_ms = 5000;
  uint32_t quiet_ms = 10000;

  Workers workers;
};

// ---------------------------------------------------------------------------------------------------- requests

// A multimodal input of a text: the token at which it begins, counted from the text's start, and its content's hash.
// All its tokens lie in one segment, or all in none.
struct Media {
  uint64_t offset = 0;
  uint8_t hash[32] = {};
};

// The pages of one group of layers (Memory::groups), from position 0: pages[p / page_tokens] has position p. Calls take
// one table a group, in the groups' order.
struct PageTable {
  const int32_t* pages = nullptr;
  uint64_t count = 0;
};

// One prompt: segments lie one behind the other from position 0. The first segment is a prefix and cached whole; of the
// others the interior is cached. Tokens behind the last segment are always computed, and so is the prompt's last token.
struct Prompt {
  const int32_t* tokens = nullptr;  // stay until the request ends
  uint64_t token_count = 0;
  const uint64_t* segment_lengths = nullptr;
  uint64_t segment_count = 0;
  // The prompt's pages from position 0: page_table[p / page_tokens] has position p. Null: nothing lands here
  // (PlanBytes).
  const int32_t* page_table = nullptr;
  uint64_t page_count = 0;
  // Drawn by the engine at random: the prompt may resume from the conversation's own states. Zero: none.
  uint8_t conversation[16] = {};
  uint64_t needed_in_ms = 0;     // without a page table: the time until it will be needed
  bool fill = false;             // the engine computes the runs of missing(); not without pages
  const Media* media = nullptr;  // offsets ascend
  uint64_t media_count = 0;
  // With `fill`: segments that are missed may be computed by engines that offer prefill (Cache::ServePrefill), where
  // that is faster. missing() lists this engine's own part; after computing it, WaitCold, then LookAgain.
  bool cold_parallel = false;
  // In place of page_table, where the memory's layers are in groups (Memory::groups).
  const PageTable* page_tables = nullptr;
  uint32_t page_table_count = 0;
  // With `fill`, for an engine that stores and lands nothing: the prompt is not looked up, and missing() lists all that
  // the cache does not have. Publish, and end the request; LookAgain looks the prompt up after all.
  bool store_only = false;
  // Any bytes, up to 4,096, for example a user's number. Prompts with different salts, or with none, share nothing:
  // none hits what others stored, so no time to first token says what they asked. Count 0: none. With a daemon of
  // before protocol 4 such a prompt misses. It is copied.
  const void* salt = nullptr;
  uint64_t salt_bytes = 0;
};

// A plan to land, and the pages in which to land it, as in Prompt.
struct PlanToLand {
  const uint8_t* plan = nullptr;
  uint64_t plan_bytes = 0;
  const int32_t* page_table = nullptr;
  uint64_t page_count = 0;
  // The keys and values of so many first tokens stand in those pages already. If a prefix lands, its whole blocks (as
  // many tokens as whole pages have, 256 or more) among these tokens are not written. For pages that running requests
  // share.
  uint64_t present_tokens = 0;
  const PageTable* page_tables = nullptr;  // in place of page_table, as in Prompt
  uint32_t page_table_count = 0;
};

enum class StepKind : uint8_t {
  kCompute = 1,     // run tokens [begin, end) through the model
  kCheckpoint = 2,  // takes [0, end) from the cache: states replace the running ones, keys and values land
  kInterior = 3,    // takes [begin, end) from the cache: tuples are composed onto the running states
};

// Steps lie one behind the other and cover the prompt.
struct Step {
  static constexpr uint32_t kPrefix = UINT32_MAX;
  StepKind kind = StepKind::kCompute;
  bool capture = false;         // the daemon asks for the states behind this step (Commit); after kCompute alone
  uint32_t segment = 0;         // taken from the cache; kPrefix: a prefix beyond segments
  uint64_t begin = 0, end = 0;  // positions
};

struct Segment {
  uint64_t start = 0, tokens = 0;
  uint64_t bytes = 0;  // of the cached object
  uint8_t reason = 0;  // 0: hit; else why it has to be computed (MissName)
  uint8_t tier = 0;    // the tier of the hit
  bool used = false;   // the plan takes it from the cache
};

// Valid until the request ends, or a call on it returns kRestart or kOtherPages.
struct Plan {
  const Step* steps = nullptr;
  uint32_t step_count = 0;
  const Segment* segments = nullptr;
  uint32_t segment_count = 0;
  uint64_t prefix_tokens = 0;  // of the first step, where that is a prefix beyond segments
  uint64_t cached_tokens = 0;  // tokens of all steps that are not computed
  bool own = false;            // the prefix was the conversation's own
  bool exact = true;           // tokens computed behind this plan are exact: no interior, no composed prefix
  uint8_t prefix_tier = 0;     // the farthest tier that any of the prefix lies in
};

// A run that is worth computing alone and publishing: from a zero state, its token 0 at position 0, in pages of its
// own.
struct Run {
  const int32_t* tokens = nullptr;
  uint64_t token_count = 0;
  uint32_t segment = 0;
  // The tuple covers tokens [capture_begin, capture_end). With a transition its state starts from zero there.
  uint64_t capture_begin = 0, capture_end = 0;
  bool transition = false;
};

}  // namespace ashlar::engine
