// SPDX-License-Identifier: Apache-2.0
// What an engine tells the daemon when it connects and opens a model.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "kernels/dtype.h"
#include "kernels/gpu.h"

namespace ashlar {

struct ClientOptions {
  std::string rpc_socket;                   // the daemon's listen.rpc_socket
  std::string session_socket;               // the daemon's listen.session_socket
  std::chrono::milliseconds timeout{5000};  // timeout of every call; at most an hour
  std::string name = "libashlar";           // shown in the daemon's logs
  // The engine's GPU (kernels::FindGpu): regions are registered on it if the daemon serves several GPUs, and arenas of
  // an hbm tier on it are mapped.
  const kernels::Gpu* gpu = nullptr;
};

// This process's part of the model, and its computing cost; not part of the namespace. Heads are divided as in
// proto/shard.h; layers keep their numbers. A segment is a hit when every rank has published its part of it. One rank
// looks up, and the others attach to its lease, so that they agree.
struct Shard {
  uint32_t first_layer = 0;  // 0: pipeline stages are refused
  uint32_t layer_count = 0;  // 0: all
  uint32_t tensor_parallel_rank = 0;
  uint32_t tensor_parallel_size = 1;
};
struct CostModel {
  // Cost of the whole model, for eviction. If flops_per_token is 0, the daemon estimates both from the layout.
  double flops_per_token = 0;
  double flops_per_token_squared = 0;
  double tokens_per_second = 0;  // rate of prefill, for the break-even check; 0: every hit is taken
};

// The engine's use of exact prefixes.
struct PrefixUse {
  // The engine can checkpoint inside a prompt at multiples of capture_tokens, and always at a text's end. 0: it does
  // not use prefixes.
  uint32_t capture_tokens = 0;
  // The engine captures spans of at most this many last tokens (span.h), and rebuilds states from spans. 0:
  // neither. The checkpoint before a span may then be at any depth. Opening the model is refused if a layer's rows do
  // not fit in an extent.
  uint32_t span_tokens = 0;
  DType span_dtype = DType::kF32;  // type of captured keys and values: kF32, kF16 or kBF16
};

}  // namespace ashlar
