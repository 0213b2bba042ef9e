// SPDX-License-Identifier: Apache-2.0
#include <ashlar/engine.h>

#include <cstdio>

int main(int, char** argv) {
  using namespace ashlar::engine;
  const Layer layer;
  OpenOptions options;
  options.rpc_socket = argv[1];
  options.session_socket = argv[2];
  options.model = {.model_id = "tiny", .weights_digest = "1", .page_tokens = 16, .layers = &layer, .layer_count = 1};
  Cache cache;
  const Status status = Cache::Open(options, &cache);
  std::printf("%s\n", status.ok() ? "connected" : status.code == Code::kUnavailable ? "no daemon" : status.message);
}
