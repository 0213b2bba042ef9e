// SPDX-License-Identifier: Apache-2.0
/* Codes, numbers, handles and structs of the C API. Include ashlar.h, which describes their use. Fields have the same
 * meaning, shape and units as in ashlar/engine.h and ashlar/engine_types.h. */
#ifndef ASHLAR_TYPES_H
#define ASHLAR_TYPES_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ashlar_prompt prompt = ASHLAR_INIT(ashlar_prompt); */
#define ASHLAR_INIT(type) \
  { .size = sizeof(type) }

enum {
  ASHLAR_OK = 0,
  ASHLAR_INVALID_ARGUMENT = 3,
  ASHLAR_PERMISSION_DENIED = 7,
  ASHLAR_RESOURCE_EXHAUSTED = 8,
  ASHLAR_FAILED_PRECONDITION = 9,
  ASHLAR_INTERNAL = 13,
  ASHLAR_UNAVAILABLE = 14,
  /* not errors */
  ASHLAR_PENDING = 100,
  ASHLAR_RESTART = 101,
  ASHLAR_OTHER_PAGES = 102,
  ASHLAR_NO_PAGES = 103
};

/* Numbers of types, families and forms: docs/formats.md. */
enum { ASHLAR_F32 = 1, ASHLAR_F16 = 2, ASHLAR_BF16 = 3, ASHLAR_F8E4M3 = 4, ASHLAR_F8E5M2 = 5 };
enum { ASHLAR_GQA = 1, ASHLAR_MLA = 2, ASHLAR_LINEAR = 3, ASHLAR_OPAQUE = 4 };
enum { ASHLAR_ROPE_NONE = 0, ASHLAR_ROPE_HALF_SPLIT = 1, ASHLAR_ROPE_INTERLEAVED = 2 };
enum { ASHLAR_KEYS_ZERO_BASED = 1, ASHLAR_KEYS_UNROTATED = 2 };
enum { ASHLAR_RETNET = 1, ASHLAR_LIGHTNING = 2, ASHLAR_MAMBA2 = 3, ASHLAR_MAMBA1 = 4 };
enum { ASHLAR_GLA = 5, ASHLAR_DELTANET = 6, ASHLAR_GDN = 7, ASHLAR_KDA = 8 };
enum { ASHLAR_KEY_FIRST = 1, ASHLAR_VALUE_FIRST = 2 };
enum { ASHLAR_TOKEN_FIRST = 1, ASHLAR_CHANNEL_FIRST = 2 };
enum { ASHLAR_FORM_SCALAR = 1, ASHLAR_FORM_DIAGONAL = 2, ASHLAR_FORM_DENSE = 3, ASHLAR_FORM_ELEMENTWISE = 4 };
enum { ASHLAR_FORM_LOW_RANK = 5, ASHLAR_FORM_ZERO = 6 };
enum { ASHLAR_MEMORY_NONE = 0, ASHLAR_MEMORY_HOSTED = 1, ASHLAR_MEMORY_MEMFD = 2, ASHLAR_MEMORY_SHARED = 3 };
enum { ASHLAR_MEMORY_GPU = 4 }; /* the engine's memory on a GPU that the daemon serves */
enum { ASHLAR_COMPOSE_IN_PROCESS = 1, ASHLAR_COMPOSE_IN_DAEMON = 2 };
enum { ASHLAR_STEP_COMPUTE = 1, ASHLAR_STEP_CHECKPOINT = 2, ASHLAR_STEP_INTERIOR = 3 };
#define ASHLAR_STEP_OF_PREFIX UINT32_MAX /* ashlar_step.segment: a prefix that is no segment */

typedef struct ashlar_cache ashlar_cache;     /* a session, an opened model, a memory of pages */
typedef struct ashlar_request ashlar_request; /* a prompt */
typedef struct ashlar_job ashlar_job;         /* a call that was started */

/* ------------------------------------------------------------------------------------------------ the model */

typedef struct ashlar_rope {
  size_t size;
  uint32_t style;
  uint32_t rotary_dim;
  double scale;              /* 0: 1 */
  const double* frequencies; /* [rotary_dim / 2], radians per position */
} ashlar_rope;

