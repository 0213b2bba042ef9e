// SPDX-License-Identifier: Apache-2.0
/* Numbers that are left out, and such as do not fit. */
#include "client/c/testing/engine.h"

/* What the library reads in fewer bits than the struct has. */
static void refuse_enumerations(char** sockets) {
  static const char* const names[] = {
      "model.layers[0].kind",
      "model.layers[0].family",
      "model.layers[0].state_dtype",
      "model.layers[0].conv_dtype",
      "memory.kind",
      "span_dtype",
      "compose",
  };
  uint32_t i;
  for (i = 0; i < sizeof names / sizeof names[0]; ++i) {
    static const float decays[HEADS] = {-0.3f, -0.01f};
    ashlar_layer layer = ASHLAR_INIT(ashlar_layer);
    ashlar_model model = ASHLAR_INIT(ashlar_model);
    ashlar_memory memory = ASHLAR_INIT(ashlar_memory);
    ashlar_open_options options = ASHLAR_INIT(ashlar_open_options);
    ashlar_cache* cache = NULL;
    uint32_t* const fields[] = {&layer.kind,  &layer.family,       &layer.state_dtype, &layer.conv_dtype,
                                &memory.kind, &options.span_dtype, &options.compose};
    layer.kind = ASHLAR_LINEAR;
    layer.family = ASHLAR_RETNET;
    layer.key_heads = layer.value_heads = HEADS;
    layer.d_k = layer.d_v = DIM;
    layer.decay_table = decays;
    model.model_id = "numbers-c";
    model.weights_digest = "1";
    model.page_tokens = PAGE_TOKENS;
    model.layers = &layer;
    model.layer_count = 1;
    options.rpc_socket = sockets[0];
    options.session_socket = sockets[1];
    options.model = &model;
    options.memory = &memory;
    *fields[i] += 256;
    REQUIRE(ashlar_open(&options, &cache) == ASHLAR_INVALID_ARGUMENT);
    REQUIRE(strncmp(ashlar_error_message(), names[i], strlen(names[i])) == 0);
    REQUIRE(strstr(ashlar_error_message(), " is unknown") != NULL);
    REQUIRE(cache == NULL);
  }
}

void numbers(char** sockets) {
  static engine self;
  static int32_t tokens[TOKENS];
  static float rows[SEGMENT_TOKENS][WIDTH], states[2][HEADS * DIM * DIM], outs[2][SEGMENT_TOKENS][WIDTH];
  float transition[HEADS];
  uint64_t length = SEGMENT_TOKENS;
  ashlar_prompt prompt = ASHLAR_INIT(ashlar_prompt);
  ashlar_request* request = NULL;
  ashlar_computed_run run;
  int i, dense;
  refuse_enumerations(sockets);
  open_engine(&self, sockets, ASHLAR_MEMORY_HOSTED, 0);
  for (i = 0; i < TOKENS; ++i) tokens[i] = 7000 + i;
  for (i = 0; i < SEGMENT_TOKENS * WIDTH; ++i) rows[i / WIDTH][i % WIDTH] = (float)(i % 17) * 0.1f - 0.5f;
  prompt.tokens = tokens;
  prompt.token_count = SEGMENT_TOKENS + 1;
  prompt.segment_lengths = &length;
  prompt.segment_count = 1;
  prompt.page_table = self.table;
  prompt.page_count = PROMPT_PAGES;
  prompt.fill = 1;
  REQUIRE(ashlar_begin(self.cache, &prompt, 1, &request) == ASHLAR_OK);
  REQUIRE(ashlar_request_missing_count(request) == 1);
  /* Strides that are left out: rows lie one behind the other. */
  for (dense = 0; dense < 2; ++dense) {
    ashlar_token_rows inputs = ASHLAR_INIT(ashlar_token_rows);
    ashlar_state state = ASHLAR_INIT(ashlar_state);
    ashlar_alone_layer alone = ASHLAR_INIT(ashlar_alone_layer);
    inputs.tokens = SEGMENT_TOKENS;
    inputs.q = inputs.k = inputs.v = rows[0];
    if (!dense) inputs.q_stride = inputs.k_stride = inputs.v_stride = alone.out_stride = WIDTH;
    state.data = states[dense];
    alone.layer = LINEAR;
    alone.inputs = &inputs;
    alone.state = &state;
    alone.transition = transition;
    alone.out = outs[dense][0];
    REQUIRE(ashlar_compute_alone(self.cache, request, &alone) == ASHLAR_OK);
    inputs.k_stride = WIDTH - 1;
    REQUIRE(ashlar_compute_alone(self.cache, request, &alone) == ASHLAR_INVALID_ARGUMENT);
    REQUIRE(strncmp(ashlar_error_message(), "alone.inputs.k_stride: ", 23) == 0);
  }
  REQUIRE(memcmp(states[0], states[1], sizeof states[0]) == 0);
  REQUIRE(memcmp(outs[0], outs[1], sizeof outs[0]) == 0);
  REQUIRE(outs[0][SEGMENT_TOKENS - 1][WIDTH - 1] != 0);
  /* A distance whose bytes wrap to 0. */
  run = compute(&self, request, 0);
  self.tensors[0].state_head_stride = (int64_t)1 << 62;
  REQUIRE(ashlar_request_publish(request, 0, &run, NULL) == ASHLAR_INVALID_ARGUMENT);
  REQUIRE(strncmp(ashlar_error_message(), "computed.linear[0].state_head_stride: ", 38) == 0);
  ashlar_request_end(request);
  ashlar_close(self.cache);
}
