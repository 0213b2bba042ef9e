// Layouts for tests: one fixed example, which the golden files and docs/formats.md use, and random valid ones.
#pragma once

#include <random>

#include "proto/layout.h"

namespace ashlar {

// The model of docs/formats.md: one gdn layer with a convolution, one attention layer with partial RoPE.
Identity ExampleIdentity();
Layout ExampleLayout();

// Valid, of any family, kind and dtype. With `storable`, only what the object format has a stored form for.
Layout RandomLayout(std::mt19937_64& random, bool storable = false);

}  // namespace ashlar
