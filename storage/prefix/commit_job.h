// SPDX-License-Identifier: Apache-2.0
// CommitJob: one text's commit under way. It copies the blocks, checkpoints and span that are to be kept, block by
// block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/prefix/prefixes.h"

namespace ashlar::storage {

// Copies the blocks and checkpoints of one text in, a few at a time, so that a long one neither fills the workers'
// queue nor reserves room long before it is used. Lives as long as something is under way.
class Prefixes::CommitJob : public std::enable_shared_from_this<CommitJob> {
 public:
  // `keep`: the parts of `commit` that are wanted.
  CommitJob(Prefixes& prefixes, SessionId session, const TenantPool& pool, PrefixCommit commit, bool own, Keep keep,
            std::vector<CommitOutcome> outcomes, CommitDone done);
  void Start();  // once; `done` may be called before it returns

 private:
  static constexpr size_t kUnderWay = 4;  // copies at a time

  struct Object {
    enum What : uint8_t { kBlock, kCheckpoint, kSpan };
    What what = kCheckpoint;
    size_t checkpoint = 0;  // it, or which one needs the block; those behind it do, too
    size_t block = 0;
    uint64_t resume = 0;  // without the checkpoint, from there
  };

  const PrefixKeys& Keys() const { return own_ ? *commit_.text.own() : commit_.text.shared(); }
  Key SpanKey() const { return Keys().Span(commit_.span->begin, commit_.text.tokens().size()); }
  CommitOutcome& OutcomeOf(const Object& object);

  void Go();
  void Begin(const Object& object);
  // FLOPs, the shard's part of them.
  double Saves(const Object& object) const;
  absl::StatusOr<ObjectHeader> Plan(const Object& object) const;
  void Copy(const Object& object, ReservationId reservation);
  static bool Failed(CommitOutcome outcome);
  // Marks an object as failed. Without a block, no checkpoint behind it can be resumed from; without its checkpoint, no
  // span can.
  void Fail(const Object& object, CommitOutcome outcome);
  void Finish();
  // Removes the key from those being written. True: nobody else is copying the object in.
  bool Written(const Key& key);
  // Null where the namespace has been erased meanwhile.
  Space* FindSpace() const;
  static PrefixPlanner::Kept IsKept(std::span<PrefixNode* const> way, uint64_t depth);
  // Returns whether a copied checkpoint is not to be kept any more, because checkpoints of more worth may have come
  // meanwhile.
  bool GivenUp(std::span<PrefixNode* const> way, uint64_t depth, PrefixPlanner::Kept as) const;
  void Conclude(size_t i, Space* space, std::span<PrefixNode* const> way);
  void ConcludeSpan(Space* space, std::span<PrefixNode* const> way);
  // Remembers the text's end for its conversation or, if a span failed to get there, the checkpoint that it would have
  // hung on.
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
  std::vector<uint64_t> depths_;  // of the text's checkpoints that are known or wanted, rising
  size_t blocks_ = 0;             // that are among the objects
  size_t next_ = 0, under_way_ = 0;
  bool going_ = false;
};

}  // namespace ashlar::storage
