// SPDX-License-Identifier: Apache-2.0
// The engine's API to the cache. An engine makes these calls, in this order:
//
//   Cache::Open     connects, opens the model, takes or registers the memory, declares the pages
//   Cache::Begin    looks prompts up, and lands the hits
//   Request::missing, Publish, LookAgain   computes segments alone that are worth having in the cache
//     (WaitCold before LookAgain, with Prompt::cold_parallel: other engines compute some of them)
//   Request::plan   the steps that set the prompt: runs to compute, and parts taken from the cache between them
//   per layer: Advance, or WaitLayer, Tuple and the engine's own kernels
//   Request::Finish the verdict. kRestart: something did not land, and the plan has changed
//   Cache::Commit   offers states for later texts to resume from
//
// Errors. A cache failure is a miss, never an error: a dead daemon, a late landing or a full queue changes the plan,
// and nothing else. An error says that a call made no sense (kInvalidArgument, naming the field; nothing has changed),
// or that the cache could not be opened. No function throws. kResourceExhausted says that memory or threads ran out in
// this process: end the request.
//
// Waiting. Open, Begin, Land, LookAgain, Publish, WaitCold, Commit, HandOff and ServePrefill wait for the daemon; each
// has a form that begins with Start and does not wait. Look-ups that were started are misses where none of their
// threads is free within timeout_ms. WaitPlan, WaitLayer, Finish and TakeQuietPages each have a form that begins with
// Poll: kPending says that it is too early. Tensors and rows, a text's tokens and outcomes of a Start must stay as they
// are until its Poll says kOk; all else (a prompt's tokens, page tables, plans, the structs that name tensors) is
// copied at once. Advance waits for its layer, and with ComposeBy::kDaemon for the daemon: poll the layer first.
//
// Pages. A request begun with pages has them until Finish says kOk or kRestart, PollQuiet says kOk, or the plan is
// known and nothing lands (then PollQuiet says kOk at once). Meanwhile the daemon writes there, and the engine only
// what the plan has it compute; but while missing() names something, nothing lands. Pages of a request that ends before
// that, and those that kOtherPages speaks of, are the cache's: they come back once, by TakeQuietPages, and no call
// takes them before. To know whose they are, call PollQuiet before the request ends. kOtherPages: the request needs
// others, by LookAgain while missing() names something, else by Move.
//
// GPUs. Memory of kGpu takes pages alone. States, tails, rows and outputs are given and taken in the processor's
// memory: a pointer into the GPU's is refused by name, one into other memory of a GPU is a fault of the process. Before
// Publish, Commit and every call that may land (Begin, Land, LookAgain), the engine's work in the pages must have
// ended: wait for its stream. What has landed is seen by all work that starts behind WaitLayer or Finish. Open refuses
// a GPU that has a tier of the daemon's (hbm), because all memory of such a session would have to lie there
// (kFailedPrecondition).
//
// Two processes. A scheduler begins without a page table, and passes Request::PlanBytes on. Each worker (of a
// tensor-parallel engine: each rank) opens the same model for its own shard and lands the plan in its own pages. The
// scheduler keeps its request until the workers have landed; ending it cancels landings that have not begun.
//
// Threads. A Cache is thread-safe. A Request belongs to one thread at a time. Handles may end in any order:
// session and memory stay until the last request and the last job of the cache have ended, too. The last of them waits
// until nothing can write into the memory any more: where pages are in doubt, for as long as the daemon stands still
// (a dead one writes nothing).
//
// Fork. Handles belong to the process that made them. In a child every call on them is refused (kFailedPrecondition),
// and destroying them there releases nothing and waits for nothing.
//
// The whole API can be expressed in C: structs of plain fields, pointers with counts, handles, and enumerations whose
// numbers never change. Numbers of types, families, reasons and outcomes are those of docs/formats.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ashlar/engine_types.h"

