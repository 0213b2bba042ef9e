// SPDX-License-Identifier: Apache-2.0
// The engine API: how an inference engine uses the cache. Calls, in order:
//
//   Cache::Open      connects to the node's daemon, opens the model, allocates or registers the memory, declares pages
//   Cache::Begin     looks prompts up; if nothing is missing(), starts landing the hits
//   Request::missing, Publish, LookAgain   compute missed segments alone, publish them, land all hits
//     (with Prompt::cold_parallel: WaitCold before LookAgain; other engines compute some of them)
//   Request::plan    the steps of the prompt: tokens to compute, and parts taken from the cache
//   per layer:       Advance for linear layers; or WaitLayer, StepTuple and the engine's own kernels
//   Request::Finish  the verdict; kRestart: a hit failed to land and the plan has changed
//   Cache::Commit    offers states for later texts to resume from
//
// Errors. Lookups, landings, publishes and commits never fail because of the cache: they miss. Open, Admit, Handoff and
// ServePrefill return the cache's errors. Invalid calls return kFailedPrecondition, or kInvalidArgument (the message
// begins with the field, and nothing has changed). kResourceExhausted: this process is out of memory or threads; end
// the request. No function throws.
//
// Waiting. Open, Begin, Land, LookAgain, Publish, WaitCold, Commit, Handoff, ServePrefill and Admit wait for the
// daemon. All but Admit have a Start form that does not wait. If no background thread is free within timeout_ms, a
// started lookup is a miss. WaitPlan, WaitLayer and Finish have a Poll form that returns kPending instead of waiting.
// Advance waits for its layer, and with ComposeBy::kDaemon for the daemon: poll the layer first.
//
// Ownership of arguments. Tensors, rows, a text's tokens and the outcomes of a Start call must stay valid until its
// Poll returns kOk, and a prompt's tokens until the request ends. Page tables, plans and the structs that point to
// tensors are copied.
//
// Ownership of pages. A request that was begun with pages owns them until Finish returns kOk or kRestart, or
// PollQuiesced returns kOk. If nothing lands, it owns them until the plan is known. Until then the daemon may write to
// the pages, and the engine may write only the tokens that the plan tells it to compute. While missing() is not empty,
// nothing lands. If a request ends earlier, or gets kOtherPages, its pages belong to the cache: TakeQuiescedPages
// returns them once, and calls refuse them until then. To learn whether the pages are yours, call PollQuiesced before
// you end a request. kOtherPages: give the request other pages. Call LookAgain while missing() is not empty, otherwise
// Move, or Admit if the daemon allocates pages.
//
// In-place sharing (MEPIC §3.2). With Memory::share_in_place the daemon allocates page numbers, and running requests
// read one copy of each segment. Begin takes no pages. Request::Admit returns the request's pages: shared ones, and the
// requested number of own pages for tokens that it computes. The first request that can fill a segment's pages fills
// them: Admit lands hits into them in the background, or, if missing() was not empty, LookAgain does. WaitLayer and
// Finish wait until all segments that the plan uses are filled, also by other requests. Attention reads a shared key in
// place: it is rotated to its slot (SharedSegment), so rotate the query by the difference. Compute missed segments in
// the request's own pages, Publish them, and call LookAgain without pages. When the request ends, the daemon releases
// its pages.
// Whole blocks of an exact prefix are shared in the same way (Plan::shared_prefix_tokens, AdmittedPages::prefix). Their
// keys are rotated to their positions, so the page table of a prompt without segments is the shared pages of the
// prefix, followed by the request's own pages. The rest of the prefix lands after Admit. Texts with shared interiors
// cannot be committed, because the keys of the interiors are not rotated to their positions.
//
// GPUs. kGpu memory holds pages only. States, tails, rows and outputs are in host memory; a pointer to GPU memory is
// refused by name if it is in the cache's memory, and crashes the process otherwise. Before Publish, Commit and each
// call that may land (Begin, Land, LookAgain), the engine's work on the pages must have ended: wait for its stream.
// Work that starts after WaitLayer or Finish sees the landed data. Open refuses a GPU that has a tier of the daemon
// (hbm), because all memory of such a session must be on that GPU (kFailedPrecondition).
//
// Scheduler and workers. A scheduler begins without pages and sends Request::PlanBytes to its workers. Each worker
// (each tensor-parallel rank) opens the same model for its shard, and lands the plan in its own pages with Cache::Land.
// The scheduler keeps its request until the workers have landed; ending it cancels landings that have not begun.
// Segments of ranks. The ranks' shards of a segment form a bundle. It hits once every rank has published its shard;
// until then it is a miss, "being_published". To fill misses, each rank begins the prompt with Prompt::fill and
// store_only; missing() lists the shards that this rank has to publish. All ranks compute a segment that any of them
// lists. Then the scheduler begins the prompt again.
//
// Threads. A Cache is thread-safe. A Request is used by one thread at a time. Handles may be destroyed in any order.
// The session and the memory live until the cache's last request and last job are destroyed. That last destructor waits
// until the daemon can no longer write to the memory. If the daemon hangs, the destructor blocks until the daemon
// recovers or exits; if the daemon is dead, the destructor returns at once.
//
// Fork. Handles belong to the process that created them. In a child every call on them returns kFailedPrecondition, and
// destroying them releases nothing and waits for nothing.
//
// The API can be expressed in C (ashlar.h): plain structs, pointers with counts, handles, and enumerations whose
// numbers never change. Types, families, reasons and outcomes have the numbers of docs/formats.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ashlar/engine_types.h"