typedef struct ashlar_layer {
  size_t size;
  uint32_t kind;
  const ashlar_rope* rope; /* null: none */
  /* attention */
  uint32_t kv_heads, key_dim, value_dim;
  uint32_t dtype;  /* 0: ASHLAR_F32 */
  uint32_t scales; /* fp8: one fp32 scale per token and head */
  uint32_t stored; /* 0: ASHLAR_KEYS_ZERO_BASED */
  /* linear */
  uint32_t family;
  uint32_t key_heads, value_heads, d_k, d_v;
  uint32_t state_dtype; /* 0: ASHLAR_F32 */
  uint32_t order;       /* 0: ASHLAR_KEY_FIRST */
  uint32_t conv_channels, conv_kernel;
  uint32_t conv_dtype;      /* 0: state_dtype */
  uint32_t conv_order;      /* 0: ASHLAR_TOKEN_FIRST */
  const float* decay_table; /* retnet, lightning, mamba2: [value_heads]; mamba1: [value_heads, d_k, d_v] */
  /* opaque: bytes that are stored and landed as they are, for exact prefixes only; sums over the ranks */
  uint32_t token_bytes; /* per token in the pages: key_offset, page_stride and token_stride of its place */
  uint64_t state_bytes; /* of the state: `state` of its tensors */
} ashlar_layer;

typedef struct ashlar_model {
  size_t size;
  const char *model_id, *weights_digest; /* required */
  const char *dtype, *quantization, *tokenizer_digest, *lora;
  uint32_t page_tokens;
  uint32_t head, tail; /* seam widths, tokens */
  const ashlar_layer* layers;
  uint32_t layer_count;
  uint32_t tensor_parallel_rank, tensor_parallel_size; /* 0: 1 */
  double flops_per_token, flops_per_token_squared;     /* 0: the daemon estimates both */
  double tokens_per_second;                            /* of prefill; 0: no break-even check */
} ashlar_model;

/* Bytes. Head h of the token in slot s of page p is at offset + p * page_stride + s * token_stride + h *
 * head_stride. */
typedef struct ashlar_page_place {
  size_t size;
  uint32_t layer;
  uint64_t key_offset, value_offset;
  uint64_t page_stride, token_stride;
  uint64_t key_head_stride, value_head_stride;
  uint64_t key_scale_offset, value_scale_offset;
  uint64_t scale_page_stride, scale_token_stride, scale_head_stride;
} ashlar_page_place;

/* Attention layers that share one page table. */
typedef struct ashlar_layer_group {
  size_t size;
  const uint32_t* layers; /* each attention layer belongs to one group */
  uint32_t layer_count;
  uint32_t page_tokens; /* 0: the model's */
  uint32_t pages;       /* 0: as many as in ashlar_memory */
} ashlar_layer_group;

typedef struct ashlar_memory {
  size_t size;
  uint32_t kind;
  uint32_t pages;
  const ashlar_page_place* places; /* null: the cache chooses the places */
  uint32_t place_count;
  uint64_t bytes; /* ignored if the cache chooses the places */
  int32_t memfd;  /* ASHLAR_MEMORY_MEMFD: the caller keeps ownership */
  /* null: one page table serves all attention layers; otherwise calls take page_tables, one per group */
  const ashlar_layer_group* groups;
  uint32_t group_count;
  uint32_t common_pages; /* 1: all groups draw page numbers from one pool; a page belongs to one group at a time */
  /* ASHLAR_MEMORY_GPU: an allocation of cuMemCreate of exactly `bytes` bytes, mapped at gpu_data and exported as a
   * POSIX file descriptor. The caller keeps both, and may close the descriptor after ashlar_open. Pages only. */
  int32_t gpu_descriptor;
  uint8_t* gpu_data;
  uint8_t gpu[16];         /* CUDA's UUID (cuDeviceGetUuid_v2); all zero: the daemon's only GPU */
  uint32_t share_in_place; /* 1: the daemon allocates pages, and requests share segments (ashlar_request_admit) */
} ashlar_memory;

/* Threads that the engine lends: run() calls body(body_context, i) once for each i in [0, count). They outlive the
 * cache. */
typedef struct ashlar_workers {
  size_t size;
  void* context;
  int32_t threads;
  void (*run)(void* context, int64_t count, void (*body)(void* body_context, int64_t index), void* body_context);
} ashlar_workers;

