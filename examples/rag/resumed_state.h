// ResumedState: the recurrent state behind a match's prefix, for an engine with kernels.
#pragma once

#include "ashlar/client.h"
#include "examples/rag/serving.h"
#include "examples/refengine/sequence.h"

namespace ashlar::rag {

// Returns the states of a match with a prefix: its checkpoint's states, run through the inputs of its span if it has
// one. No projection and no MLP is computed. The bytes that it reads count as mapped bytes do: only with a landing's
// verdict, while the match is valid.
refengine::RecurrentState ResumedState(const Runtime& runtime, const Layout& layout, const Match& match);

}  // namespace ashlar::rag