namespace ashlar::engine {

// ---------------------------------------------------------------------------------------------------- computing

// The tensors of one linear layer, in host memory. An opaque layer with state_bytes has `state` only, which is dense.
// Tensors in the cache's memory are published from there; other tensors are copied once more.
struct LinearTensors {
  uint32_t layer = 0;
  const void* state = nullptr;               // [value_heads] × [d_k, d_v] or [d_v, d_k] (Layer::order), in state_dtype
  const int32_t* state_exponents = nullptr;  // [value_heads]; with fp16 states only
  const void* conv_tail = nullptr;  // inputs of the last conv_kernel − 1 tokens, in conv_order and conv_dtype
  // Only if Run::transition: all heads, fp32. deltanet, gdn, kda: [d_k, d_k] in the state's order. Other
  // families: the logarithm of the transition in the family's form.
  const float* transition = nullptr;
  const float* decay = nullptr;   // [value_heads][d_k]: product of the tokens' decays; may be null (deltanet: null)
  int64_t state_head_stride = 0;  // elements from one head's state to the next; 0: d_k · d_v
  int64_t conv_row_stride = 0;    // elements from one row of the tail to the next (conv_order); 0: dense
};

// The tensors and pages of a computed run.
struct ComputedRun {
  const LinearTensors* linear = nullptr;  // every linear layer
  uint32_t linear_count = 0;
  const int32_t* page_table = nullptr;
  uint64_t page_count = 0;
  uint64_t first_position = 0;             // slot of the run's token 0, counted from the start of each page table
  const PageTable* page_tables = nullptr;  // replaces page_table; see Prompt
  uint32_t page_table_count = 0;
};

// One head of a tuple: S ← T S + state × 2^state_exponent (HYPIC equation 4).
struct Head {
  TransitionForm form = TransitionForm::kZero;  // kZero: states before the segment do not matter
  int32_t rank = 0;
  const void* transition = nullptr;
  const void* state = nullptr;
  int32_t state_exponent = 0;
};

// One linear layer of a cached step. Read-only, in place. Valid after WaitLayer, until the next kRestart or the end of
// the request.
struct Tuple {
  const Head* heads = nullptr;
  uint32_t head_count = 0;
  DType transition_dtype = DType::kF32, state_dtype = DType::kF32;
  uint64_t position = 0;            // position of the segment's first token in the prompt; 0 for a prefix
  const void* conv_tail = nullptr;  // convolution tail after the step, in the layer's conv_order and conv_dtype
};

// The running states of one linear layer's value heads.
struct State {
  void* data = nullptr;
  DType dtype = DType::kF32;     // kF32, kF16 or kBF16
  int32_t* exponents = nullptr;  // [value_heads]; with kF16 only
  int64_t head_stride = 0;       // elements from one head to the next, for example in an engine's blocks; 0: d_k · d_v
};
struct StateCopy {
  uint64_t position = 0;
  State state;
};

// The inputs of the recurrence, fp32, after convolution, activation, normalization, rotation and the query's scale;
// with norm_epsilon and q_scale the library normalizes and scales. Strides are floats from one token to the next; 0:
// dense.
struct TokenRows {
  uint64_t tokens = 0;
  const float* q = nullptr;  // [tokens][key_heads, d_k]; may be null if there are no outputs
  const float* k = nullptr;  // [tokens][key_heads, d_k]
  const float* v = nullptr;  // [tokens][value_heads, d_v]
  // Log decays, at most 0. gdn: [tokens][value_heads]; gla, kda: [tokens][value_heads, d_k]; others: null.
  const float* g = nullptr;
  // deltanet, gdn, kda: β, [tokens][value_heads]; mamba2: dt, the same shape; mamba1: dt, [tokens][value_heads, d_v];
  // others: null.
  const float* beta = nullptr;
  int64_t q_stride = 0, k_stride = 0, v_stride = 0, g_stride = 0, beta_stride = 0;
  // Above 0: in a copy, each head's q and k are first multiplied by 1 / sqrt(Σ x² + norm_epsilon).
  float norm_epsilon = 0;
  float q_scale = 0;  // factor of q, after normalization; 0: 1
};

// Positions [begin, end) of one linear layer. A cached step must lie entirely inside or entirely outside the
// range. The range may continue after the prompt.
struct LayerAdvance {
  uint32_t layer = 0;
  uint64_t begin = 0, end = 0;
  TokenRows inputs;                   // rows of the computed tokens among the positions, in order
  State state;                        // in: state after position begin − 1; out: state after position end − 1
  float* out = nullptr;               // [tokens][value_heads, d_v]; may be null
  int64_t out_stride = 0;             // floats; 0: value_heads · d_v
  const StateCopy* copies = nullptr;  // out: states at these positions, ascending, outside cached steps
  uint32_t copy_count = 0;
};

// One linear layer of a run. Kernels in this process compute the run separately, from a zero state.
struct AloneLayer {
  uint32_t layer = 0;
  TokenRows inputs;          // one row per token of the run
  float* out = nullptr;      // [tokens][value_heads, d_v]; may be null
  int64_t out_stride = 0;    // floats; 0: value_heads · d_v
  const Run* run = nullptr;  // the run to compute
  // Out: the run's tuple, as in LinearTensors. `transition` is not written if Run::transition is false.
  State state;
  float* transition = nullptr;
  float* decay = nullptr;  // out: like LinearTensors::decay, with dense transitions; may be null
};

// ---------------------------------------------------------------------------------------------------- committing

// A span (KVBuffer §6): the inputs of one linear layer for the last tokens of a text, fp32. Rows have the form of
// TokenRows, dense; then the convolution inputs.
struct SpanRows {
  uint32_t layer = 0;
  const float* keys = nullptr;
  const float* values = nullptr;
  const float* gates = nullptr;
  const float* betas = nullptr;
  const float* conv_inputs = nullptr;
};

struct Checkpoint {
  uint64_t depth = 0;                     // tokens before the states
  const LinearTensors* linear = nullptr;  // every linear layer, without transitions
  uint32_t linear_count = 0;
};

// Sizes of the segments that an engine has published.
struct StoredSegments {
  uint64_t segments = 0;
  uint64_t bytes = 0;
  uint64_t own_bytes = 0;  // the size if every transition were stored in its layer's own form
  uint64_t heads[7] = {};  // number of transitions by the form in which they are stored (Head::form)
};

class Request;

// A text that was run through the model. Commit writes one outcome per checkpoint to `outcomes` (CommitName).
struct Text {
  const Request* request = nullptr;  // the request of the text's prompt; null: the text was computed without a request
  const int32_t* tokens = nullptr;   // the prompt, and the decoded tokens that ran through the model
  uint64_t token_count = 0;
  uint64_t prompt_tokens = 0;
  const Checkpoint* checkpoints = nullptr;  // depths ascend; the last is token_count
  uint32_t checkpoint_count = 0;
  const int32_t* page_table = nullptr;  // page table of the text from position 0
  uint64_t page_count = 0;
  uint8_t conversation[16] = {};   // required if the plan is not exact
  uint64_t span_begin = 0;         // the span has the tokens from span_begin to the text's end
  const SpanRows* span = nullptr;  // every linear layer; null: no span
  uint32_t span_count = 0;
  bool composed = false;  // true: the text started from composed states, although its request is exact or null
  uint8_t* outcomes = nullptr;
  const Media* media = nullptr;  // offsets ascend; the span of a text with media is not kept
  uint64_t media_count = 0;
  const PageTable* page_tables = nullptr;  // replaces page_table; see Prompt
  uint32_t page_table_count = 0;
  const void* salt = nullptr;  // see Prompt; must equal the salt of the request's prompt
  uint64_t salt_bytes = 0;
};

// ---------------------------------------------------------------------------------------------------- handles

struct CacheState;
struct RequestState;
struct JobState;

// A call that was started. The destructor waits until the call is over.
class Job {
 public:
  Job() = default;
  Job(Job&&) noexcept;
  Job& operator=(Job&&) noexcept;
  ~Job();

