// SPDX-License-Identifier: Apache-2.0
// MappedObject: a cached object read in place. It checks the bytes in the daemon's memory, and points into them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/session/mapped_tuple.h"
#include "client/session/shared_memory.h"
#include "client/session/span.h"
#include "kernels/mutex.h"
#include "proto/key.h"
#include "proto/layout.h"
#include "proto/object.h"

namespace ashlar::internal {

// Consecutive extents of one mapped arena.
struct MappedRun {
  std::shared_ptr<const SharedMemory> arena;
  uint32_t first = 0;
  uint32_t count = 0;
};

// The object that the engine requested.
struct ExpectedObject {
  const Layout* layout = nullptr;
  NamespaceId ns;
  ObjectKind kind = ObjectKind::kSegment;
  uint64_t tokens = 0;       // a span's minimum
  uint64_t start = 0;        // first position: of a segment in the prompt, of a span in its text
  uint64_t span_tokens = 0;  // number of a span's tokens to read
};

class MappedObject {
 public:
  // Reads the header and builds the tables of tuples. Of the parts it reads only exponents, so this takes microseconds
  // whatever their size. Everything but the header may still be in promotion from another tier. DATA_LOSS: the header
  // does not match `expected`, or parts do not fit the layout. OUT_OF_RANGE: a run is outside its arena. The runs are
  // in the object's order.
  static absl::StatusOr<std::unique_ptr<MappedObject>> Open(std::span<const MappedRun> runs,
                                                            const ExpectedObject& expected);

  // Marks all bytes of the first `layers` layers as arrived: reads their exponents again, each once. Call it before
  // using tuples of these layers. Thread-safe.
  void Arrived(uint32_t layers);

  MappedObject(const MappedObject&) = delete;
  MappedObject& operator=(const MappedObject&) = delete;

  const ObjectHeader& header() const { return header_; }
  const std::vector<MappedTuple>& tuples() const { return tuples_; }  // empty for a span
  const MappedSpan& span() const { return span_; }                    // only for a span

 private:
  MappedObject() = default;
  absl::Status Locate(std::span<const MappedRun> runs);
  absl::Status Check(const ExpectedObject& expected) const;
  absl::Status FormTuples(const ExpectedObject& expected);
  absl::Status FormSpan(const ExpectedObject& expected);
  absl::Status FormRows(uint32_t layer, PartForm form, uint64_t row_bytes, MappedRows& rows) const;
  absl::Status FormHeads(const LinearLayer& linear, uint32_t layer);
  absl::Status FormOpaque(const OpaqueLayer& opaque, uint32_t layer);
  struct Exponents {
    uint32_t layer;
    const std::byte* stored;
    std::span<kernels::HeadTuple> heads;
  };
  void Read(const Exponents& exponents) const;
  const std::byte* Unit(const Part& part, uint32_t unit) const;
  absl::StatusOr<ObjectHeader> ReadHeader() const;

  std::vector<std::shared_ptr<const SharedMemory>> arenas_;  // keeps everything below mapped
  std::vector<const std::byte*> extents_;
  ObjectHeader header_;
  std::vector<kernels::HeadTuple> heads_;  // every tuple's table, concatenated; sized once
  std::vector<MappedTuple> tuples_;
  Mutex mutex_;
  std::vector<Exponents> exponents_;            // ascending by layer
  size_t arrived_ ABSL_GUARDED_BY(mutex_) = 0;  // exponents that have been read
  MappedSpan span_;
};

}  // namespace ashlar::internal
