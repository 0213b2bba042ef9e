// SPDX-License-Identifier: Apache-2.0
/* engine.cc in C, over ashlar.h. usage: overhead_c RPC-SOCKET SESSION-SOCKET PAGES wall|thread */
#define _POSIX_C_SOURCE 199309L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ashlar.h"

enum { LAYERS = 8, HEADS = 8, DIM = 128, PAGE_TOKENS = 32, MOST_PAGES = 1024 };

static ashlar_cache* cache;
static int32_t table[MOST_PAGES + 1], tokens[MOST_PAGES * PAGE_TOKENS + 1];
static uint64_t length;
static clockid_t clock_of_figures = CLOCK_MONOTONIC;

static void check(int32_t code) {
  if (code == ASHLAR_OK) return;
  fprintf(stderr, "overhead_c: %s\n", ashlar_error_message());
  exit(1);
}

static long long now(void) {
  struct timespec time;
  clock_gettime(clock_of_figures, &time);
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void open_cache(const char* rpc_socket, const char* session_socket, uint32_t pages) {
  ashlar_layer layers[LAYERS] = {ASHLAR_INIT(ashlar_layer)};
  ashlar_model model = ASHLAR_INIT(ashlar_model);
  ashlar_memory memory = ASHLAR_INIT(ashlar_memory);
  ashlar_open_options options = ASHLAR_INIT(ashlar_open_options);
  int i;
  for (i = 0; i < LAYERS; ++i) {
    layers[i].size = sizeof layers[i];
    layers[i].kind = ASHLAR_GQA;
    layers[i].kv_heads = HEADS;
    layers[i].key_dim = layers[i].value_dim = DIM;
    layers[i].dtype = ASHLAR_BF16;
  }
  model.model_id = "overhead";
  model.weights_digest = "1";
  model.page_tokens = PAGE_TOKENS;
  model.layers = layers;
  model.layer_count = LAYERS;
  memory.kind = ASHLAR_MEMORY_HOSTED;
  memory.pages = pages + 1;
  options.rpc_socket = rpc_socket;
  options.session_socket = session_socket;
  options.name = "overhead";
  options.model = &model;
  options.memory = &memory;
  check(ashlar_open(&options, &cache));
  for (i = 0; i <= (int)pages; ++i) table[i] = i;
}

static ashlar_prompt text(unsigned long long seed, uint64_t pages) {
  ashlar_prompt prompt = ASHLAR_INIT(ashlar_prompt);
  uint64_t i;
  length = pages * PAGE_TOKENS;
  for (i = 0; i <= length; ++i) tokens[i] = (int32_t)((seed * 1000003ULL + i) & 0x7fffffff);
  prompt.tokens = tokens;
  prompt.token_count = length + 1;
  prompt.segment_lengths = &length;
  prompt.segment_count = 1;
  prompt.page_table = table;
  prompt.page_count = pages + 1;
  return prompt;
}

static void check_plan(ashlar_request* request, uint64_t pages, int code) {
  ashlar_plan plan = ASHLAR_INIT(ashlar_plan);
  check(ashlar_request_plan(request, &plan));
  if (plan.cached_tokens != pages * PAGE_TOKENS) exit(code);
}

static long long publish(unsigned long long seed, uint64_t pages) {
  ashlar_prompt prompt = text(seed, pages);
  ashlar_computed_run run = ASHLAR_INIT(ashlar_computed_run);
  ashlar_request* request;
  uint8_t outcome = 0;
  long long begun, took;
  prompt.fill = 1;
  check(ashlar_begin(cache, &prompt, 1, &request));
  if (ashlar_request_missing_count(request) != 1) exit(2);
  run.page_table = table;
  run.page_count = pages + 1;
  begun = now();
  check(ashlar_request_publish(request, 0, &run, &outcome));
  took = now() - begun;
  if (outcome != 1) exit(3);
  ashlar_request_end(request);
  return took;
}

static long long land(unsigned long long seed, uint64_t pages) {
  const ashlar_prompt prompt = text(seed, pages);
  ashlar_request* request;
  const long long begun = now();
  check(ashlar_begin(cache, &prompt, 1, &request));
  check(ashlar_request_finish(request));
  check_plan(request, pages, 4);
  ashlar_request_end(request);
  return now() - begun;
}

static long long look(unsigned long long seed, uint64_t pages) {
  ashlar_prompt prompt = text(seed, pages);
  ashlar_request* request;
  long long begun;
  prompt.page_table = NULL;
  prompt.page_count = 0;
  begun = now();
  check(ashlar_begin(cache, &prompt, 1, &request));
  check_plan(request, pages, 5);
  ashlar_request_end(request);
  return now() - begun;
}

int main(int argc, char** argv) {
  char verb[16];
  unsigned long long seed, pages, count, i;
  if (argc != 5 || strtoul(argv[3], NULL, 10) > MOST_PAGES) return 64;
  if (strcmp(argv[4], "thread") == 0) clock_of_figures = CLOCK_THREAD_CPUTIME_ID;
  open_cache(argv[1], argv[2], (uint32_t)strtoul(argv[3], NULL, 10));
  while (scanf("%15s %llu %llu", verb, &seed, &pages) == 3) {
    count = 1;
    if (strcmp(verb, "publish") != 0 && scanf("%llu", &count) != 1) return 64;
    for (i = 0; i < count; ++i) {
      printf("%lld ", strcmp(verb, "publish") == 0 ? publish(seed, pages)
                      : strcmp(verb, "land") == 0  ? land(seed, pages)
                                                   : look(seed, pages));
    }
    printf("\n");
    fflush(stdout);
  }
  ashlar_close(cache);
  return 0;
}
