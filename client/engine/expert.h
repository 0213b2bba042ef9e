// For engines in C++ that use the calls below beside the small API, on what it has opened.
#pragma once

#include <cstdint>

#include "ashlar/client.h"
#include "ashlar/engine.h"
#include "kernels/linear.h"

namespace ashlar::engine {

// Opens a cache on a client that outlives it, in a region of that client's with the pages where the options say (which
// name no sockets); without a region, as Open does.
Status OpenOn(Client& client, const Region& region, const OpenOptions& options, Cache* out);

ashlar::Model& ModelOf(const Cache& cache);
// Layers that the daemon has advanced so far.
uint64_t DaemonAdvances(const Cache& cache);
// Null before anything was looked up.
const ashlar::Match* MatchOf(const Request& request);
// As Request::StepTuple, for the library's kernels. Where the step is a prefix with a span (MatchOf()->prefix_span()),
// only behind WaitLayer; else to be read only behind it. Until the next kRestart.
Status ViewOf(const Request& request, uint32_t step, uint32_t layer, kernels::TupleView* tuple, const void** conv_tail);

}  // namespace ashlar::engine
