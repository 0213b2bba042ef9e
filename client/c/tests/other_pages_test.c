// SPDX-License-Identifier: Apache-2.0
/* A prompt whose pages the daemon still writes to when it has begun: the request comes, and goes on in others. */
#include "client/c/testing/engine.h"

enum {
  LONG_SEGMENTS = 8, /* each of 4 MiB, which do not land in a millisecond */
  LONG_TOKENS = 512,
  TEXT = LONG_SEGMENTS * LONG_TOKENS,
  TEXT_PAGES = TEXT / PAGE_TOKENS + 1,
  ROUNDS = 50
};

static ashlar_cache* open_slow(char** sockets) {
  ashlar_layer layer = ASHLAR_INIT(ashlar_layer);
  ashlar_model model = ASHLAR_INIT(ashlar_model);
  ashlar_memory memory = ASHLAR_INIT(ashlar_memory);
  ashlar_open_options options = ASHLAR_INIT(ashlar_open_options);
  ashlar_cache* cache = NULL;
  layer.kind = ASHLAR_GQA;
  layer.kv_heads = 8;
  layer.key_dim = layer.value_dim = 128;
  model.model_id = "other-pages-c";
  model.weights_digest = "1";
  model.page_tokens = PAGE_TOKENS;
  model.layers = &layer;
  model.layer_count = 1;
  memory.kind = ASHLAR_MEMORY_HOSTED;
  memory.pages = 2 * TEXT_PAGES;
  options.rpc_socket = sockets[0];
  options.session_socket = sockets[1];
  options.model = &model;
  options.memory = &memory;
  options.land_ms = 1;
  REQUIRE(ashlar_open(&options, &cache) == ASHLAR_OK);
  return cache;
}

/* Publishes all that is missed but the text's last segment, which stays a miss in every round. */
static void fill(ashlar_request* request, const int32_t* table) {
  const uint32_t count = ashlar_request_missing_count(request);
  uint32_t i;
  for (i = 0; i < count; ++i) {
    ashlar_computed_run computed = ASHLAR_INIT(ashlar_computed_run);
    ashlar_run run = ASHLAR_INIT(ashlar_run);
    computed.page_table = table;
    computed.page_count = TEXT_PAGES;
    REQUIRE(ashlar_request_missing(request, i, &run) == ASHLAR_OK);
    if (run.segment == LONG_SEGMENTS) continue;
    REQUIRE(ashlar_request_publish(request, i, &computed, NULL) == ASHLAR_OK);
  }
}

void other_pages(char** sockets) {
  static int32_t tokens[TEXT + 10], table[2 * TEXT_PAGES], quiesced[2 * TEXT_PAGES];
  uint64_t lengths[LONG_SEGMENTS + 1], back = 0;
  ashlar_cache* const cache = open_slow(sockets);
  ashlar_prompt prompt = ASHLAR_INIT(ashlar_prompt);
  ashlar_request* request = NULL;
  int32_t code = ASHLAR_OK, i, round;
  for (i = 0; i < 2 * TEXT_PAGES; ++i) table[i] = i;
  for (i = 0; i < LONG_SEGMENTS; ++i) lengths[i] = LONG_TOKENS;
  lengths[LONG_SEGMENTS] = 8;
  for (i = 0; i < TEXT; ++i) tokens[i] = i % 1009;
  prompt.tokens = tokens;
  prompt.token_count = TEXT + 10;
  prompt.segment_lengths = lengths;
  prompt.segment_count = LONG_SEGMENTS + 1;
  prompt.page_table = table;
  prompt.page_count = TEXT_PAGES;
  prompt.fill = 1;
  for (round = 0; code == ASHLAR_OK && round < ROUNDS; ++round) {
    for (i = TEXT; i < TEXT + 10; ++i) tokens[i] = 2000 + round * 10 + i - TEXT;
    request = NULL;
    code = ashlar_begin(cache, &prompt, 1, &request);
    if (code != ASHLAR_OK) break;
    fill(request, table);
    ashlar_request_end(request);
    while (ashlar_take_quiesced_pages(cache, quiesced, 2 * TEXT_PAGES, 100) > 0) continue;
  }
  REQUIRE(code == ASHLAR_OTHER_PAGES);
  REQUIRE(request != NULL);
  REQUIRE(ashlar_request_pages_kept(request) == 1);
  REQUIRE(ashlar_request_missing_count(request) > 0);
  REQUIRE(ashlar_request_look_again(request, table + TEXT_PAGES, TEXT_PAGES) == ASHLAR_OK);
  code = ashlar_request_finish(request);
  REQUIRE(code == ASHLAR_OK || code == ASHLAR_RESTART);
  ashlar_request_end(request);
  while (back < TEXT_PAGES) { /* those that it was begun with */
    const uint64_t more = ashlar_take_quiesced_pages(cache, quiesced, 2 * TEXT_PAGES, 20000);
    REQUIRE(more > 0);
    back += more;
  }
  ashlar_close(cache);
}
