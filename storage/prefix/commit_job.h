// SPDX-License-Identifier: Apache-2.0
// CommitJob: a commit of one text in progress. It copies the selected blocks, checkpoints and span, block by block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/prefix/prefixes.h"

namespace ashlar::storage {

// Copies the blocks and checkpoints of one text a few at a time, so that a long text neither fills the workers' queue
// nor reserves space long before using it. Lives while copies are in flight.
class Prefixes::CommitJob : public std::enable_shared_from_this<CommitJob> {
 public:
  // `keep` are the selected parts of `commit`.
  CommitJob(Prefixes& prefixes, SessionId session, const TenantPool& pool, PrefixCommit commit, bool own, Keep keep,
            std::vector<CommitOutcome> outcomes, CommitDone done);
  void Start();  // call once; `done` may be called before it returns

 private:
  static constexpr size_t kUnderWay = 4;  // copies at a time

  struct Object {
    enum What : uint8_t { kBlock, kCheckpoint, kSpan };
    What what = kCheckpoint;
    size_t checkpoint = 0;  // the checkpoint, or the first one that needs the block, as all later ones do
    size_t block = 0;
    uint64_t resume = 0;  // depth to resume from without the checkpoint
  };

  const PrefixKeys& Keys() const { return own_ ? *commit_.text.own() : commit_.text.shared(); }
  Key SpanKey() const { return Keys().Span(commit_.span->begin, commit_.text.tokens().size()); }
  CommitOutcome& OutcomeOf(const Object& object);

  void Go();
  bool Begin(const Object& object);  // false: waits for memory
  bool WaitsFor(const ObjectHeader& plan);
  void Reserve(const Object& object, ObjectHeader plan);
  bool EndsText(const Object& object) const;
  // FLOPs of this shard.
  double Saves(const Object& object) const;
  absl::StatusOr<ObjectHeader> Plan(const Object& object) const;
  void Copy(const Object& object, ReservationId reservation);
  static bool Failed(CommitOutcome outcome);
  // Marks an object as failed. Without a block, no later checkpoint can be resumed from; without its checkpoint, no
  // span can.
  void Fail(const Object& object, CommitOutcome outcome);
  void Finish();
  // Null if the namespace was erased meanwhile.
  Space* FindSpace() const;
  static PrefixPlanner::Kept IsKept(std::span<PrefixNode* const> way, uint64_t depth);
  // Returns whether a copied checkpoint should no longer be kept, because more valuable checkpoints have arrived
  // meanwhile.
  bool GivenUp(std::span<PrefixNode* const> way, uint64_t depth, PrefixPlanner::Kept as) const;
  void Conclude(size_t i, Space* space, std::span<PrefixNode* const> way);
  void ConcludeSpan(Space* space, std::span<PrefixNode* const> way);
  // Remembers the end of the text for its conversation or, if the span failed, the span's base checkpoint.
  void RememberOwn();

  Prefixes& prefixes_;
  const SessionId session_;
  const TenantPool pool_;
  PrefixCommit commit_;
  const bool own_;
  const Keep keep_;
  std::vector<CommitOutcome> outcomes_;
  CommitOutcome span_outcome_ = CommitOutcome::kDeclined;
  const CommitDone done_;
  std::vector<Object> objects_;
  std::vector<uint64_t> depths_;  // depths of the text's known or wanted checkpoints, ascending
  size_t blocks_ = 0;             // number of blocks among the objects
  size_t next_ = 0, under_way_ = 0;
  bool going_ = false;
  bool waits_ = false;    // true while it waits for memory of the tier
  bool may_wait_ = true;  // the system has not refused memory
};

}  // namespace ashlar::storage
