// SPDX-License-Identifier: Apache-2.0
/* The shortest complete engine, in C: one linear and one attention layer, prompts set from cached segments, greedy
 * decoding. All that it knows of the cache is ashlar.h. usage: shortest_c RPC-SOCKET SESSION-SOCKET [ROUNDS] */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ashlar.h"

enum { HEADS = 2, DIM = 16, WIDTH = HEADS * DIM, PAGE_TOKENS = 16, PAGES = 64, LINEAR = 0, ATTENTION = 1, MOST = 1024 };

static ashlar_cache* cache;
static ashlar_page_place place = ASHLAR_INIT(ashlar_page_place); /* of the attention layer */
static int32_t table[PAGES];                                     /* one prompt at a time has all pages */
static float rows[MOST][WIDTH], out[MOST][WIDTH];                /* of the tokens being computed */
static uint64_t positions[MOST], computed;
static float state[HEADS * DIM * DIM];

static int32_t check(int32_t code) {
  if (code == ASHLAR_OK || code == ASHLAR_RESTART) return code;
  fprintf(stderr, "shortest: %s\n", ashlar_error_message());
  exit(1);
}

static float weight(int32_t token, int i) {
  return 0.3f * (float)sin(1.7 * (token + 1) * (i + 3));
}

static void embed(const int32_t* tokens, uint64_t begin, uint64_t end) {
  uint64_t p;
  int i;
  for (p = begin; p < end; ++p) {
    for (i = 0; i < WIDTH; ++i) rows[computed][i] = weight(tokens[p], i);
    positions[computed++] = p;
  }
}

static void add_out(void) {
  uint64_t t;
  int i;
  for (t = 0; t < computed; ++t) {
    for (i = 0; i < WIDTH; ++i) rows[t][i] += out[t][i];
  }
}

static float* slot(uint64_t position, uint64_t offset) {
  const uint64_t page = (uint64_t)table[position / PAGE_TOKENS];
  offset += page * place.page_stride + position % PAGE_TOKENS * place.token_stride;
  return (float*)(void*)(ashlar_data(cache) + offset);
}

/* The attention layer: a row is its own key and value, and sees all positions up to its own. */
static void attend(void) {
  uint64_t t, p;
  int h, i;
  for (t = 0; t < computed; ++t) {
    for (h = 0; h < WIDTH; h += DIM) {
      float sum = 0, seen[DIM] = {0};
      memcpy(slot(positions[t], place.key_offset) + h, &rows[t][h], sizeof seen);
      memcpy(slot(positions[t], place.value_offset) + h, &rows[t][h], sizeof seen);
      for (p = 0; p <= positions[t]; ++p) {
        const float *const key = slot(p, place.key_offset) + h, *const value = slot(p, place.value_offset) + h;
        float score = 0;
        for (i = 0; i < DIM; ++i) score += key[i] * rows[t][h + i];
        score = (float)exp(score);
        sum += score;
        for (i = 0; i < DIM; ++i) seen[i] += score * value[i];
      }
      for (i = 0; i < DIM; ++i) rows[t][h + i] += seen[i] / sum;
    }
  }
}

static ashlar_token_rows inputs(void) {
  ashlar_token_rows in = ASHLAR_INIT(ashlar_token_rows);
  in.tokens = computed;
  in.q = in.k = in.v = rows[0];
  in.q_stride = in.k_stride = in.v_stride = WIDTH;
  return in;
}

/* The linear layer: cached interiors are composed, and rows run between them. 0: the plan has changed. */
static int advance(ashlar_request* request, uint64_t begin, uint64_t end) {
  const ashlar_token_rows in = inputs();
  ashlar_state running = ASHLAR_INIT(ashlar_state);
  ashlar_layer_advance layer = ASHLAR_INIT(ashlar_layer_advance);
  running.data = state;
  layer.layer = LINEAR;
  layer.begin = begin;
  layer.end = end;
  layer.inputs = &in;
  layer.state = &running;
  layer.out = out[0];
  layer.out_stride = WIDTH;
  if (check(ashlar_request_advance(request, &layer)) != ASHLAR_OK) return 0;
  add_out();
  return 1;
}

/* Computes a segment alone, from a zero state at position 0, in pages that nothing lands in meanwhile. */
static void publish(ashlar_request* request, uint32_t missing) {
  float transition[HEADS];
  ashlar_run run = ASHLAR_INIT(ashlar_run);
  ashlar_state alone = ASHLAR_INIT(ashlar_state);
  ashlar_alone_layer layer = ASHLAR_INIT(ashlar_alone_layer);
  ashlar_linear_tensors tensors = ASHLAR_INIT(ashlar_linear_tensors);
  ashlar_computed_run done = ASHLAR_INIT(ashlar_computed_run);
  ashlar_token_rows in;
  check(ashlar_request_missing(request, missing, &run));
  computed = 0;
  embed(run.tokens, 0, run.token_count);
  in = inputs();
  alone.data = state;
  layer.layer = LINEAR;
  layer.inputs = &in;
  layer.out = out[0];
  layer.out_stride = WIDTH;
  layer.missing = missing;
  layer.state = &alone;
  layer.transition = transition;
  check(ashlar_compute_alone(cache, request, &layer));
  add_out();
  attend();
  tensors.layer = LINEAR;
  tensors.state = state;
  tensors.transition = transition;
  done.linear = &tensors;
  done.linear_count = 1;
  done.page_table = table;
  done.page_count = PAGES;
  check(ashlar_request_publish(request, missing, &done, NULL));
}

