// The API that an engine is written against: what it needs of the cache, in the order in which it needs it.
//
//   Cache::Open     connects, opens the model, takes or registers the memory, declares the pages
//   Cache::Begin    looks prompts up, and lands what is found
//   Request::missing, Publish, LookAgain   what it is worth to compute alone, and to have in the cache
//   Request::plan   the steps that set the prompt: runs to compute, and what is taken from the cache between them
//   per layer: Advance, or WaitLayer, Tuple and the engine's own kernels
//   Request::Finish the verdict. kRestart: something did not land, and the plan is another one now
//   Cache::Commit   offers states for later texts to resume from
//
// Errors. A cache failure is a miss, never an error: a dead daemon, a late landing, a full queue change what the plan
// says, and nothing else. Errors say that a call made no sense (kInvalidArgument, naming the field; nothing has
// changed), or that the cache could not be opened. Nothing here throws.
//
// Waiting. Begin, Land, LookAgain, Publish and Commit wait for the daemon; each has a form that begins with Start and
// does not. WaitPlan, WaitLayer, Finish and TakeQuietPages each have a form that begins with Poll: kPending says that
// it is too early. What a Start was given (tokens, states, outcomes) stays as it is until its Poll says kOk; page
// tables and plans are copied at once.
//
// Pages. From Begin to the end of Finish the request's pages are the daemon's to write. The engine writes only what
// the plan has it compute, and it frees no page before. While missing() names something, nothing lands: until
// LookAgain the pages are the engine's. Where a landing is in doubt, kOtherPages says so: the pages that the request
// had are the cache's until TakeQuietPages gives them back, and the request needs others (Move).
//
// Two processes. A scheduler begins without a page table, and passes Request::PlanBytes on. Each worker (of a
// tensor-parallel engine: each rank) opens the same model for its own shard and lands the plan in its own pages. The
// scheduler keeps its request until the workers have landed; ending it cancels what has not begun.
//
// Threads. A Cache is thread-safe. A Request belongs to one thread at a time. A Cache outlives its requests and jobs.
//
// Everything here can be said in C: structs of plain fields, pointers with counts, handles, and enumerations whose
// numbers never change. Numbers of types, families, reasons and outcomes are those of docs/formats.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ashlar/engine_types.h"

