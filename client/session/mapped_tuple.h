// SPDX-License-Identifier: Apache-2.0
// MappedTuple: one linear or opaque layer of a cached segment or prefix, read in place.
#pragma once

#include "kernels/device.h"
#include "kernels/linear.h"

namespace ashlar {

// A cached linear layer of one segment, in place: pointers into the daemon's memory, read-only, mapped as long as the
// Match lives. A hit may still be in promotion from a slower tier, and its bytes arrive layer by layer. Read a tuple
// only after a WaitLayers that covers its layer, or after the verdict, of a landing of this Match; before that even the
// exponents in view.heads may change. The verdict covers the bytes that tuples point to: a landing checks them, and
// afterwards the lease protects them until it is released. The library tells the daemon once, within two seconds, that
// a match is held. If it cannot, the match ends after the daemon's leases.unused_seconds, and its memory may be reused.
// All matches end with the session. A checkpoint's heads have form kZero, because the state before it does not matter.
// The heads of an opaque layer are the units of its state (OpaqueUnits). view.position is the segment's first position
// in the prompt.
//
// If the hbm tier is on a GPU, states, transitions and tails are there too: `memory` says so, and their pointers are
// for that GPU's kernels and copies. GPU memory is the only memory that is not write-protected: an engine that writes
// to it corrupts its own tenant's cache.
struct MappedTuple {
  kernels::TupleView view;
  const void* conv_tail = nullptr;  // has the layer's conv_order and ConvType
  kernels::MemoryKind memory = kernels::MemoryKind::kHost;
};

}  // namespace ashlar