  Status Wait() noexcept;
  Status Poll() noexcept;
  // After Poll has returned kOk: the status that the call itself would have returned (StartOpen, StartWaitCold,
  // StartServePrefill); kOk for calls that write outcomes.
  Status Result() const noexcept;

 private:
  friend struct Access;
  JobState* impl_ = nullptr;
};

// One prompt. The destructor ends the lease, cancels calls and abandons reservations. It does not wait,
// unless the request is the last handle (see Threads). Cache::TakeQuiescedPages returns pages that the daemon may still
// write to.
class Request {
 public:
  Request() = default;
  Request(Request&&) noexcept;
  Request& operator=(Request&&) noexcept;
  ~Request();

  // After a Start call: waits until the plan is known. Otherwise returns kOk at once.
  Status WaitPlan() noexcept;
  Status PollPlan() noexcept;
  const Plan& plan() const noexcept;

  // The runs to compute, with Prompt::fill. Publish or abandon each, then call LookAgain. Ending the request abandons
  // all.
  const Run* missing(uint32_t* count) const noexcept;
  // Publishes the run missing()[missing]. `outcome` (PublishName) may be null.
  Status Publish(uint32_t missing, const ComputedRun& computed, uint8_t* outcome) noexcept;
  Status StartPublish(uint32_t missing, const ComputedRun& computed, uint8_t* outcome, Job* job) noexcept;
  // Publishes several small runs with one call to the daemon; computed[i] is missing[i], and each run has separate
  // pages. For large runs this is not faster than separate calls. Outcomes are independent; `outcomes` may be
  // null. On an error nothing was published.
  Status Publish(const uint32_t* missing, const ComputedRun* computed, uint32_t count, uint8_t* outcomes) noexcept;
  Status StartPublish(const uint32_t* missing, const ComputedRun* computed, uint32_t count, uint8_t* outcomes,
                      Job* job) noexcept;
  void Abandon(uint32_t missing) noexcept;  // after Cache::ServePrefill: this engine can never compute the run
  // For a request from Cache::ServePrefill on a cache without pages: another process has published the run. The next
  // ServePrefill reports it, and the daemon looks for the segment. kFailedPrecondition: any other request.
  Status MarkPublished(uint32_t missing) noexcept;
  // With Prompt::cold_parallel: the number of segments that other engines compute for this prompt. If it is not 0, call
  // WaitCold and LookAgain even if missing() is empty.
  uint32_t segments_computed_elsewhere() const noexcept;
  // Waits for these segments. kOk: all were published, or have become this engine's. kRestart: some engines failed;
  // their segments are appended to missing(): compute them and call WaitCold again. kPending: timeout; call WaitCold
  // again, or LookAgain, which uses what was published.
  Status WaitCold(uint32_t timeout_ms) noexcept;
  // Until the job's Poll returns kOk, other calls on the request return kPending. Cancel, or the end of the
  // request, stops the wait within a second. Job::Result is also kPending if no background thread was free within
  // timeout_ms plus OpenOptions::timeout_ms.
  Status StartWaitCold(uint32_t timeout_ms, Job* job) noexcept;
  // Looks the prompt up again and lands the hits in these pages; without arguments in the same pages. Segments that
  // miss again are computed as part of the plan: missing() is empty.
  Status LookAgain() noexcept { return LookAgain(static_cast<const int32_t*>(nullptr), 0); }
  Status LookAgain(const int32_t* page_table, uint64_t page_count) noexcept;
  Status LookAgain(const PageTable* page_tables, uint32_t count) noexcept;  // one page table per group of layers
  Status StartLookAgain() noexcept { return StartLookAgain(static_cast<const int32_t*>(nullptr), 0); }
  Status StartLookAgain(const int32_t* page_table, uint64_t page_count) noexcept;
  Status StartLookAgain(const PageTable* page_tables, uint32_t count) noexcept;