namespace ashlar::engine {

// ---------------------------------------------------------------------------------------------------- requests

// One prompt: segments lie one behind the other from position 0. The first is a prefix and cached whole, of the others
// the interior; tokens behind the last are always computed, and so is the last token of all.
struct Prompt {
  const int32_t* tokens = nullptr;  // stay until the request ends
  uint64_t token_count = 0;
  const uint64_t* segment_lengths = nullptr;
  uint64_t segment_count = 0;
  // Of the prompt from position 0: page p / page_tokens has position p. Null: nothing lands here (PlanBytes).
  const int32_t* page_table = nullptr;
  uint64_t page_count = 0;
  // Of so many tokens keys and values stand in those pages already: of a prefix that lands, whole blocks (as many
  // tokens as whole pages have, 256 or more) among these are not written. For pages that running requests share.
  uint64_t present_tokens = 0;
  uint8_t conversation[16] = {};  // drawn at random by the engine: its own states may be resumed from, too. Zero: none
  uint64_t needed_in_ms = 0;      // without a page table: in how long it will be needed
  bool fill = false;              // the engine computes what missing() names
};

// A plan to land, and the pages to land it in, as Prompt has them.
struct PlanToLand {
  const uint8_t* plan = nullptr;
  uint64_t plan_bytes = 0;
  const int32_t* page_table = nullptr;
  uint64_t page_count = 0;
  uint64_t present_tokens = 0;
};

enum class StepKind : uint8_t {
  kCompute = 1,     // run tokens [begin, end) through the model
  kCheckpoint = 2,  // [0, end) is taken from the cache: states replace the running ones, keys and values land
  kInterior = 3,    // [begin, end) is: tuples are composed onto the running states
};

// Steps lie one behind the other and cover the prompt.
struct Step {
  static constexpr uint32_t kPrefix = UINT32_MAX;
  StepKind kind = StepKind::kCompute;
  bool capture = false;         // the daemon asks for the states behind this step (Commit); after kCompute alone
  uint32_t segment = 0;         // that is taken from the cache; kPrefix: a prefix beyond segments
  uint64_t begin = 0, end = 0;  // positions
};

struct Segment {
  uint64_t start = 0, tokens = 0;
  uint64_t bytes = 0;  // of the cached object
  uint8_t reason = 0;  // 0: hit; else why it has to be computed (MissName)
  uint8_t tier = 0;    // where it was found
  bool used = false;   // the plan takes it from the cache
};

// Valid until the request ends, or a call on it returns kRestart or kOtherPages.
struct Plan {
  const Step* steps = nullptr;
  uint32_t step_count = 0;
  const Segment* segments = nullptr;
  uint32_t segment_count = 0;
  uint64_t prefix_tokens = 0;  // of the first step, where that is a prefix beyond segments
  uint64_t cached_tokens = 0;  // of all steps that are not computed
  bool own = false;            // the prefix was the conversation's own
  bool exact = true;           // what is computed behind this plan is exact: no interior, no composed prefix
};

// What it is worth to compute alone, from a zero state, its token 0 at position 0, in pages of its own; and to publish.
struct Run {
  const int32_t* tokens = nullptr;
  uint64_t token_count = 0;
  uint32_t segment = 0;
  // The tuple is that of tokens [capture_begin, capture_end). With a transition: started from zero there.
  uint64_t capture_begin = 0, capture_end = 0;
  bool transition = false;
};

// One linear layer's tensors, anywhere in this process. Those in the cache's memory are published from there, all
// others are copied once more.
struct LinearTensors {
  uint32_t layer = 0;
  const void* state = nullptr;               // all heads, [d_k, d_v] or [d_v, d_k], in state_dtype
  const int32_t* state_exponents = nullptr;  // [value_heads], of fp16 alone
  const void* conv_tail = nullptr;           // [conv_kernel − 1, conv_channels], oldest first, in state_dtype
  // Of a Run with a transition, all heads, fp32: [d_k, d_k] in the state's order where the family erases, else the
  // logarithm that the family has.
  const float* transition = nullptr;
  const float* decay = nullptr;  // [value_heads][d_k]: product of the tokens' decays; may be null (deltanet: is)
};

// Where a computed run lies.
struct ComputedRun {
  const LinearTensors* linear = nullptr;  // every linear layer
  uint32_t linear_count = 0;
  const int32_t* page_table = nullptr;
  uint64_t page_count = 0;
  uint64_t first_position = 0;  // slot position of its token 0
};

// One head of a tuple: S ← T S + state × 2^state_exponent.
struct Head {
  uint8_t form =
      0;  // 1 scalar, 2 diagonal, 3 dense, 4 elementwise, 5 low rank, 6 zero: nothing that came before counts
  int32_t rank = 0;
  const void* transition = nullptr;
  const void* state = nullptr;
  int32_t state_exponent = 0;
};

// One linear layer of a step that is taken from the cache, in place, read-only: until the next kRestart or the end of
// the request, and only behind WaitLayer.
struct Tuple {
  const Head* heads = nullptr;
  uint32_t head_count = 0;
  DType transition_dtype = DType::kF32, state_dtype = DType::kF32;
  uint64_t position = 0;            // where the segment starts in the prompt; 0 of a prefix
  const void* conv_tail = nullptr;  // [conv_kernel − 1, conv_channels] behind the step, in the layer's state_dtype
};

// The running states of one linear layer's heads, one behind the other.
struct State {
  void* data = nullptr;
  DType dtype = DType::kF32;     // kF32, kF16 or kBF16
  int32_t* exponents = nullptr;  // [value_heads], of kF16 alone
};
struct StateCopy {
  uint64_t position = 0;
  State state;
};

// What the recurrence sees of tokens, fp32: after convolution, activation, normalisation, rotation and the query's
// scale. Strides are in floats, from one token to the next.
struct TokenRows {
  uint64_t tokens = 0;
  const float* q = nullptr;  // [tokens][key_heads, d_k]; may be null without outputs
  const float* k = nullptr;  // [tokens][key_heads, d_k]
  const float* v = nullptr;  // [tokens][value_heads, d_v]
  const float* g = nullptr;  // log decays; null where the family has none
  const float* beta = nullptr;
  int64_t q_stride = 0, k_stride = 0, v_stride = 0, g_stride = 0, beta_stride = 0;
};

// One linear layer of positions [begin, end), which cut no step that is taken from the cache. Behind the prompt, too.
struct LayerAdvance {
  uint32_t layer = 0;
  uint64_t begin = 0, end = 0;
  TokenRows inputs;      // of the tokens among them that are computed, in order
  State state;           // in: behind `begin`; out: behind `end`
  float* out = nullptr;  // [tokens][value_heads, d_v]; may be null
  int64_t out_stride = 0;
  const StateCopy* copies = nullptr;  // out: states behind these positions, ascending, none inside of what is cached
  uint32_t copy_count = 0;
};

// One linear layer of a text that stands alone (Run), from a zero state, by kernels in this process.
struct AloneLayer {
  uint32_t layer = 0;
  TokenRows inputs;      // of all its tokens
  float* out = nullptr;  // [tokens][value_heads, d_v]; may be null
  int64_t out_stride = 0;
  const Run* run = nullptr;  // whose tuple is wanted
  // Out: that tuple, as LinearTensors has it. Of a run without a transition none is written.
  State state;
  float* transition = nullptr;
};

// ---------------------------------------------------------------------------------------------------- committing

// What the linear layers saw of a text's last tokens: rows of a token as TokenRows', one behind the other, fp32. The
// convolution's inputs, too.
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

// What an engine's segments take in the cache.
struct StoredSegments {
  uint64_t segments = 0;
  uint64_t bytes = 0;
  uint64_t own_bytes = 0;  // if every transition had its layer's own form
  uint64_t heads[7] = {};  // how many transitions are stored in which form (Head::form)
};

class Request;

// A text that has been run through the model. One outcome a checkpoint is written to `outcomes` (CommitName).
struct Text {
  const Request* request = nullptr;  // that it began as; null: it began with nothing
  const int32_t* tokens = nullptr;   // the prompt, and what was decoded and run through the model
  uint64_t token_count = 0;
  uint64_t prompt_tokens = 0;
  const Checkpoint* checkpoints = nullptr;  // depths ascend; the last is token_count
  uint32_t checkpoint_count = 0;
  const int32_t* page_table = nullptr;  // of the text from position 0
  uint64_t page_count = 0;
  uint8_t conversation[16] = {};   // needed where the plan is not exact
  uint64_t span_begin = 0;         // the span reaches from there to the text's end
  const SpanRows* span = nullptr;  // every linear layer; null: none
  uint32_t span_count = 0;
  uint8_t* outcomes = nullptr;
};

// ---------------------------------------------------------------------------------------------------- handles

struct CacheState;
struct RequestState;
struct JobState;

// A call that was started. Its end waits until the call is over.
class Job {
 public:
  Job() = default;
  Job(Job&&) noexcept;
  Job& operator=(Job&&) noexcept;
  ~Job();

