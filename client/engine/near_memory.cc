// SPDX-License-Identifier: Apache-2.0
#include "client/engine/near_memory.h"

#include <cstdint>
#include <initializer_list>

#include "client/engine/status.h"

namespace ashlar::engine {
namespace {

struct Named {
  const void* data;
  const char* name;
};

Status CheckAll(const Region& region, std::initializer_list<Named> pointers, const std::string& field) {
  if (region.memory() != kernels::MemoryKind::kDevice) return {};
  const auto begin = reinterpret_cast<uintptr_t>(region.data());
  for (const auto& [data, name] : pointers) {
    const auto at = reinterpret_cast<uintptr_t>(data);
    if (at < begin || at - begin >= region.size()) continue;
    return Invalid(field, ".", name, ": lies on the GPU, where only pages are allowed; copy it to CPU memory");
  }
  return {};
}

Status CheckState(const Region& region, const State& state, const std::string& field) {
  return CheckAll(region, {{state.data, "data"}, {state.exponents, "exponents"}}, field);
}

Status CheckRows(const Region& region, const TokenRows& rows, const std::string& field) {
  return CheckAll(region, {{rows.q, "q"}, {rows.k, "k"}, {rows.v, "v"}, {rows.g, "g"}, {rows.beta, "beta"}}, field);
}

}  // namespace

Status CheckNear(const Region& region, const LinearTensors& tensors, const std::string& field) {
  return CheckAll(region,
                  {{tensors.state, "state"},
                   {tensors.state_exponents, "state_exponents"},
                   {tensors.conv_tail, "conv_tail"},
                   {tensors.transition, "transition"},
                   {tensors.decay, "decay"}},
                  field);
}

Status CheckNear(const Region& region, const SpanRows& rows, const std::string& field) {
  return CheckAll(region,
                  {{rows.keys, "keys"},
                   {rows.values, "values"},
                   {rows.gates, "gates"},
                   {rows.betas, "betas"},
                   {rows.conv_inputs, "conv_inputs"}},
                  field);
}

Status CheckNear(const Region& region, const LayerAdvance& advance, const std::string& field) {
  if (Status status = CheckState(region, advance.state, field + ".state"); !status.ok()) return status;
  if (Status status = CheckRows(region, advance.inputs, field + ".inputs"); !status.ok()) return status;
  for (uint32_t i = 0; i < advance.copy_count; ++i) {
    const std::string at = absl::StrCat(field, ".copies[", i, "].state");
    if (Status status = CheckState(region, advance.copies[i].state, at); !status.ok()) return status;
  }
  return CheckAll(region, {{advance.out, "out"}}, field);
}

Status CheckNear(const Region& region, const AloneLayer& alone, const std::string& field) {
  if (Status status = CheckState(region, alone.state, field + ".state"); !status.ok()) return status;
  if (Status status = CheckRows(region, alone.inputs, field + ".inputs"); !status.ok()) return status;
  return CheckAll(region, {{alone.out, "out"}, {alone.transition, "transition"}, {alone.decay, "decay"}}, field);
}

}  // namespace ashlar::engine