  // Requires Memory::share_in_place. The first call gets the shared pages of the prompt's segments and of its prefix
  // (Plan::shared_prefix_tokens), and `own_pages` pages for all other tokens. Further calls raise the number of own
  // pages to `own_pages`; a smaller number changes nothing. Call it before WaitLayer, and again after LookAgain,
  // kRestart and kOtherPages. kNoPages: too few are free; `shortage` (may be null) has the numbers, and nothing has
  // changed. kFailedPrecondition: requests from before a reconnect still run; end them. kUnavailable: the daemon did
  // not answer or is busy.
  Status Admit(uint32_t own_pages, PageShortage* shortage) noexcept;
  const AdmittedPages& admitted() const noexcept;  // empty before Admit

  // Waits until the cached keys and values of this layer are in their pages and its tuples can be read. kRestart: they
  // will not arrive; abandon the plan and call Finish.
  Status WaitLayer(uint32_t layer) noexcept;
  Status PollLayer(uint32_t layer) noexcept;
  // The tuple of a cached step in a linear layer, after WaitLayer. kPending: WaitLayer was not called. If you read
  // tuples after Finish, call Finish again when you are done: the session may have ended meanwhile.
  Status StepTuple(uint32_t step, uint32_t layer, Tuple* out) noexcept;
  // Waits for one linear layer and advances it. kRestart: as WaitLayer; states and outputs are then undefined.
  Status Advance(const LayerAdvance& advance) noexcept;

