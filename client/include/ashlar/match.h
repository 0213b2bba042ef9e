// SPDX-License-Identifier: Apache-2.0
// Prompt; Match, the result of a prompt's look-up; and Landing.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ashlar/span.h"
#include "kernels/kernels.h"
#include "proto/key.h"
#include "proto/object.h"
#include "proto/outcome.h"
#include "proto/prefix.h"

namespace ashlar {

// One prompt: segments lie one behind the other from position 0. The first segment is a prefix (cached whole); the
// others are position-independent. Tokens behind the last segment (the query) are always computed.
struct Prompt {
  std::span<const int32_t> tokens;
  std::span<const uint64_t> segment_lengths;
  // For Lookup: the time until the engine will need the hits, for example because the request waits for its turn; at
  // most limits::kMaxNeededInNanos. Objects of lower tiers are promoted meanwhile, behind those that are needed sooner.
  // The match stays for as long as the engine holds it.
  std::chrono::nanoseconds needed_in{0};
  // For Lookup, with PrefixUse: drawn by the engine at random. The prompt may resume from this conversation's own
  // states. All zero: none.
  ConversationId conversation{};
  // The prompt's multimodal inputs, by their content's hashes; at most limits::kMaxMedia. A daemon that speaks protocol
  // 2 knows none: a prompt with media then misses everything (kInvalidRequest), and its runs are not reserved.
  std::span<const MediaHash> media;
  // Prompts with different salts (MakeSalt), or with none, find nothing of one another. A daemon that speaks protocol 3
  // knows none: a prompt with a salt then misses everything (kInvalidRequest), and its runs are not reserved.
  Salt salt;
};

// A cached linear layer of one segment, in place: pointers into the daemon's memory, read-only, mapped as long as the
// Match lives. A hit may still be on its way up from a slower tier, and its bytes arrive layer by layer: read a tuple
// only after a WaitLayers that covers its layer, or after the verdict, of a landing of this Match; before that even the
// exponents in view.heads may change. The verdict vouches for the bytes that tuples point to: a landing checks them,
// and afterwards the lease holds until it is released. The library tells
// the daemon once, within two seconds, that a match is held; a match of which it could not ends after the daemon's
// leases.unused_seconds, and its memory may then be given to other objects. All end with the session. A checkpoint's
// heads have form kZero: the state before it does not matter. view.position is the segment's first position in the
// prompt.
//
// If the hbm tier lies on a GPU, states, transitions and tails lie there too: `memory` says so, and their pointers are
// for that GPU's kernels and copies. GPU memory, unlike any other, is not protected against writing: an engine that
// writes it spoils its own tenant's cache.
struct MappedTuple {
  kernels::TupleView view;
  const void* conv_tail = nullptr;  // in the layer's conv_order and ConvType
  kernels::MemoryKind memory = kernels::MemoryKind::kHost;
};

struct SegmentResult {
  MissReason reason = MissReason::kNeverSeen;  // kNone: hit
  TierKind tier = TierKind::kNone;
  ObjectKind kind = ObjectKind::kSegment;
  uint64_t start = 0;  // position of the segment's token 0 in the prompt
  uint64_t tokens = 0;
  uint64_t bytes = 0;  // of the cached object
  bool hit() const { return reason == MissReason::kNone; }
  bool remote() const { return tier == TierKind::kRemote; }
};

// The prefix of a prompt to resume from, beyond its first segment: what saves most together with the segments behind
// it. Segments whose interiors begin before its end are covered by it. It may end inside the head of the next one,
// hit or missed; then of that head only the rest is computed.
struct PrefixResult {
  uint64_t depth = 0;  // tokens; 0: there is none
  Provenance provenance = Provenance::kExact;
  TierKind tier = TierKind::kNone;  // the farthest that any of it lies in
  bool own = false;                 // of the prompt's conversation
  uint64_t bytes = 0;               // of all its objects
  // The number of the depth's last tokens that the states must still run through: prefix_states() are those before
  // these tokens, and prefix_span() has the tokens' inputs. Keys and values are landed up to `depth`. 0:
  // prefix_states() are at `depth`.
  uint32_t span_tokens = 0;
};

// A landing in progress. From Model::Land until Wait returns a verdict, the target slots belong to the daemon.
class Landing {
 public:
  Landing(Landing&&) noexcept;
  Landing& operator=(Landing&&) noexcept;
  ~Landing();  // cancels, and waits until the slots are quiet, however long the daemon takes

  // Waits until the daemon has finished the first `layers` layers of the model for all segments: keys and values of its
  // attention layers are in their slots; tuples of its linear layers have come up and are as they were published.
  // Linear layers come together with the attention layer behind them, those behind the last attention layer with the
  // verdict. Work on finished layers may overlap with the rest, but no token may be emitted before the verdict. True
  // does not mean that every segment is well: only the verdict names a segment that was found corrupt in one of those
  // layers. False: the landing ended with a miss, the daemon did not have to be asked, or the timeout passed.
  bool WaitLayers(uint32_t layers, std::chrono::milliseconds timeout);

  // The final verdict, one reason a segment as given to Land (kNone: landed). If the daemon does not answer in time the
  // landing is cancelled and every segment is a miss; then `quiet()` says whether the slots may be used again.
  std::vector<MissReason> Wait(std::chrono::milliseconds timeout);

  // True once nothing can write into the target slots any more: a verdict came, the daemon confirmed that writing has
  // ceased, or the kernel confirmed that the daemon is dead. Wait(timeout) that returned misses may leave it false:
  // then keep the slots out of use until WaitQuiet returns true.
  bool quiet() const;
  bool WaitQuiet(std::chrono::milliseconds timeout);

 private:
  friend class Model;
  struct Impl;
  explicit Landing(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The result of a look-up, under a lease. The lease ends when the Match is destroyed or Release is called, and no
// landing of it is under way; the daemon is told in the background. Threads may share a Match except for Release and
// destruction.
class Match {
 public:
  Match(Match&&) noexcept;
  Match& operator=(Match&&) noexcept;
  ~Match();

  uint64_t prefix_depth() const;  // of the prefix, or else of the first segment
  const std::vector<uint64_t>& checkpoint_positions() const;
  const std::vector<SegmentResult>& segments() const;
  const PrefixResult& prefix() const;
  // Depths that could have been chosen for the prefix, ascending; of very many the deepest.
  const std::vector<uint64_t>& resumable() const;

  // Tuples of a hit segment, one entry a layer of the layout (empty views for attention layers). Mapping costs
  // microseconds, whatever the size. Null for a miss, and after Release.
  const std::vector<MappedTuple>* tuples(size_t segment) const;
  // The states to resume from behind the prefix: heads of form kZero, position 0. Null without a prefix, or if they
  // must not be read (any more).
  const std::vector<MappedTuple>* prefix_states() const;
  // The span's inputs to run through these states, if prefix().span_tokens > 0; else null.
  const MappedSpan* prefix_span() const;
  // Call it after reading tuples in place. True: the session that holds the lease has not ended, so the bytes that a
  // landing vouched for have not changed until now. False: the bytes read may have been other objects', so compute
  // instead; also false after Release, and if nothing was found. It costs one system call. A match that was never
  // landed may end without valid() noticing.
  bool valid() const;

  // 16 bytes that another process of the same tenant can turn into a Match of its own (Model::Attach).
  std::string lease() const;
  void Release();

 private:
  friend class Model;
  struct Impl;
  explicit Match(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar
