// SPDX-License-Identifier: Apache-2.0
// The mathematics of a cached prompt, one interface for several back ends (reference, host, cuda), each checked against
// `reference` by the tests beside this file with the tolerance declared per operation.
//
// Operations by subject: linear.h (compose, capture, advance), decoding.h (decode from buffers, verify drafts), rows.h
// (land, gather, turn, hash), attention.h (attend to keys in pages).
//
// Rules that hold for every operation
// - Arguments are plain structs of pointers. Everything they point to belongs to the caller and must stay valid and
//   unchanged until the returned event is complete; the description of the call (below) has been read when it returns.
//   No operation blocks on the queue's work, or allocates per call.
// - `batch_bytes` is the number of bytes that this call and its neighbours write together, if a caller divides a large
//   transfer into several calls: a back end may then write past the caches, which a small call alone would not merit.
//   0: this call.
// - Matrices are row-major. Inputs and outputs must not overlap unless a field says "in and out". Whatever the dtypes,
//   sums are at least fp32, and every number written is rounded once, to nearest.
// - Per-head pointers give each head's matrix separately: an object's matrices never straddle two extents, but
//   neighbouring heads may lie in different ones.
// - A back end with memory() reads a call's description from host memory: structs, spans, tables of
//   pointers, page tables, frequencies. Arrays of numbers that are computed with (states, transitions, exponents, rows,
//   scales, inputs, decay tables, outputs, checksums) must lie where the device reaches them.
// - Arguments that make no sense (negative counts, null pointers that are needed, heads not a multiple of key heads)
//   abort with the field's name: they are errors of the program, never of data. Check data before.
#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "kernels/attention.h"
#include "kernels/decoding.h"
#include "kernels/device.h"
#include "kernels/linear.h"
#include "kernels/rows.h"

namespace ashlar::kernels {

class Kernels {
 public:
  virtual ~Kernels() = default;

  virtual std::string_view name() const = 0;

  // A queue that runs work as it is submitted, on the calling thread and `workers` (null: the calling thread alone).
  // `workers` must outlive the queue. One thread at a time submits to a queue.
  virtual std::unique_ptr<Queue> MakeQueue(Workers* workers) const = 0;

  // Null: everything is in CPU memory.
  virtual DeviceMemory* memory() const { return nullptr; }

  // Each checks its arguments, then calls the back end.
  Event Compose(const ComposeArgs& args, Queue& queue) const;
  Event ComposeTransitions(const ComposeTransitionsArgs& args, Queue& queue) const;
  Event Capture(const CaptureArgs& args, Queue& queue) const;
  Event AdvanceSeam(const AdvanceSeamArgs& args, Queue& queue) const;
  Event DecodeBuffered(const DecodeBufferedArgs& args, Queue& queue) const;
  Event VerifyDrafts(const VerifyDraftsArgs& args, Queue& queue) const;
  Event RebuildState(const RebuildStateArgs& args, Queue& queue) const;
  Event RotateKeys(const RotateKeysArgs& args, Queue& queue) const;
  Event Land(const LandArgs& args, Queue& queue) const;
  Event Gather(const GatherArgs& args, Queue& queue) const;
  Event Checksum(const ChecksumArgs& args, Queue& queue) const;
  // Keys as landed; unrotated keys, which are rotated while they are loaded; zero-based keys, for which the query is
  // rotated per span.
  Event AttendLanded(const AttendArgs& args, Queue& queue) const;
  Event AttendUnrotated(const AttendArgs& args, Queue& queue) const;
  Event AttendRotatedQuery(const AttendArgs& args, Queue& queue) const;

 protected:
  virtual Event DoCompose(const ComposeArgs& args, Queue& queue) const = 0;
  virtual Event DoComposeTransitions(const ComposeTransitionsArgs& args, Queue& queue) const = 0;
  virtual Event DoCapture(const CaptureArgs& args, Queue& queue) const = 0;
  virtual Event DoAdvanceSeam(const AdvanceSeamArgs& args, Queue& queue) const = 0;
  virtual Event DoDecodeBuffered(const DecodeBufferedArgs& args, Queue& queue) const = 0;
  virtual Event DoVerifyDrafts(const VerifyDraftsArgs& args, Queue& queue) const = 0;
  virtual Event DoRebuildState(const RebuildStateArgs& args, Queue& queue) const = 0;
  virtual Event DoRotateKeys(const RotateKeysArgs& args, Queue& queue) const = 0;
  virtual Event DoLand(const LandArgs& args, Queue& queue) const = 0;
  virtual Event DoGather(const GatherArgs& args, Queue& queue) const = 0;
  virtual Event DoChecksum(const ChecksumArgs& args, Queue& queue) const = 0;
  virtual Event DoAttendLanded(const AttendArgs& args, Queue& queue) const = 0;
  virtual Event DoAttendUnrotated(const AttendArgs& args, Queue& queue) const = 0;
  virtual Event DoAttendRotatedQuery(const AttendArgs& args, Queue& queue) const = 0;
};

// Back ends of this build that can run on this machine. They live as long as the process.
const Kernels& Reference();                   // plain loops, fp64 accumulation: the reference for all others
const Kernels& Host();                        // Highway, dispatched at run time to the CPU's instruction sets
std::span<const Kernels* const> Available();  // the host kernels, and CUDA's if they are built and a GPU is present

}  // namespace ashlar::kernels