  Status Wait();
  Status Poll();

 private:
  friend struct Access;
  JobState* impl_ = nullptr;
};

// A prompt being set. Its end cancels what is under way, gives back what it has reserved, and does not wait: pages that
// are in doubt are kept (Cache::TakeQuietPages). The lease ends with it.
class Request {
 public:
  Request() = default;
  Request(Request&&) noexcept;
  Request& operator=(Request&&) noexcept;
  ~Request();

  // After a Start: until the plan is known. Of one that was begun, kOk at once.
  Status WaitPlan();
  Status PollPlan();
  const Plan& plan() const;

  // With Prompt::fill. Each is published or abandoned, and then LookAgain; ending the request abandons all.
  const Run* missing(uint32_t* count) const;
  // `outcome`: PublishName; may be null.
  Status Publish(uint32_t missing, const ComputedRun& computed, uint8_t* outcome);
  Status StartPublish(uint32_t missing, const ComputedRun& computed, uint8_t* outcome, Job* job);
  void Abandon(uint32_t missing);
  // Looks up and lands anew, in these pages. What is missed now is computed in its place: missing() is empty.
  Status LookAgain(const int32_t* page_table, uint64_t page_count);
  Status StartLookAgain(const int32_t* page_table, uint64_t page_count);

  // Until the cached keys and values of this layer are in their pages, and its tuples can be read. kRestart: they do
  // not come; leave the plan, and Finish.
  Status WaitLayer(uint32_t layer);
  Status PollLayer(uint32_t layer);
  // Of a step that is not computed and a linear layer, behind WaitLayer.
  Status StepTuple(uint32_t step, uint32_t layer, Tuple* out);
  // Advances one linear layer; waits for it first. kRestart: as WaitLayer; states and outputs may hold anything.
  Status Advance(const LayerAdvance& advance);

