// SPDX-License-Identifier: Apache-2.0
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

// The rows of a call as Python gives them.
struct GivenRows {
  GivenRows(nb::handle its_q, nb::handle its_k, nb::handle its_v, nb::handle its_g, nb::handle its_beta,
            nb::handle its_out)
      : q(OptionalFloats("q", its_q)),
        k(OptionalFloats("k", its_k)),
        v(OptionalFloats("v", its_v)),
        g(OptionalFloats("g", its_g)),
        beta(OptionalFloats("beta", its_beta)),
        out(OptionalOutput("out", its_out)) {}
  std::optional<Floats> q, k, v, g, beta;
  std::optional<MutableFloats> out;
};

// Rows of the same number of tokens; no rows if k is None.
engine::TokenRows RowsFrom(const GivenRows& given, const LinearWidths& widths);

void TakeOutput(const std::optional<MutableFloats>& out, const engine::TokenRows& rows, const LinearWidths& widths,
                float** data, int64_t* stride);

}  // namespace ashlar::python
