// SPDX-License-Identifier: Apache-2.0
// Pages may lie on a GPU; what this process itself reads and writes may not lie beside them there.
#pragma once

#include <string>

#include "ashlar/engine.h"
#include "client/session/client.h"

namespace ashlar::engine {

// Each returns kInvalidArgument naming the field behind `field` where one of the pointers is an address in `region` and
// that lies on a GPU.
Status CheckNear(const Region& region, const LinearTensors& tensors, const std::string& field);
Status CheckNear(const Region& region, const SpanRows& rows, const std::string& field);
Status CheckNear(const Region& region, const LayerAdvance& advance, const std::string& field);
Status CheckNear(const Region& region, const AloneLayer& alone, const std::string& field);

}  // namespace ashlar::engine