namespace ashlar::engine {

// ---------------------------------------------------------------------------------------------------- computing

// One linear layer's tensors, anywhere in the processor's memory. Tensors in the cache's memory are published from
// there; all others are copied once more.
struct LinearTensors {
  uint32_t layer = 0;
  const void* state = nullptr;               // all heads, [d_k, d_v] or [d_v, d_k], in state_dtype
  const int32_t* state_exponents = nullptr;  // [value_heads], of fp16 alone
  const void* conv_tail = nullptr;           // in conv_order and conv_dtype: of the last conv_kernel − 1 tokens
  // Only for a Run with a transition: all heads, fp32. If the family erases, [d_k, d_k] in the state's order; else the
  // logarithm of the family's form.
  const float* transition = nullptr;
  const float* decay = nullptr;   // [value_heads][d_k]: product of the tokens' decays; may be null (deltanet: is)
  int64_t state_head_stride = 0;  // in elements, from one head's state to the next; 0: d_k · d_v
  int64_t conv_row_stride = 0;    // in elements, from one row of the tail to the next (conv_order); 0: dense
};

// The tensors and pages of a computed run.
struct ComputedRun {
  const LinearTensors* linear = nullptr;  // every linear layer
  uint32_t linear_count = 0;
  const int32_t* page_table = nullptr;
  uint64_t page_count = 0;
  uint64_t first_position = 0;             // slot position of its token 0, in each group's pages
  const PageTable* page_tables = nullptr;  // in place of page_table, as in Prompt
  uint32_t page_table_count = 0;
};

// One head of a tuple: S ← T S + state × 2^state_exponent.
struct Head {
  TransitionForm form = TransitionForm::kZero;  // zero: nothing that came before counts
  int32_t rank = 0;
  const void* transition = nullptr;
  const void* state = nullptr;
  int32_t state_exponent = 0;
};

// One linear layer of a step that is taken from the cache, in place, read-only. Valid until the next kRestart or the
// end of the request, and only after WaitLayer.
struct Tuple {
  const Head* heads = nullptr;
  uint32_t head_count = 0;
  DType transition_dtype = DType::kF32, state_dtype = DType::kF32;
  uint64_t position = 0;            // the segment's first position in the prompt; 0 for a prefix
  const void* conv_tail = nullptr;  // behind the step, in the layer's conv_order and conv_dtype
};

// The running states of one linear layer's heads.
struct State {
  void* data = nullptr;
  DType dtype = DType::kF32;     // kF32, kF16 or kBF16
  int32_t* exponents = nullptr;  // [value_heads], of kF16 alone
  int64_t head_stride = 0;       // in elements, from one head to the next, as in an engine's blocks; 0: d_k · d_v
};
struct StateCopy {
  uint64_t position = 0;
  State state;
};

// The inputs of the recurrence, fp32: after convolution, activation, normalisation, rotation and the query's scale; the
// last two fields have the library normalise and scale. Strides are in floats, from one token to the next; 0: the rows
// lie one behind the other.
struct TokenRows {
  uint64_t tokens = 0;
  const float* q = nullptr;  // [tokens][key_heads, d_k]; may be null without outputs
  const float* k = nullptr;  // [tokens][key_heads, d_k]
  const float* v = nullptr;  // [tokens][value_heads, d_v]
  // Log decays ≤ 0. gdn: [tokens][value_heads]; gla, kda: [tokens][value_heads, d_k]; else null.
  const float* g = nullptr;
  // deltanet, gdn, kda: β, [tokens][value_heads]; mamba2: dt, the same; mamba1: dt, [tokens][value_heads, d_v]; else
  // null.
  const float* beta = nullptr;
  int64_t q_stride = 0, k_stride = 0, v_stride = 0, g_stride = 0, beta_stride = 0;
  // Above 0: each head's q and k are multiplied by 1 / sqrt(Σ x² + norm_epsilon) first, in a copy. 0: they are as they
  // should be.
  float norm_epsilon = 0;
  float q_scale = 0;  // q is multiplied by it, after normalisation; 0: 1
};

// One linear layer of positions [begin, end), which must not cut a step that is taken from the cache. The positions may
// lie behind the prompt, too.
struct LayerAdvance {
  uint32_t layer = 0;
  uint64_t begin = 0, end = 0;
  TokenRows inputs;                   // of the computed tokens among the positions, in order
  State state;                        // in: behind `begin`; out: behind `end`
  float* out = nullptr;               // [tokens][value_heads, d_v]; may be null
  int64_t out_stride = 0;             // in floats; 0: value_heads · d_v
  const StateCopy* copies = nullptr;  // out: states behind these positions, ascending, none inside of a cached step
  uint32_t copy_count = 0;
};

// One linear layer of a text that stands alone (Run), from a zero state, by kernels in this process.
struct AloneLayer {
  uint32_t layer = 0;
  TokenRows inputs;          // of all its tokens
  float* out = nullptr;      // [tokens][value_heads, d_v]; may be null
  int64_t out_stride = 0;    // in floats; 0: value_heads · d_v
  const Run* run = nullptr;  // the run whose tuple is wanted
  // Out: the run's tuple, as in LinearTensors. For a run without a transition none is written.
  State state;
  float* transition = nullptr;
  float* decay = nullptr;  // out, as LinearTensors has it, of families that erase; null: not wanted
};

// ---------------------------------------------------------------------------------------------------- committing

// The inputs of the linear layers for a text's last tokens: rows of a token as in TokenRows, one behind the other,
// fp32, and the convolution's inputs.
struct SpanRows {
  uint32_t layer = 0;
  const float* keys = nullptr;
  const float* values = nullptr;
  const float* gates = nullptr;
  const float* betas = nullptr;
  const float* conv_inputs = nullptr;
};

struct Checkpoint {
  uint64_t depth = 0;
  const LinearTensors* linear = nullptr;  // every linear layer, without transitions
  uint32_t linear_count = 0;
};

// The sizes of an engine's segments in the cache.
struct StoredSegments {
  uint64_t segments = 0;
  uint64_t bytes = 0;
  uint64_t own_bytes = 0;  // if every transition had its layer's own form
  uint64_t heads[7] = {};  // the number of transitions stored in each form (Head::form)
};

class Request;

// A text that has been run through the model. Commit writes one outcome a checkpoint to `outcomes` (CommitName).
struct Text {
  const Request* request = nullptr;  // the request of the text's prompt; null: the text began with nothing
  const int32_t* tokens = nullptr;   // the prompt, and the decoded tokens that were run through the model
  uint64_t token_count = 0;
  uint64_t prompt_tokens = 0;
  const Checkpoint* checkpoints = nullptr;  // depths ascend; the last is token_count
  uint32_t checkpoint_count = 0;
  const int32_t* page_table = nullptr;  // of the text from position 0
  uint64_t page_count = 0;
  uint8_t conversation[16] = {};   // needed if the plan is not exact
  uint64_t span_begin = 0;         // the span reaches from there to the text's end
  const SpanRows* span = nullptr;  // every linear layer; null: none
  uint32_t span_count = 0;
  bool composed = false;  // though its request says exact, or there is none: it began with composed states
  uint8_t* outcomes = nullptr;
  const Media* media = nullptr;  // offsets ascend; the span of a text with media is not kept
  uint64_t media_count = 0;
  const PageTable* page_tables = nullptr;  // in place of page_table, as in Prompt
  uint32_t page_table_count = 0;
  const void* salt = nullptr;  // of the prompt, as in Prompt; another than that of a request that was begun is refused
  uint64_t salt_bytes = 0;
};

// ---------------------------------------------------------------------------------------------------- handles

struct CacheState;
struct RequestState;
struct JobState;

// A call that was started. Its destructor waits until the call is over.
class Job {
 public:
  Job() = default;
  Job(Job&&) noexcept;
  Job& operator=(Job&&) noexcept;
  ~Job();

