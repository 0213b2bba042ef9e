// The arrays of Advance and ComputeAlone, checked against the layer's widths.
#pragma once

#include <optional>
#include <string>

#include "client/python/src/arrays.h"
#include "client/python/src/model.h"

namespace ashlar::python {

// A state that a call reads and writes, with the exponents of fp16.
engine::State StateOf(const std::string& name, const Strided& tensor, const std::optional<Exponents>& exponents,
                      const LinearWidths& widths);

// Rows of as many tokens each; none where k is None.
engine::TokenRows RowsFrom(const std::optional<Floats>& q, const std::optional<Floats>& k,
                           const std::optional<Floats>& v, const std::optional<Floats>& g,
                           const std::optional<Floats>& beta, const LinearWidths& widths);

void TakeOutput(const std::optional<MutableFloats>& out, const engine::TokenRows& rows, const LinearWidths& widths,
                float** data, int64_t* stride);

}  // namespace ashlar::python
