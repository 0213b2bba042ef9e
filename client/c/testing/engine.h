// SPDX-License-Identifier: Apache-2.0
/* The engine of the tests of the C ABI, and those that lie in files of their own. */
#ifndef ASHLAR_C_TESTING_ENGINE_H
#define ASHLAR_C_TESTING_ENGINE_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/c/include/ashlar.h"

enum {
  HEADS = 2,
  DIM = 16,
  WIDTH = HEADS * DIM,
  PAGE_TOKENS = 16,
  PAGES = 128,
  PROMPT_PAGES = 64, /* the runs' pages are behind these */
  RUN_PAGES = 3,
  LINEAR = 0,
  ATTENTION = 1,
  SEGMENTS = 16,
  SEGMENT_TOKENS = 40,
  TOKENS = SEGMENTS * SEGMENT_TOKENS + 1
};

#define REQUIRE(holds)                                                                         \
  do {                                                                                         \
    if (!(holds)) {                                                                            \
      fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #holds, ashlar_error_message()); \
      exit(1);                                                                                 \
    }                                                                                          \
  } while (0)

typedef struct engine {
  ashlar_cache* cache;
  ashlar_page_place place;
  int32_t table[PAGES];
  float numbers[SEGMENTS][HEADS * DIM * DIM + HEADS]; /* states and transitions of the runs being published */
  ashlar_linear_tensors tensors[SEGMENTS];
} engine;

/* gpu_memory.c: fills it with memory of an emulated GPU. */
void take_gpu_memory(ashlar_memory* memory);

/* `started`: opened by a job. `shared`: requests share segments in place. */
static inline void open_engine_by(engine* self, char** sockets, uint32_t kind, uint32_t capture_tokens, int started,
                                  uint32_t shared) {
  static const float decays[HEADS] = {-0.3f, -0.01f};
  ashlar_layer layers[2] = {ASHLAR_INIT(ashlar_layer), ASHLAR_INIT(ashlar_layer)};
  ashlar_model model = ASHLAR_INIT(ashlar_model);
  ashlar_memory memory = ASHLAR_INIT(ashlar_memory);
  ashlar_open_options options = ASHLAR_INIT(ashlar_open_options);
  int32_t i;
  layers[LINEAR].kind = ASHLAR_LINEAR;
  layers[LINEAR].family = ASHLAR_RETNET;
  layers[LINEAR].key_heads = layers[LINEAR].value_heads = HEADS;
  layers[LINEAR].d_k = layers[LINEAR].d_v = DIM;
  layers[LINEAR].decay_table = decays;
  layers[ATTENTION].kind = ASHLAR_GQA;
  layers[ATTENTION].kv_heads = HEADS;
  layers[ATTENTION].key_dim = layers[ATTENTION].value_dim = DIM;
  model.model_id = "calls-c";
  model.weights_digest = "1";
  model.page_tokens = PAGE_TOKENS;
  model.head = model.tail = 4;
  model.layers = layers;
  model.layer_count = 2;
  memory.kind = kind;
  memory.pages = kind == ASHLAR_MEMORY_NONE ? 0 : PAGES;
  memory.share_in_place = shared;
  if (kind == ASHLAR_MEMORY_GPU) take_gpu_memory(&memory);
  options.rpc_socket = sockets[0];
  options.session_socket = sockets[1];
  options.model = &model;
  options.memory = &memory;
  options.capture_tokens = capture_tokens;
  options.timeout_ms = options.land_ms = 60000; /* a busy machine must not change the results */
  memset(self, 0, sizeof *self);
  if (started) {
    ashlar_job* job = NULL;
    REQUIRE(ashlar_start_open(&options, &self->cache, &job) == ASHLAR_OK);
    while (ashlar_job_poll(job) == ASHLAR_PENDING) continue;
    REQUIRE(ashlar_job_result(job) == ASHLAR_OK);
    ashlar_job_end(job);
  } else {
    REQUIRE(ashlar_open(&options, &self->cache) == ASHLAR_OK);
  }
  if (kind == ASHLAR_MEMORY_GPU) REQUIRE(ashlar_data(self->cache) == memory.gpu_data);
  for (i = 0; i < PAGES; ++i) self->table[i] = i;
  if (kind == ASHLAR_MEMORY_NONE) return;
  self->place.size = sizeof self->place;
  REQUIRE(ashlar_place(self->cache, 0, &self->place) == ASHLAR_OK);
}