  Status Wait() noexcept;
  Status Poll() noexcept;
  // Of StartOpen, StartWaitCold and StartServePrefill, once Poll has said kOk: the status of the call that waits. kOk
  // of those that write outcomes.
  Status Result() const noexcept;

 private:
  friend struct Access;
  JobState* impl_ = nullptr;
};

// A prompt being set. Its destructor cancels the calls under way, gives back the reservations, and does not wait: pages
// in doubt are kept (Cache::TakeQuietPages). The lease ends with it.
class Request {
 public:
  Request() = default;
  Request(Request&&) noexcept;
  Request& operator=(Request&&) noexcept;
  ~Request();

  // After a Start: waits until the plan is known. For a request that was begun without Start: kOk at once.
  Status WaitPlan() noexcept;
  Status PollPlan() noexcept;
  const Plan& plan() const noexcept;

  // The runs to compute, with Prompt::fill. Publish or abandon each, then call LookAgain; ending the request abandons
  // all.
  const Run* missing(uint32_t* count) const noexcept;
  // `outcome`: PublishName; may be null.
  Status Publish(uint32_t missing, const ComputedRun& computed, uint8_t* outcome) noexcept;
  Status StartPublish(uint32_t missing, const ComputedRun& computed, uint8_t* outcome, Job* job) noexcept;
  // Many, computed[i] being the run missing[i], which are small: together by one call to the daemon, each in pages of
  // its own. Large ones gain nothing. No outcome depends on another; may be null. An error: none was published.
  Status Publish(const uint32_t* missing, const ComputedRun* computed, uint32_t count, uint8_t* outcomes) noexcept;
  Status StartPublish(const uint32_t* missing, const ComputedRun* computed, uint32_t count, uint8_t* outcomes,
                      Job* job) noexcept;
  void Abandon(uint32_t missing) noexcept;
  // With Prompt::cold_parallel: how many segments other engines compute for this prompt. If it is not 0, call WaitCold
  // and LookAgain also where missing() is empty.
  uint32_t elsewhere() const noexcept;
  // Waits until these segments have come, or will not. kRestart: missing() lists more at its end, whose engines have
  // failed; compute them, and call it again. kPending: not all have come in time; call it again, or LookAgain, which
  // takes what is there. kOk: nothing is left to wait for.
  Status WaitCold(uint32_t timeout_ms) noexcept;
  // Until the job's Poll says kOk, the request's other calls say kPending. Cancel, or the request's end, ends the wait
  // within a second. kPending in Job::Result, too: no thread was free within timeout_ms and OpenOptions::timeout_ms.
  Status StartWaitCold(uint32_t timeout_ms, Job* job) noexcept;
  // Looks up and lands anew, in these pages. Segments that miss again are computed in their place: missing() is empty.
  Status LookAgain(const int32_t* page_table, uint64_t page_count) noexcept;
  Status StartLookAgain(const int32_t* page_table, uint64_t page_count) noexcept;
  // The same in one table a group of layers.
  Status LookAgainIn(const PageTable* page_tables, uint32_t count) noexcept;
  Status StartLookAgainIn(const PageTable* page_tables, uint32_t count) noexcept;