  // The verdict; emit no token before it. kOk: all objects that the plan took from the cache were valid, and the pages
  // are the engine's. kRestart, kOtherPages: compute the new plan in a fresh state and call Finish again; objects
  // that landed are not loaded again.
  Status Finish() noexcept;
  Status PollFinish() noexcept;
  // After kOtherPages: continues in these pages. The plan then takes nothing from the cache.
  Status Move(const int32_t* page_table, uint64_t page_count) noexcept;
  Status Move(const PageTable* page_tables, uint32_t count) noexcept;
  // Drops segments that another rank has missed. Call it after Finish. Returns kRestart.
  Status DropSegments(const uint32_t* segments, uint32_t count) noexcept;

  // True after kOtherPages: the request's former pages belong to the cache.
  bool pages_kept() const noexcept;

  // Ends the landing without waiting.
  void Cancel() noexcept;
  // kOk: nothing can write to the pages any longer; the engine owns them, and TakeQuiescedPages does not return them.
  // kFailedPrecondition: TakeQuiescedPages has returned them.
  Status PollQuiesced() noexcept;
  // Ends the request's lease. Call it when no Tuple is needed any more. Texts that began as its prompt may still be
  // committed; commits in progress keep the lease until they are done.
  void Release() noexcept;

  // Returns the size of the plan for other processes, and writes the plan to `out` if `capacity` suffices. 0: no hit.
  uint64_t PlanBytes(uint8_t* out, uint64_t capacity) const noexcept;

 private:
  friend struct Access;
  RequestState* impl_ = nullptr;
};

// One session with the node's daemon, one open model, one memory.
class Cache {
 public:
  Cache() = default;
  Cache(Cache&&) noexcept;
  Cache& operator=(Cache&&) noexcept;
  ~Cache();

  // kUnavailable: no daemon. kInvalidArgument: the message names the field.
  static Status Open(const OpenOptions& options, Cache* out) noexcept;
  // `options`, everything that they point to, and `out` must stay valid until the job's Poll returns kOk. The job's end
  // waits as long as Open does.
  static Status StartOpen(const OpenOptions& options, Cache* out, Job* job) noexcept;

  uint8_t* data() const noexcept;  // start of the memory; with kGpu an address on the GPU; null: no memory
  uint64_t bytes() const noexcept;
  // Places of the attention layers' pages, ascending by layer. `count` may be null.
  const PagePlace* places(uint32_t* count) const noexcept;
  bool connected() const noexcept;
  // A non-fatal warning about the options; empty: none. Valid as long as the cache lives.
  const char* warning() const noexcept;