static inline void open_engine(engine* self, char** sockets, uint32_t kind, uint32_t capture_tokens) {
  open_engine_by(self, sockets, kind, capture_tokens, 0, 0);
}

static inline float* row(engine* self, uint64_t position, uint64_t offset) {
  offset += (uint64_t)self->table[position / PAGE_TOKENS] * self->place.page_stride;
  return (float*)(void*)(ashlar_data(self->cache) + offset + position % PAGE_TOKENS * self->place.token_stride);
}

static inline void fill_rows(engine* self, uint64_t begin, uint64_t end, float number) {
  uint64_t p;
  int i;
  for (p = begin; p < end; ++p) {
    for (i = 0; i < WIDTH; ++i) {
      row(self, p, self->place.key_offset)[i] = row(self, p, self->place.value_offset)[i] = number;
    }
  }
}

/* "Computes" a run in pages of its own: all of its numbers are that of its first token. */
static inline ashlar_computed_run compute(engine* self, ashlar_request* request, uint32_t missing) {
  const uint32_t pages = PROMPT_PAGES + missing * RUN_PAGES;
  ashlar_run run = ASHLAR_INIT(ashlar_run);
  ashlar_computed_run done = ASHLAR_INIT(ashlar_computed_run);
  int i;
  REQUIRE(ashlar_request_missing(request, missing, &run) == ASHLAR_OK);
  for (i = 0; i < HEADS * DIM * DIM; ++i) self->numbers[missing][i] = (float)run.tokens[0];
  for (i = 0; i < HEADS; ++i) self->numbers[missing][HEADS * DIM * DIM + i] = -0.5f;
  fill_rows(self, (uint64_t)pages * PAGE_TOKENS, (uint64_t)pages * PAGE_TOKENS + run.token_count, (float)run.tokens[0]);
  self->tensors[missing].size = sizeof self->tensors[missing];
  self->tensors[missing].layer = LINEAR;
  self->tensors[missing].state = self->numbers[missing];
  self->tensors[missing].transition = self->numbers[missing] + HEADS * DIM * DIM;
  done.linear = &self->tensors[missing];
  done.linear_count = 1;
  done.page_table = self->table + pages;
  done.page_count = RUN_PAGES;
  return done;
}

/* "Computes" a text of `count` tokens in the first pages: its keys and values are `number`, and so is the state at its
   end. `checkpoint` is filled in, too. */
static inline ashlar_text computed_text(engine* self, const int32_t* tokens, uint64_t count, float number,
                                        ashlar_checkpoint* checkpoint, uint8_t* outcome) {
  ashlar_text text = ASHLAR_INIT(ashlar_text);
  int i;
  for (i = 0; i < HEADS * DIM * DIM; ++i) self->numbers[0][i] = number;
  fill_rows(self, 0, count, number);
  self->tensors[0].size = sizeof self->tensors[0];
  self->tensors[0].layer = LINEAR;
  self->tensors[0].state = self->numbers[0];
  checkpoint->size = sizeof *checkpoint;
  checkpoint->depth = count;
  checkpoint->linear = &self->tensors[0];
  checkpoint->linear_count = 1;
  text.tokens = tokens;
  text.token_count = text.prompt_tokens = count;
  text.checkpoints = checkpoint;
  text.checkpoint_count = 1;
  text.page_table = self->table;
  text.page_count = PAGES;
  text.outcomes = outcome;
  return text;
}

/* handoff_test.c */
void handoff(char** sockets, const char* node, const char* expected);
void resume(char** sockets);
/* groups_test.c */
void groups(char** sockets);
/* other_pages_test.c */
void other_pages(char** sockets);
/* numbers_test.c */
void numbers(char** sockets);
/* salt_test.c */
void salts(char** sockets);
/* in_place_test.c */
void in_place(char** sockets);

#endif