  // Waits until the cached keys and values of this layer are in their pages, and its tuples can be read. kRestart: they
  // will not come; leave the plan, and call Finish.
  Status WaitLayer(uint32_t layer) noexcept;
  Status PollLayer(uint32_t layer) noexcept;
  // The tuple of a step that is not computed, in a linear layer, after WaitLayer. kPending: before. Who reads tuples
  // behind Finish calls Finish once more after the last: the session may have been cut meanwhile.
  Status StepTuple(uint32_t step, uint32_t layer, Tuple* out) noexcept;
  // Advances one linear layer, after waiting for it. kRestart: as WaitLayer; states and outputs may then hold anything.
  Status Advance(const LayerAdvance& advance) noexcept;

  // The verdict. No token may be emitted before it. kOk: all objects that the plan took from the cache were right, and
  // the pages are the engine's. kRestart, kOtherPages: compute anew, in a fresh state, and call Finish again; landed
  // objects are used again.
  Status Finish() noexcept;
  Status PollFinish() noexcept;
  // After kOtherPages: continues in these pages. The plan then takes nothing from the cache.
  Status Move(const int32_t* page_table, uint64_t page_count) noexcept;
  Status MoveTo(const PageTable* page_tables, uint32_t count) noexcept;
  // Gives up segments that another rank has missed. Returns kRestart, as Finish does; call Finish before.
  Status Lose(const uint32_t* segments, uint32_t count) noexcept;

  // True: the pages that the request had are the cache's, after kOtherPages.
  bool pages_kept() const noexcept;

  // Ends the landing without waiting. PollQuiet: kOk once nothing can write to the pages any more, which are the
  // engine's then and do not come by TakeQuietPages; kFailedPrecondition where they have come so.
  void Cancel() noexcept;
  Status PollQuiet() noexcept;
  // Releases the request's lease, once no Tuple is needed. Texts that began as its prompt may still be committed; those
  // being committed keep it until they are.
  void Release() noexcept;

  // Returns the size of the plan for other processes, and writes the plan to `out` if `capacity` suffices. 0: no hit.
  uint64_t PlanBytes(uint8_t* out, uint64_t capacity) const noexcept;

 private:
  friend struct Access;
  RequestState* impl_ = nullptr;
};

// One session with the daemon of this node, one opened model, one memory.
class Cache {
 public:
  Cache() = default;
  Cache(Cache&&) noexcept;
  Cache& operator=(Cache&&) noexcept;
  ~Cache();