  // Looks up several prompts with one call; one request per prompt.
  Status Begin(const Prompt* prompts, uint32_t count, Request* requests) noexcept;
  Status StartBegin(const Prompt* prompts, uint32_t count, Request* requests) noexcept;
  // Lands the plans of another process for this process's shard.
  Status Land(const PlanToLand* plans, uint32_t count, Request* requests) noexcept;
  Status StartLand(const PlanToLand* plans, uint32_t count, Request* requests) noexcept;

  // Computes one linear layer of a run, for engines without kernels.
  Status ComputeAlone(const AloneLayer& layer) noexcept;

  // Offers the states of texts for later texts to resume from.
  Status Commit(const Text* texts, uint32_t count) noexcept;
  Status StartCommit(const Text* texts, uint32_t count, Job* job) noexcept;
  // Sends a committed text to another node of the cluster, whose engines then resume at its end: for a prefill engine
  // that serves a decode engine. Only tokens, conversation, media and salt of `text` are read. kOk: the node has it.
  // kPending: timeout; it may still arrive. kUnavailable: it will not arrive; the message has the reason.
  Status Handoff(const Text& text, const char* node, uint32_t wait_ms) noexcept;
  // Writes the outcome (HandoffName): "completed", "timed_out", or the reason why the other engine must compute.
  // Destroying the job waits for it: at most wait_ms, plus a few seconds if the node does not answer.
  Status StartHandoff(const Text& text, const char* node, uint32_t wait_ms, uint8_t* outcome, Job* job) noexcept;

  // Offers this engine's idle time: waits for a segment that another engine of the tenant, on any node, needs. kOk:
  // `work` is a request without prompt and pages, with one run in missing(). Compute and publish the run, and end
  // `work` before the next call, which reports the result. kPending: no work within wait_ms. kUnavailable: no daemon. A
  // dedicated engine calls it in a loop, others while they are idle. One thread at a time: a second call ends the
  // first. On a cache without pages, for example a scheduler's, the work is not reserved: another process of the engine
  // computes and publishes it; then call MarkPublished.
  Status ServePrefill(uint32_t wait_ms, Request* work) noexcept;
  // Do not use `work` until the job's Poll returns kOk.
  Status StartServePrefill(uint32_t wait_ms, Request* work, Job* job) noexcept;

  // Sizes of the segments that this engine has published.
  void StoredSegments(engine::StoredSegments* out) const noexcept;

  // Gives quiesced pages that the cache kept back to the engine: writes at most `capacity` page numbers to `pages` and
  // returns how many. Waits up to timeout_ms for the first; 0 does not wait. `group`: the group of the page numbers, if
  // each group numbers its own pages (Memory::groups).
  uint64_t TakeQuiescedPages(int32_t* pages, uint64_t capacity, uint32_t timeout_ms, uint32_t group = 0) noexcept;

 private:
  friend struct Access;
  CacheState* impl_ = nullptr;
};

// Cuts a prompt's tokens into segments, each of which ends with the separator: one or more token ids. The library has
// no tokenizer: encode the separator with the engine's tokenizer, without the tokens that it adds to a text. Use a
// separator that has the same ids in every text, such as a special token. The tokens after the last separator are the
// query. A prompt's last token is always computed, so a segment that would end with it becomes part of the query.
// Adjacent segments of fewer than `min_tokens` tokens are joined.
// Writes the number of segments to `count`. If it is at most `capacity`, writes their lengths in tokens to `lengths`,
// from position 0, for Prompt::segment_lengths; otherwise writes no lengths. kInvalidArgument: the separator is empty,
// or a pointer is null.
Status SegmentLengths(const int32_t* tokens, uint64_t token_count, const int32_t* separator, uint64_t separator_count,
                      uint64_t min_tokens, uint64_t* lengths, uint64_t capacity, uint64_t* count) noexcept;

// Names of numbers, as in metrics. Never null.
const char* MissName(uint8_t reason) noexcept;
const char* TierName(uint8_t tier) noexcept;
const char* PublishName(uint8_t outcome) noexcept;
const char* CommitName(uint8_t outcome) noexcept;
const char* HandoffName(uint8_t outcome) noexcept;

}  // namespace ashlar::engine