typedef struct ashlar_open_options {
  size_t size;
  const char *rpc_socket, *session_socket, *name;
  uint32_t timeout_ms;            /* 0: 5000 */
  const ashlar_cache* share_with; /* the cache whose session to share; null: a new session */
  const ashlar_model* model;
  const ashlar_memory* memory; /* null: no pages (a scheduler) */
  uint32_t capture_tokens;     /* 0: no exact prefixes */
  uint32_t span_tokens;
  uint32_t span_dtype;           /* 0: ASHLAR_F32 */
  double epsilon;                /* 0: 1e-6; negative: transitions are stored as they are */
  uint32_t compose;              /* 0: in this process */
  uint32_t land_ms, quiet_ms;    /* 0: 5000, 10000 */
  const ashlar_workers* workers; /* null: kernels use the calling thread only */
} ashlar_open_options;

/* ------------------------------------------------------------------------------------------------ requests */

typedef struct ashlar_media { /* fixed: it has no size field */
  uint64_t offset;
  uint8_t hash[32];
} ashlar_media;

typedef struct ashlar_page_table { /* of one group of layers, from position 0; fixed: it has no size field */
  const int32_t* pages;
  uint64_t count;
} ashlar_page_table;

typedef struct ashlar_prompt {
  size_t size;
  const int32_t* tokens; /* must stay valid until the request ends */
  uint64_t token_count;
  const uint64_t* segment_lengths;
  uint64_t segment_count;
  const int32_t* page_table; /* null: nothing lands here */
  uint64_t page_count;
  uint8_t conversation[16]; /* zero: none */
  uint64_t needed_in_ms;
  uint32_t fill; /* 1: the engine computes the missing runs */
  const ashlar_media* media;
  uint64_t media_count;
  uint32_t cold_parallel; /* 1, with fill: other engines may compute some of them (ashlar_request_wait_cold) */
  const ashlar_page_table* page_tables; /* instead of page_table if ashlar_memory has groups */
  uint32_t page_table_count;
  uint32_t store_only; /* 1, with fill: no lookup; publish the missing runs and end the request */
  const void* salt;    /* up to 4096 bytes: prompts with different salts share nothing */
  uint64_t salt_bytes;
  const int64_t* rotary_shifts; /* [segment_count], positions; null: 0 */
} ashlar_prompt;

typedef struct ashlar_plan_to_land {
  size_t size;
  const uint8_t* plan;
  uint64_t plan_bytes;
  const int32_t* page_table;
  uint64_t page_count;
  uint64_t present_tokens; /* that these pages hold already: a prefix's whole blocks within them are not written */
  const ashlar_page_table* page_tables;
  uint32_t page_table_count;
  const int64_t* rotary_shifts; /* [rotary_shift_count], as in ashlar_prompt */
  uint64_t rotary_shift_count;
} ashlar_plan_to_land;

typedef struct ashlar_plan {
  size_t size;
  uint32_t step_count, segment_count;
  uint64_t prefix_tokens, cached_tokens;
  uint32_t own, exact;
  uint32_t prefix_tier;          /* the slowest tier that a part of the prefix is in (ashlar_tier_name) */
  uint32_t prefix_span_tokens;   /* last tokens of the prefix whose states are rebuilt from a buffered span */
  uint64_t shared_prefix_tokens; /* number of the prefix's first tokens in shared pages (ashlar_request_admit) */
} ashlar_plan;

typedef struct ashlar_step {
  size_t size;
  uint32_t kind, capture, segment;
  uint64_t begin, end;
} ashlar_step;

typedef struct ashlar_segment {
  size_t size;
  uint64_t start, tokens, bytes;
  uint32_t reason; /* 0: hit; otherwise ashlar_miss_name */
  uint32_t tier;   /* of the hit (ashlar_tier_name) */
  uint32_t used;
} ashlar_segment;

typedef struct ashlar_run {
  size_t size;
  const int32_t* tokens; /* valid until the request ends or looks again */
  uint64_t token_count;
  uint32_t segment;
  uint64_t capture_begin, capture_end;
  uint32_t transition;
} ashlar_run;

/* Pages that ashlar_request_admit lacks. Every page is free, reclaimable or held. */
typedef struct ashlar_page_shortage {
  size_t size;
  uint64_t needed, free, reclaimable, held;
} ashlar_page_shortage;

/* One segment of an admitted request, or its prefix: token i is at slot first_slot + i of `pages`, and tokens
 * [first_token, end_token) are in shared pages. */
typedef struct ashlar_shared_segment {
  size_t size;
  uint64_t first_slot, first_token, end_token;
  const int32_t* pages; /* -1: a page that is not shared; valid until the request ends */
  uint64_t page_count;
} ashlar_shared_segment;

