// SPDX-License-Identifier: Apache-2.0
/* Pages that are given by groups of layers. */
#include "client/c/testing/engine.h"

/* Two attention layers whose pages two tables name; stored without a lookup, then landed in other pages. */
void groups(char** sockets) {
  enum { NARROW = 2, LAYERS = 3, TEXT = 100, NARROW_TOKENS = 8, NARROW_PAGES = 200 };
  static const float decays[HEADS] = {-0.3f, -0.01f};
  static const uint32_t wide[1] = {ATTENTION}, narrow[1] = {NARROW};
  static int32_t tokens[TEXT + 1], pages[LAYERS][NARROW_PAGES];
  static float numbers[HEADS * DIM * DIM];
  const uint64_t length = TEXT;
  ashlar_layer layers[LAYERS] = {ASHLAR_INIT(ashlar_layer), ASHLAR_INIT(ashlar_layer), ASHLAR_INIT(ashlar_layer)};
  ashlar_layer_group group[2] = {ASHLAR_INIT(ashlar_layer_group), ASHLAR_INIT(ashlar_layer_group)};
  ashlar_model model = ASHLAR_INIT(ashlar_model);
  ashlar_memory memory = ASHLAR_INIT(ashlar_memory);
  ashlar_open_options options = ASHLAR_INIT(ashlar_open_options);
  ashlar_page_place place[2] = {ASHLAR_INIT(ashlar_page_place), ASHLAR_INIT(ashlar_page_place)};
  ashlar_page_table tables[2];
  ashlar_prompt prompt = ASHLAR_INIT(ashlar_prompt);
  ashlar_segment segment = ASHLAR_INIT(ashlar_segment);
  ashlar_linear_tensors tensors = ASHLAR_INIT(ashlar_linear_tensors);
  ashlar_computed_run computed = ASHLAR_INIT(ashlar_computed_run);
  ashlar_cache* cache = NULL;
  ashlar_request* request = NULL;
  uint8_t outcome = 0;
  int32_t back[8];
  int i, round;
  layers[LINEAR].kind = ASHLAR_LINEAR;
  layers[LINEAR].family = ASHLAR_RETNET;
  layers[LINEAR].key_heads = layers[LINEAR].value_heads = HEADS;
  layers[LINEAR].d_k = layers[LINEAR].d_v = DIM;
  layers[LINEAR].decay_table = decays;
  for (i = ATTENTION; i < LAYERS; ++i) {
    layers[i].kind = ASHLAR_GQA;
    layers[i].kv_heads = 1;
    layers[i].key_dim = layers[i].value_dim = DIM;
  }
  model.model_id = "groups-c";
  model.weights_digest = "1";
  model.page_tokens = PAGE_TOKENS;
  model.head = model.tail = 4;
  model.layers = layers;
  model.layer_count = LAYERS;
  group[0].layers = wide;
  group[1].layers = narrow;
  group[0].layer_count = group[1].layer_count = 1;
  group[1].page_tokens = NARROW_TOKENS;
  group[1].pages = NARROW_PAGES;
  memory.kind = ASHLAR_MEMORY_HOSTED;
  memory.pages = PAGES;
  memory.groups = group;
  memory.group_count = 2;
  options.rpc_socket = sockets[0];
  options.session_socket = sockets[1];
  options.model = &model;
  options.memory = &memory;
  group[1].layers = wide;
  REQUIRE(ashlar_open(&options, &cache) == ASHLAR_INVALID_ARGUMENT);
  REQUIRE(strncmp(ashlar_error_message(), "memory.groups[1].layers[0]: ", 28) == 0);
  group[1].layers = narrow;
  REQUIRE(ashlar_open(&options, &cache) == ASHLAR_OK);
  for (i = 0; i < 2; ++i) REQUIRE(ashlar_place(cache, (uint32_t)i, &place[i]) == ASHLAR_OK);
  for (i = 0; i < NARROW_PAGES; ++i) {
    pages[0][i] = PAGES - 1 - i % PAGES;
    pages[1][i] = NARROW_PAGES - 1 - i;
  }
  for (i = 0; i <= TEXT; ++i) tokens[i] = 1000 + i;
  prompt.tokens = tokens;
  prompt.token_count = TEXT + 1;
  prompt.segment_lengths = &length;
  prompt.segment_count = 1;
  tensors.layer = LINEAR;
  tensors.state = numbers;
  computed.linear = &tensors;
  computed.linear_count = 1;
  computed.page_tables = prompt.page_tables = tables;
  for (round = 0; round < 2; ++round) { /* stores from the tables' ends, and lands at their begins */
    const int32_t* const of[2] = {pages[0] + (round == 0 ? 60 : 0), pages[1] + (round == 0 ? 90 : 0)};
    const int token_count[2] = {PAGE_TOKENS, NARROW_TOKENS};
    int g, p;
    for (g = 0; g < 2; ++g) {
      tables[g].pages = of[g];
      tables[g].count = (uint64_t)(TEXT / token_count[g] + 1);
    }
    prompt.fill = prompt.store_only = round == 0;
    prompt.page_table_count = 1;
    REQUIRE(ashlar_begin(cache, &prompt, 1, &request) == ASHLAR_INVALID_ARGUMENT);
    REQUIRE(strncmp(ashlar_error_message(), "prompts[0].page_table_count: ", 29) == 0);
    prompt.page_table_count = 2;
    REQUIRE(ashlar_begin(cache, &prompt, 1, &request) == ASHLAR_OK);
    for (g = 0; g < 2; ++g) {
      for (p = 0; p < TEXT; ++p) {
        uint8_t* const at = ashlar_data(cache) + (uint64_t)of[g][p / token_count[g]] * place[g].page_stride +
                            (uint64_t)(p % token_count[g]) * place[g].token_stride;
        float* const key = (float*)(void*)(at + place[g].key_offset);
        if (round == 0) *key = (float)(p + 1000 * g);
        if (round == 1 && p == 0) REQUIRE(ashlar_request_finish(request) == ASHLAR_OK);
        if (round == 1) REQUIRE(*key == (float)(p + 1000 * g));
      }
    }
    if (round == 0) {
      REQUIRE(ashlar_request_missing_count(request) == 1);
      REQUIRE(ashlar_request_publish(request, 0, &computed, &outcome) == ASHLAR_INVALID_ARGUMENT);
      REQUIRE(strncmp(ashlar_error_message(), "computed.page_tables: null", 26) == 0);
      computed.page_table_count = 2;
      REQUIRE(ashlar_request_publish(request, 0, &computed, &outcome) == ASHLAR_OK);
      REQUIRE(strcmp(ashlar_publish_name(outcome), "published") == 0);
    } else {
      REQUIRE(ashlar_request_segment(request, 0, &segment) == ASHLAR_OK);
      REQUIRE(segment.used == 1);
    }
    REQUIRE(ashlar_request_look_again_groups(request, tables, 1) != ASHLAR_OK);
    ashlar_request_end(request);
    request = NULL;
    for (g = 0; g < 2; ++g) REQUIRE(ashlar_take_quiesced_pages_of(cache, (uint32_t)g, back, 8, 0) == 0);
  }
  /* Pages of a request that ends unfinished come back by group. */
  REQUIRE(ashlar_begin(cache, &prompt, 1, &request) == ASHLAR_OK);
  ashlar_request_end(request);
  REQUIRE(ashlar_take_quiesced_pages_of(cache, 0, back, 8, 20000) == TEXT / PAGE_TOKENS + 1);
  REQUIRE(ashlar_take_quiesced_pages_of(cache, 1, back, 8, 20000) == 8);
  REQUIRE(ashlar_take_quiesced_pages_of(cache, 1, back, 8, 0) == TEXT / NARROW_TOKENS + 1 - 8);
  REQUIRE(ashlar_take_quiesced_pages_of(cache, 2, back, 8, 0) == 0);
  ashlar_close(cache);
}
