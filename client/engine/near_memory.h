// SPDX-License-Identifier: Apache-2.0
// Checks that memory which this process reads and writes itself is not GPU memory, where pages may be.
#pragma once

#include <string>

#include "ashlar/engine.h"
#include "client/session/client.h"

namespace ashlar::engine {

// Each returns kInvalidArgument if a pointer is an address in `region` and `region` is on a GPU. The message names the
// field, with prefix `field`.
Status CheckNear(const Region& region, const LinearTensors& tensors, const std::string& field);
Status CheckNear(const Region& region, const SpanRows& rows, const std::string& field);
Status CheckNear(const Region& region, const LayerAdvance& advance, const std::string& field);
Status CheckNear(const Region& region, const AloneLayer& alone, const std::string& field);

}  // namespace ashlar::engine
