// SPDX-License-Identifier: Apache-2.0
// Access to the session below the engine API, for this repository's own tests, benchmarks and examples.
#pragma once

#include <cstdint>

#include "ashlar/engine.h"
#include "client/session/client.h"
#include "kernels/linear.h"

namespace ashlar::engine {

// Opens a cache on a client that outlives it, its requests and its jobs, in a region of that client with the pages at
// the options' places (the options name no sockets); without a region, as Cache::Open.
Status OpenOn(Client& client, const Region& region, const OpenOptions& options, Cache* out);
// The same of a whole model that is described already; options.model is not read.
Status OpenOn(Client& client, const Region& region, const Identity& identity, const Layout& layout,
              const CostModel& cost, const OpenOptions& options, Cache* out);

ashlar::Model& ModelOf(const Cache& cache);
// Returns the cache's memory, whose copies keep it mapped when the cache has ended; empty without one.
Region RegionOf(const Cache& cache);
// Returns how many layers the daemon has advanced so far.
uint64_t DaemonAdvances(const Cache& cache);
// Returns null before any look-up.
const ashlar::Match* MatchOf(const Request& request);
// Returns a step's tuple as Request::StepTuple does, in the kernels' form. If the step is a prefix with a span
// (MatchOf()->prefix_span()), call it after WaitLayer; else only reading must wait for WaitLayer. Valid until the next
// kRestart.
Status ViewOf(const Request& request, uint32_t step, uint32_t layer, kernels::TupleView* tuple, const void** conv_tail);

}  // namespace ashlar::engine
