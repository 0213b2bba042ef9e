// SPDX-License-Identifier: Apache-2.0
// Layouts for tests: one fixed example, which the golden files and docs/formats.md use, and random valid ones; forms
// that their heads may have.
#pragma once

#include <random>
#include <vector>

#include "proto/layout.h"
#include "proto/object.h"

namespace ashlar {

// The model of docs/formats.md: one gdn layer with a convolution, one attention layer with partial RoPE.
Identity ExampleIdentity();
Layout ExampleLayout();
// The example with tails of their own type and order.
Layout TailsLayout();

// Valid, of any family, kind and dtype.
Layout RandomLayout(std::mt19937_64& random);

// Forms that a segment's heads may be stored in: of some of the layers, every head in one run, in no order.
std::vector<TransitionRun> RandomRuns(std::mt19937_64& random, const Layout& layout);

}  // namespace ashlar