static int32_t best_token(void) {
  int32_t token, best = 'a';
  float most = -1e30f;
  for (token = 'a'; token <= 'z'; ++token) {
    float logit = 0;
    int i;
    for (i = 0; i < WIDTH; ++i) logit += rows[computed - 1][i] * weight(token, i);
    if (logit > most) most = logit, best = token;
  }
  return best;
}

/* Runs the plan until the cache's verdict is good. Returns how many tokens came from the cache. */
static uint64_t set_prompt(ashlar_request* request, const int32_t* tokens, uint64_t count) {
  ashlar_plan plan = ASHLAR_INIT(ashlar_plan);
  uint32_t i;
  do { /* once; again, where something that was found did not land */
    computed = 0;
    memset(state, 0, sizeof state);
    check(ashlar_request_plan(request, &plan));
    for (i = 0; i < plan.step_count; ++i) {
      ashlar_step step = ASHLAR_INIT(ashlar_step);
      check(ashlar_request_step(request, i, &step));
      if (step.kind == ASHLAR_STEP_COMPUTE) embed(tokens, step.begin, step.end);
    }
    if (advance(request, 0, count) && check(ashlar_request_wait_layer(request, ATTENTION)) == ASHLAR_OK) attend();
  } while (check(ashlar_request_finish(request)) != ASHLAR_OK);
  return plan.cached_tokens;
}

/* Computes a prompt whose segments end with a period, and decodes. */
static void serve(const char* text, int decode) {
  static const int32_t separator = '.'; /* a token is a character */
  static int32_t tokens[MOST];
  uint64_t lengths[8], segments, count = 0, cached;
  ashlar_prompt prompt = ASHLAR_INIT(ashlar_prompt);
  ashlar_request* request = NULL;
  uint32_t missing, i;
  int s;
  while (*text != '\0') tokens[count++] = *text++;
  check(ashlar_segment_lengths(tokens, count, &separator, 1, 0, lengths, 8, &segments));
  prompt.tokens = tokens;
  prompt.token_count = count;
  prompt.segment_lengths = lengths;
  prompt.segment_count = segments;
  prompt.page_table = table;
  prompt.page_count = PAGES;
  prompt.fill = 1;
  check(ashlar_begin(cache, &prompt, 1, &request));
  missing = ashlar_request_missing_count(request);
  for (i = 0; i < missing; ++i) publish(request, i);
  if (missing > 0) check(ashlar_request_look_again(request, table, PAGES));
  cached = set_prompt(request, tokens, count);
  printf("%d of %d segments hit, %d of %d tokens from the cache: ", (int)(segments - missing), (int)segments,
         (int)cached, (int)count);
  for (s = 0; s < decode; ++s) {
    tokens[count] = best_token();
    putchar(tokens[count]);
    computed = 0;
    embed(tokens, count, count + 1);
    advance(request, count, count + 1);
    attend();
    ++count;
  }
  putchar('\n');
  fflush(stdout);
  ashlar_request_end(request);
}

static void open_cache(const char* rpc_socket, const char* session_socket) {
  static const float decays[HEADS] = {-0.3f, -0.01f}; /* of the linear layer's heads, logarithms a token */
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
  model.model_id = "shortest-c";
  model.weights_digest = "1";
  model.page_tokens = PAGE_TOKENS;
  model.head = model.tail = 4;
  model.layers = layers;
  model.layer_count = 2;
  memory.kind = ASHLAR_MEMORY_HOSTED;
  memory.pages = PAGES;
  options.rpc_socket = rpc_socket;
  options.session_socket = session_socket;
  options.model = &model;
  options.memory = &memory;
  check(ashlar_open(&options, &cache));
  check(ashlar_place(cache, 0, &place));
  for (i = 0; i < PAGES; ++i) table[i] = i;
}

#define RULES "Answer from these pages."
#define ARCH "An arch stands because every stone wants to fall."
#define STONE "Ashlar is cut to one face."
#define QUERY "Why does it stand?"

int main(int argc, char** argv) {
  int round, rounds = argc > 3 ? atoi(argv[3]) : 1;
  if (argc < 3) {
    fprintf(stderr, "usage: shortest_c RPC-SOCKET SESSION-SOCKET [ROUNDS]\n");
    return 2;
  }
  open_cache(argv[1], argv[2]);
  for (round = 0; round < rounds; ++round) {
    if (round > 0 && getchar() == EOF) break; /* a line of input for each further round */
    serve(RULES ARCH STONE QUERY, 12);
    serve(RULES STONE ARCH QUERY, 12);
  }
  ashlar_close(cache);
  return 0;
}
