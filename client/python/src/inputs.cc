// SPDX-License-Identifier: Apache-2.0
#include "client/python/src/inputs.h"

namespace ashlar::python {

engine::State StateOf(const std::string& name, const Strided& tensor, const std::optional<Exponents>& exponents,
                      const LinearWidths& widths) {
  if (widths.opaque) return {.data = BytesOf(name, tensor, widths.state)};
  const RowsOfElements heads = ElementRows(name, tensor, widths.heads, widths.state / widths.heads);
  engine::State state{.data = heads.data, .dtype = TypeOf(name, tensor), .head_stride = heads.stride};
  if (exponents.has_value()) {
    if (exponents->size() != widths.heads) throw Refused(name + " exponents", "expected one per head");
    state.exponents = exponents->data();
  } else if (state.dtype == DType::kF16) {
    throw Refused(name, "float16 requires exponents");
  }
  return state;
}

engine::TokenRows RowsFrom(const GivenRows& given, const LinearWidths& widths) {
  engine::TokenRows rows;
  if (!given.k.has_value()) return rows;
  if (!given.v.has_value()) throw Refused("v", "required with k");
  if (widths.gates > 0 && !given.g.has_value()) throw Refused("g", "required for this family");
  if (widths.betas > 0 && !given.beta.has_value()) throw Refused("beta", "required for this family");
  rows.tokens = given.k->ndim() == 0 ? 0 : given.k->shape(0);
  const auto take = [&rows](const char* name, const std::optional<Floats>& array, uint64_t width, const float** data,
                            int64_t* stride) {
    if (!array.has_value() || width == 0) return;
    const RowsView view = RowsOf(name, *array, width);
    if (view.tokens != rows.tokens) throw Refused(name, "expected as many tokens as k");
    *data = view.data;
    *stride = view.stride;
  };
  take("k", given.k, widths.keys, &rows.k, &rows.k_stride);
  take("v", given.v, widths.values, &rows.v, &rows.v_stride);
  take("q", given.q, widths.keys, &rows.q, &rows.q_stride);
  take("g", given.g, widths.gates, &rows.g, &rows.g_stride);
  take("beta", given.beta, widths.betas, &rows.beta, &rows.beta_stride);
  return rows;
}

void TakeOutput(const std::optional<MutableFloats>& out, const engine::TokenRows& rows, const LinearWidths& widths,
                float** data, int64_t* stride) {
  if (!out.has_value()) return;
  const RowsView view = RowsOf("out", *out, widths.values);
  if (view.tokens < rows.tokens) throw Refused("out", "expected at least as many tokens as k");
  if (rows.q == nullptr && rows.tokens > 0) throw Refused("q", "required with out");
  *data = out->data();
  *stride = view.stride;
}

}  // namespace ashlar::python