typedef struct ashlar_linear_tensors {
  size_t size;
  uint32_t layer;
  const void* state;
  const int32_t* state_exponents;
  const void* conv_tail;
  const float* transition;
  const float* decay;
  int64_t state_head_stride; /* elements from one head to the next; 0: dense */
  int64_t conv_row_stride;   /* elements from one row of the tail to the next; 0: dense */
} ashlar_linear_tensors;

typedef struct ashlar_computed_run {
  size_t size;
  const ashlar_linear_tensors* linear; /* every linear layer */
  uint32_t linear_count;
  const int32_t* page_table;
  uint64_t page_count;
  uint64_t first_position;
  const ashlar_page_table* page_tables;
  uint32_t page_table_count;
} ashlar_computed_run;

typedef struct ashlar_tuple {
  size_t size;
  uint32_t head_count;
  uint32_t transition_dtype, state_dtype;
  uint64_t position;
  const void* conv_tail; /* valid until the next ASHLAR_RESTART or the request's end */
} ashlar_tuple;

typedef struct ashlar_head { /* S <- T S + state * 2^state_exponent */
  size_t size;
  uint32_t form;
  int32_t rank;
  const void* transition; /* valid as long as the tuple's conv_tail */
  const void* state;
  int32_t state_exponent;
} ashlar_head;

typedef struct ashlar_state {
  size_t size;
  void* data;
  uint32_t dtype;      /* 0: ASHLAR_F32 */
  int32_t* exponents;  /* [value_heads]; with ASHLAR_F16 only */
  int64_t head_stride; /* elements from one head to the next; 0: dense */
} ashlar_state;

typedef struct ashlar_state_copy {
  size_t size;
  uint64_t position;
  const ashlar_state* state;
} ashlar_state_copy;

/* fp32; strides are floats from one token to the next; 0: dense. */
typedef struct ashlar_token_rows {
  size_t size;
  uint64_t tokens;
  const float *q, *k, *v, *g, *beta;
  int64_t q_stride, k_stride, v_stride, g_stride, beta_stride;
  float norm_epsilon; /* above 0: each head's q and k are multiplied by 1 / sqrt(sum of squares + norm_epsilon) */
  float q_scale;      /* factor of q, after normalization; 0: 1 */
} ashlar_token_rows;

typedef struct ashlar_layer_advance {
  size_t size;
  uint32_t layer;
  uint64_t begin, end;
  const ashlar_token_rows* inputs; /* null: no tokens are computed */
  const ashlar_state* state;
  float* out;
  int64_t out_stride;
  const ashlar_state_copy* copies;
  uint32_t copy_count;
} ashlar_layer_advance;

typedef struct ashlar_alone_layer {
  size_t size;
  uint32_t layer;
  const ashlar_token_rows* inputs;
  float* out;
  int64_t out_stride;
  uint32_t missing; /* the run whose tuple is wanted */
  const ashlar_state* state;
  float* transition;
  float* decay; /* out: [value_heads][d_k], for families that erase; may be null */
} ashlar_alone_layer;

/* ------------------------------------------------------------------------------------------------ committing */

typedef struct ashlar_span_rows {
  size_t size;
  uint32_t layer;
  const float *keys, *values, *gates, *betas, *conv_inputs;
} ashlar_span_rows;

typedef struct ashlar_checkpoint {
  size_t size;
  uint64_t depth;
  const ashlar_linear_tensors* linear;
  uint32_t linear_count;
} ashlar_checkpoint;

typedef struct ashlar_text {
  size_t size;
  const ashlar_request* request; /* null: the text began without a request */
  const int32_t* tokens;
  uint64_t token_count, prompt_tokens;
  const ashlar_checkpoint* checkpoints;
  uint32_t checkpoint_count;
  const int32_t* page_table;
  uint64_t page_count;
  uint8_t conversation[16];
  uint64_t span_begin;
  const ashlar_span_rows* span;
  uint32_t span_count;
  uint32_t composed;
  uint8_t* outcomes; /* one per checkpoint (ashlar_commit_name) */
  const ashlar_media* media;
  uint64_t media_count;
  const ashlar_page_table* page_tables;
  uint32_t page_table_count;
  const void* salt; /* as in ashlar_prompt; the salt of the request's prompt */
  uint64_t salt_bytes;
} ashlar_text;

typedef struct ashlar_stored_segments {
  size_t size;
  uint64_t segments, bytes, own_bytes;
  uint64_t heads[7];
} ashlar_stored_segments;

#ifdef __cplusplus
}
#endif

#endif /* ASHLAR_TYPES_H */