  // The verdict. No token is emitted before it. kOk: all that the plan took from the cache was right, and the pages are
  // the engine's. kRestart, kOtherPages: compute anew, in a fresh state, and Finish again; what landed is used again.
  Status Finish();
  Status PollFinish();
  // After kOtherPages: the pages to go on in. Nothing of the plan is cached then.
  Status Move(const int32_t* page_table, uint64_t page_count);
  // What another rank has missed is not used here either: kRestart, as of Finish, which has been called.
  Status Lose(const uint32_t* segments, uint32_t count);

  // True: the pages that the request had are the cache's (TakeQuietPages). After kOtherPages; and before, where a
  // look-up was not answered in time, or a landing did not end before missing() was filled.
  bool pages_kept() const;

  // Ends the landing without waiting. PollQuiet: kOk once nothing can write into the pages any more.
  void Cancel();
  Status PollQuiet();
  // Lets go of what it holds in the cache, once no Tuple is needed. Texts that began as it may still be committed.
  void Release();

  // The plan for other processes: its size; written to `out` where `capacity` suffices. 0: nothing was found.
  uint64_t PlanBytes(uint8_t* out, uint64_t capacity) const;

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
  static Status Open(const OpenOptions& options, Cache* out);

  uint8_t* data() const;  // of the memory; null without one
  uint64_t bytes() const;
  // One an attention layer, ascending. `count` may be null.
  const PagePlace* places(uint32_t* count) const;
  bool connected() const;

  // Many prompts in one call, one request each.
  Status Begin(const Prompt* prompts, uint32_t count, Request* requests);
  Status StartBegin(const Prompt* prompts, uint32_t count, Request* requests);
  // The same of plans that another process began, for this one's shard. kInvalidArgument: "plans[2].checksum: …".
  Status Land(const PlanToLand* plans, uint32_t count, Request* requests);
  Status StartLand(const PlanToLand* plans, uint32_t count, Request* requests);

  // For engines that bring no kernels; those that do fill a ComputedRun by their own.
  Status ComputeAlone(const AloneLayer& layer);

  Status Commit(const Text* texts, uint32_t count);
  Status StartCommit(const Text* texts, uint32_t count, Job* job);

  // Of the segments that this engine has published.
  void Stored(StoredSegments* out) const;

  // Pages that the cache kept and that are quiet now are the engine's again: how many, up to `capacity`. Waits up to
  // timeout_ms for the first; Poll does not wait.
  uint64_t TakeQuietPages(int32_t* pages, uint64_t capacity, uint32_t timeout_ms);
  uint64_t PollQuietPages(int32_t* pages, uint64_t capacity);

 private:
  friend struct Access;
  CacheState* impl_ = nullptr;
};

// Names of numbers, as metrics have them.
const char* MissName(uint8_t reason);
const char* TierName(uint8_t tier);
const char* PublishName(uint8_t outcome);
const char* CommitName(uint8_t outcome);

}  // namespace ashlar::engine
