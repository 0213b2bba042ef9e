// The recurrent state behind a match's prefix, as an engine with kernels takes it up.
#pragma once

#include "ashlar/client.h"
#include "examples/rag/serving.h"
#include "examples/refengine/sequence.h"

namespace ashlar::rag {

// Of a match with a prefix: its checkpoint's states, run through the inputs of its span where it has one. No projection
// and no MLP is computed. What it reads counts as what is mapped does: only with a landing's verdict, while the match
// is valid.
refengine::RecurrentState ResumedState(const Runtime& runtime, const Layout& layout, const Match& match);

}  // namespace ashlar::rag
