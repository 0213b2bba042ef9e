// SPDX-License-Identifier: Apache-2.0
// The engine of the overhead benchmark over the C++ engine API; engine.c and engine.py are the same in C and in Python.
// usage: overhead_cc RPC-SOCKET SESSION-SOCKET PAGES wall|thread. Commands on standard input, a line of nanoseconds for
// each, by the wall's clock or by what the thread has computed:
//   publish SEED PAGES      publishes a text of that many pages
//   land SEED PAGES COUNT   lands it COUNT times: begin, finish, end
//   look SEED PAGES COUNT   looks it up COUNT times, and lands nothing
#include "ashlar/engine.h"

#include <time.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

namespace {

using ashlar::engine::Cache;
using ashlar::engine::Prompt;
using ashlar::engine::Request;
using ashlar::engine::Status;

constexpr uint32_t kLayers = 8, kHeads = 8, kDim = 128, kPageTokens = 32;  // bf16: pages of 1 MiB

clockid_t clock_of_figures = CLOCK_MONOTONIC;

long long Now() {
  timespec time;
  clock_gettime(clock_of_figures, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

void Check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "overhead_cc: %s\n", status.message);
  std::exit(1);
}

class Engine {
 public:
  Engine(const char* rpc_socket, const char* session_socket, uint32_t pages) : table_(pages + 1) {
    const std::vector<ashlar::engine::Layer> layers(
        kLayers, {.kv_heads = kHeads, .key_dim = kDim, .value_dim = kDim, .dtype = ashlar::DType::kBF16});
    ashlar::engine::OpenOptions options{.rpc_socket = rpc_socket, .session_socket = session_socket, .name = "overhead"};
    options.model = {.model_id = "overhead",
                     .weights_digest = "1",
                     .page_tokens = kPageTokens,
                     .layers = layers.data(),
                     .layer_count = kLayers};
    options.memory.pages = pages + 1;
    Check(Cache::Open(options, &cache_));
    for (uint32_t i = 0; i <= pages; ++i) table_[i] = static_cast<int32_t>(i);
  }

  long long Publish(uint64_t seed, uint64_t pages) {
    Prompt prompt = Text(seed, pages);
    prompt.fill = true;
    Request request;
    Check(cache_.Begin(&prompt, 1, &request));
    uint32_t missing = 0;
    request.missing(&missing);
    if (missing != 1) std::exit(2);
    uint8_t outcome = 0;
    const long long begun = Now();
    Check(request.Publish(0, {.page_table = table_.data(), .page_count = table_.size()}, &outcome));
    const long long took = Now() - begun;
    if (outcome != 1) std::exit(3);
    return took;
  }

  long long Land(uint64_t seed, uint64_t pages) {
    const Prompt prompt = Text(seed, pages);
    const long long begun = Now();
    {
      Request request;
      Check(cache_.Begin(&prompt, 1, &request));
      Check(request.Finish());
      if (request.plan().cached_tokens != pages * kPageTokens) std::exit(4);
    }
    return Now() - begun;
  }

  long long Look(uint64_t seed, uint64_t pages) {
    Prompt prompt = Text(seed, pages);
    prompt.page_table = nullptr;
    prompt.page_count = 0;
    const long long begun = Now();
    {
      Request request;
      Check(cache_.Begin(&prompt, 1, &request));
      if (request.plan().cached_tokens != pages * kPageTokens) std::exit(5);
    }
    return Now() - begun;
  }

 private:
  // The text as a prompt's first segment, and one token after it.
  Prompt Text(uint64_t seed, uint64_t pages) {
    length_ = pages * kPageTokens;
    tokens_.resize(length_ + 1);
    for (uint64_t i = 0; i <= length_; ++i) tokens_[i] = static_cast<int32_t>((seed * 1'000'003 + i) & 0x7fffffff);
    return {.tokens = tokens_.data(),
            .token_count = tokens_.size(),
            .segment_lengths = &length_,
            .segment_count = 1,
            .page_table = table_.data(),
            .page_count = pages + 1};
  }

  Cache cache_;
  std::vector<int32_t> table_, tokens_;
  uint64_t length_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 64;
  if (std::string(argv[4]) == "thread") clock_of_figures = CLOCK_THREAD_CPUTIME_ID;
  Engine engine(argv[1], argv[2], static_cast<uint32_t>(std::stoul(argv[3])));
  for (std::string verb; std::cin >> verb;) {
    uint64_t seed = 0, pages = 0, count = 1;
    std::cin >> seed >> pages;
    if (verb != "publish") std::cin >> count;
    for (uint64_t i = 0; i < count; ++i) {
      std::cout << (verb == "publish" ? engine.Publish(seed, pages)
                    : verb == "land"  ? engine.Land(seed, pages)
                                      : engine.Look(seed, pages))
                << ' ';
    }
    std::cout << std::endl;
  }
}
