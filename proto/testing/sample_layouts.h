// SPDX-License-Identifier: Apache-2.0
// Layouts for tests: a fixed example, which the golden files and docs/formats.md use, random valid layouts, and random
// transition forms.
#pragma once

#include <random>
#include <vector>

#include "proto/layout.h"
#include "proto/object.h"

namespace ashlar {

// The model of docs/formats.md: one gdn layer with a convolution, and one attention layer with partial RoPE.
Identity ExampleIdentity();
Layout ExampleLayout();
// The example with its own type and order of convolution tails.
Layout TailsLayout();
// The example with two additional opaque layers: one with both kinds of bytes, and one with only a state.
Layout OpaqueLayout();

// Returns a random valid layout of any family, kind and dtype.
Layout RandomLayout(std::mt19937_64& random);

// Returns random forms for the heads of a segment: for some layers, every head in one run, in random order.
std::vector<TransitionRun> RandomRuns(std::mt19937_64& random, const Layout& layout);

}  // namespace ashlar