  // kUnavailable: no daemon. kInvalidArgument names the field.
  static Status Open(const OpenOptions& options, Cache* out) noexcept;
  // `options`, all that they point to, and `out` stay until the job's Poll says kOk. Its end waits as long as Open
  // does.
  static Status StartOpen(const OpenOptions& options, Cache* out, Job* job) noexcept;

  uint8_t* data() const noexcept;  // of the memory, of kGpu an address on the GPU; null without one
  uint64_t bytes() const noexcept;
  // Returns the places of the attention layers' pages, ascending by layer. `count` may be null.
  const PagePlace* places(uint32_t* count) const noexcept;
  bool connected() const noexcept;
  // A doubt about the options that is no error: "epsilon: …". Empty: none. Valid as long as the cache.
  const char* warning() const noexcept;

  // Many prompts in one call, one request each.
  Status Begin(const Prompt* prompts, uint32_t count, Request* requests) noexcept;
  Status StartBegin(const Prompt* prompts, uint32_t count, Request* requests) noexcept;
  // Lands plans that another process began, for this process's shard. kInvalidArgument: "plans[2].checksum: …".
  Status Land(const PlanToLand* plans, uint32_t count, Request* requests) noexcept;
  Status StartLand(const PlanToLand* plans, uint32_t count, Request* requests) noexcept;

  // For engines without kernels; other engines fill a ComputedRun by their own kernels.
  Status ComputeAlone(const AloneLayer& layer) noexcept;

  Status Commit(const Text* texts, uint32_t count) noexcept;
  Status StartCommit(const Text* texts, uint32_t count, Job* job) noexcept;
  // Hands a text that was committed to a node of the cluster, whose engines resume there at its end as from their own
  // cache: a prefill engine's call for a decode engine. Tokens, conversation, media and salt of `text` count. kOk: the
  // node has it. kPending: not in time; it may still come. kUnavailable, with the reason: it has not; that engine
  // computes.
  Status HandOff(const Text& text, const char* node, uint32_t wait_ms) noexcept;
  // Writes the outcome (HandOffName): "handed", "late", or why that engine has to compute. Hand-offs take no thread of
  // other calls that are started. A job's end waits for it: wait_ms, and some seconds behind a node that is silent.
  Status StartHandOff(const Text& text, const char* node, uint32_t wait_ms, uint8_t* outcome, Job* job) noexcept;

  // Offers to compute segments for other engines of the tenant, on this node and others, and waits for one. kOk: `work`
  // is a request with one run in missing(), to be computed and published; it has no prompt and no pages. End it, or its
  // Publish, before the next call, which says what became of it. kPending: there was none. kUnavailable: no daemon;
  // returns after a moment. An engine that does nothing else calls it again and again; one that has requests of its own
  // calls it while it has none. One thread at a time: a second one ends the wait of the first.
  Status ServePrefill(uint32_t wait_ms, Request* work) noexcept;
  // `work` stays, and no call takes it, until the job's Poll says kOk. The job's end waits for it, as for a hand-off.
  Status StartServePrefill(uint32_t wait_ms, Request* work, Job* job) noexcept;

  // The sizes of the segments that this engine has published.
  void Stored(StoredSegments* out) const noexcept;

  // Gives kept pages that are quiet now back to the engine, and returns how many, up to `capacity`. Waits up to
  // timeout_ms for the first; Poll does not wait.
  uint64_t TakeQuietPages(int32_t* pages, uint64_t capacity, uint32_t timeout_ms) noexcept;
  uint64_t PollQuietPages(int32_t* pages, uint64_t capacity) noexcept;
  // Where groups of layers number their pages apart: those of one group, of which the calls above take the first.
  // timeout_ms 0 does not wait.
  uint64_t TakeQuietPagesOf(uint32_t group, int32_t* pages, uint64_t capacity, uint32_t timeout_ms) noexcept;

 private:
  friend struct Access;
  CacheState* impl_ = nullptr;
};

// Names of the numbers, as metrics have them.
const char* MissName(uint8_t reason) noexcept;
const char* TierName(uint8_t tier) noexcept;
const char* PublishName(uint8_t outcome) noexcept;
const char* CommitName(uint8_t outcome) noexcept;
const char* HandOffName(uint8_t outcome) noexcept;

}  // namespace ashlar::engine
