// SPDX-License-Identifier: Apache-2.0
/* Calls of the C ABI that the example does not make, against a real daemon.
 * usage: calls_c CALL RPC-SOCKET SESSION-SOCKET
 *        calls_c handoff RPC-SOCKET SESSION-SOCKET NODE OUTCOME
 * main() lists the calls. */
#define _POSIX_C_SOURCE 200809L /* nanosleep */
#include <pthread.h>
#include <time.h>

#include "client/c/testing/engine.h"

static ashlar_request* begin(engine* self, int32_t* tokens, int32_t first, uint32_t cold_parallel) {
  static uint64_t lengths[SEGMENTS];
  ashlar_prompt prompt = ASHLAR_INIT(ashlar_prompt);
  ashlar_request* request = NULL;
  int32_t i;
  for (i = 0; i < TOKENS; ++i) tokens[i] = first + i / SEGMENT_TOKENS;
  for (i = 0; i < SEGMENTS; ++i) lengths[i] = SEGMENT_TOKENS;
  prompt.tokens = tokens;
  prompt.token_count = TOKENS;
  prompt.segment_lengths = lengths;
  prompt.segment_count = SEGMENTS;
  prompt.page_table = self->table;
  prompt.page_count = PROMPT_PAGES;
  prompt.fill = 1;
  prompt.cold_parallel = cold_parallel;
  REQUIRE(ashlar_begin(self->cache, &prompt, 1, &request) == ASHLAR_OK);
  return request;
}

/* Looks again; all segments come from the cache, each with its own numbers. */
static void finish(engine* self, ashlar_request* request, int32_t first) {
  ashlar_segment segment = ASHLAR_INIT(ashlar_segment);
  uint32_t i;
  REQUIRE(ashlar_request_look_again(request, self->table, PROMPT_PAGES) == ASHLAR_OK);
  for (i = 0; i < SEGMENTS; ++i) {
    REQUIRE(ashlar_request_segment(request, i, &segment) == ASHLAR_OK);
    REQUIRE(segment.used == 1);
  }
  REQUIRE(ashlar_request_finish(request) == ASHLAR_OK);
  for (i = 0; i < SEGMENTS; ++i) {
    REQUIRE(*row(self, i * SEGMENT_TOKENS + 20, self->place.value_offset) == (float)(first + (int32_t)i));
  }
  ashlar_request_end(request);
}

/* Sixteen runs by one call, at once and by a job. */
static void publish_many(char** sockets, uint32_t kind) {
  static engine self;
  static int32_t tokens[TOKENS];
  ashlar_computed_run runs[SEGMENTS];
  uint32_t missing[SEGMENTS], i;
  uint8_t outcomes[SEGMENTS];
  int32_t round;
  open_engine(&self, sockets, kind, 0);
  for (round = 0; round < 2; ++round) {
    const int32_t first = 1 + 100 * round;
    ashlar_request* const request = begin(&self, tokens, first, 0);
    ashlar_job* job = NULL;
    REQUIRE(ashlar_request_missing_count(request) == SEGMENTS);
    REQUIRE(ashlar_request_segments_computed_elsewhere(request) == 0);
    for (i = 0; i < SEGMENTS; ++i) {
      missing[i] = SEGMENTS - 1 - i;
      runs[i] = compute(&self, request, missing[i]);
    }
    missing[3] = SEGMENTS;
    REQUIRE(ashlar_request_publish_many(request, missing, runs, SEGMENTS, outcomes) == ASHLAR_INVALID_ARGUMENT);
    REQUIRE(strncmp(ashlar_error_message(), "missing[3]: ", 12) == 0);
    missing[3] = SEGMENTS - 4;
    runs[5].size = 0;
    REQUIRE(ashlar_request_publish_many(request, missing, runs, SEGMENTS, outcomes) == ASHLAR_INVALID_ARGUMENT);
    REQUIRE(strncmp(ashlar_error_message(), "computed[5].size: ", 18) == 0);
    runs[5].size = sizeof runs[5];
    if (round == 0) {
      REQUIRE(ashlar_request_publish_many(request, missing, runs, SEGMENTS, outcomes) == ASHLAR_OK);
    } else {
      REQUIRE(ashlar_request_start_publish_many(request, missing, runs, SEGMENTS, outcomes, &job) == ASHLAR_OK);
      REQUIRE(ashlar_job_wait(job) == ASHLAR_OK);
      ashlar_job_end(job);
    }
    for (i = 0; i < SEGMENTS; ++i) REQUIRE(strcmp(ashlar_publish_name(outcomes[i]), "published") == 0);
    finish(&self, request, first);
  }
  ashlar_close(self.cache);
}

/* A worker lands a prefix's plan in pages that have a block of it already. */
static void land_beside_present(char** sockets, uint32_t kind) {
  enum { TEXT = 592, PRESENT = 300, BLOCK = 256 };
  static engine worker, scheduler;
  static int32_t tokens[TEXT + 8];
  static uint8_t bytes[1 << 16];
  ashlar_text text;
  ashlar_checkpoint checkpoint = ASHLAR_INIT(ashlar_checkpoint);
  ashlar_prompt prompt = ASHLAR_INIT(ashlar_prompt);
  ashlar_plan plan = ASHLAR_INIT(ashlar_plan);
  ashlar_plan_to_land landing = ASHLAR_INIT(ashlar_plan_to_land);
  ashlar_request *begun = NULL, *landed = NULL;
  uint8_t outcome = 0;
  uint64_t p;
  int i;
  open_engine(&worker, sockets, kind, PAGE_TOKENS);
  open_engine(&scheduler, sockets, ASHLAR_MEMORY_NONE, PAGE_TOKENS);
  for (i = 0; i < TEXT + 8; ++i) tokens[i] = i % 256;
  text = computed_text(&worker, tokens, TEXT, 3, &checkpoint, &outcome);
  REQUIRE(ashlar_commit(worker.cache, &text, 1) == ASHLAR_OK);
  REQUIRE(strcmp(ashlar_commit_name(outcome), "kept") == 0);
  prompt.tokens = tokens;
  prompt.token_count = TEXT + 8;
  REQUIRE(ashlar_begin(scheduler.cache, &prompt, 1, &begun) == ASHLAR_OK);
  REQUIRE(ashlar_request_plan(begun, &plan) == ASHLAR_OK);
  REQUIRE(plan.prefix_tokens == TEXT);
  REQUIRE(strcmp(ashlar_tier_name(plan.prefix_tier), "dram") == 0);
  REQUIRE(plan.prefix_span_tokens == 0);
  landing.plan_bytes = ashlar_request_plan_bytes(begun, bytes, sizeof bytes);
  REQUIRE(landing.plan_bytes > 0 && landing.plan_bytes <= sizeof bytes);
  landing.plan = bytes;
  landing.page_table = worker.table;
  landing.page_count = PAGES;
  landing.present_tokens = TEXT + 9;
  REQUIRE(ashlar_land(worker.cache, &landing, 1, &landed) == ASHLAR_INVALID_ARGUMENT);
  REQUIRE(strstr(ashlar_error_message(), "plans[0].present_tokens: ") == ashlar_error_message());
  fill_rows(&worker, 0, TEXT + 8, -1);
  landing.present_tokens = PRESENT;
  REQUIRE(ashlar_land(worker.cache, &landing, 1, &landed) == ASHLAR_OK);
  REQUIRE(ashlar_request_finish(landed) == ASHLAR_OK);
  for (p = 0; p < TEXT; ++p) REQUIRE(*row(&worker, p, worker.place.key_offset) == (p < BLOCK ? -1 : 3));
  /* A plan of an older header, which ends before present_tokens, lands all of it. */
  landing.size = offsetof(ashlar_plan_to_land, present_tokens);
  ashlar_request_end(landed);
  REQUIRE(ashlar_land(worker.cache, &landing, 1, &landed) == ASHLAR_OK);
  REQUIRE(ashlar_request_finish(landed) == ASHLAR_OK);
  REQUIRE(*row(&worker, 0, worker.place.key_offset) == 3);
  ashlar_request_end(landed);
  ashlar_request_end(begun);
  ashlar_close(scheduler.cache);
  ashlar_close(worker.cache);
}

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int stop, served; /* guarded by mutex */

static void* serve(void* context) {
  engine* const self = context;
  for (;;) {
    ashlar_request* work = NULL;
    const int32_t code = ashlar_serve_prefill(self->cache, 100, &work);
    REQUIRE(code == ASHLAR_OK || code == ASHLAR_PENDING);
    REQUIRE((work != NULL) == (code == ASHLAR_OK));
    pthread_mutex_lock(&mutex);
    if (code == ASHLAR_OK) ++served;
    if (stop && code != ASHLAR_OK) {
      pthread_mutex_unlock(&mutex);
      return NULL;
    }
    pthread_mutex_unlock(&mutex);
    if (code != ASHLAR_OK) continue;
    REQUIRE(ashlar_request_missing_count(work) == 1);
    {
      const ashlar_computed_run run = compute(self, work, 0);
      REQUIRE(ashlar_request_publish(work, 0, &run, NULL) == ASHLAR_OK);
    }
    ashlar_request_end(work);
  }
}

/* Waits 5 ms for the other engine to reach the daemon; fails after 60 s (`begun`: time of the first call). */
static void wait_for_the_other_engine(time_t begun) {
  const struct timespec pause = {0, 5000000};
  REQUIRE(time(NULL) - begun < 60);
  nanosleep(&pause, NULL);
}

/* Another engine computes a part of a cold prompt. */
static void share_a_cold_prompt(char** sockets) {
  static engine asking, serving;
  static int32_t tokens[TOKENS];
  pthread_t thread;
  uint32_t elsewhere = 0, filled, i;
  int32_t first;
  const time_t begun = time(NULL);
  REQUIRE(ashlar_serve_prefill(NULL, 0, NULL) == ASHLAR_INVALID_ARGUMENT);
  open_engine(&asking, sockets, ASHLAR_MEMORY_HOSTED, 0);
  open_engine(&serving, sockets, ASHLAR_MEMORY_HOSTED, 0);
  REQUIRE(pthread_create(&thread, NULL, serve, &serving) == 0);
  /* Repeats until a plan has found the other engine waiting. The texts differ from those of the other tests. */
  for (first = 1000000; elsewhere == 0; first += SEGMENTS) {
    ashlar_request* const request = begin(&asking, tokens, first, 1);
    int32_t code = ASHLAR_RESTART;
    elsewhere = ashlar_request_segments_computed_elsewhere(request);
    REQUIRE(ashlar_request_missing_count(request) + elsewhere == SEGMENTS);
    for (filled = 0; code == ASHLAR_RESTART;) {
      for (i = ashlar_request_missing_count(request); filled < i; ++filled) {
        const ashlar_computed_run run = compute(&asking, request, filled);
        REQUIRE(ashlar_request_publish(request, filled, &run, NULL) == ASHLAR_OK);
      }
      code = ashlar_request_wait_cold(request, 30000);
    }
    REQUIRE(code == ASHLAR_OK);
    finish(&asking, request, first);
    if (elsewhere == 0) wait_for_the_other_engine(begun);
  }
  pthread_mutex_lock(&mutex);
  stop = 1;
  pthread_mutex_unlock(&mutex);
  REQUIRE(pthread_join(thread, NULL) == 0);
  REQUIRE(served > 0);
  ashlar_close(serving.cache);
  ashlar_close(asking.cache);
}

/* The same in one thread, by jobs alone; so are both caches opened. */
static void share_a_cold_prompt_by_jobs(char** sockets) {
  static engine asking, serving;
  static int32_t tokens[TOKENS];
  ashlar_job *serves = NULL, *waits = NULL, *opens = NULL;
  ashlar_request *work = NULL, *request = NULL;
  ashlar_cache* none = NULL;
  uint32_t elsewhere, taken = 0, i;
  int32_t first, code;
  const time_t begun = time(NULL);
  REQUIRE(ashlar_start_open(NULL, &none, &opens) == ASHLAR_INVALID_ARGUMENT);
  REQUIRE(none == NULL && opens == NULL);
  open_engine_by(&asking, sockets, ASHLAR_MEMORY_HOSTED, 0, 1, 0);
  open_engine_by(&serving, sockets, ASHLAR_MEMORY_HOSTED, 0, 1, 0);
  REQUIRE(ashlar_start_serve_prefill(serving.cache, 0, NULL, &serves) == ASHLAR_INVALID_ARGUMENT);
  REQUIRE(ashlar_start_serve_prefill(serving.cache, 0, &work, NULL) == ASHLAR_INVALID_ARGUMENT);
  REQUIRE(work == NULL);
  REQUIRE(ashlar_start_serve_prefill(serving.cache, 20000, &work, &serves) == ASHLAR_OK);
  for (first = 2000000;; first += SEGMENTS) {
    request = begin(&asking, tokens, first, 1);
    elsewhere = ashlar_request_segments_computed_elsewhere(request);
    if (elsewhere > 0) break;
    ashlar_request_end(request);
    wait_for_the_other_engine(begun);
  }
  for (i = ashlar_request_missing_count(request); i-- > 0;) {
    const ashlar_computed_run run = compute(&asking, request, i);
    REQUIRE(ashlar_request_publish(request, i, &run, NULL) == ASHLAR_OK);
  }
  REQUIRE(ashlar_request_start_wait_cold(request, 30000, NULL) == ASHLAR_INVALID_ARGUMENT);
  REQUIRE(ashlar_request_start_wait_cold(request, 30000, &waits) == ASHLAR_OK);
  while (ashlar_job_poll(waits) == ASHLAR_PENDING) {
    if (ashlar_job_poll(serves) == ASHLAR_PENDING) continue;
    code = ashlar_job_result(serves);
    ashlar_job_end(serves);
    REQUIRE(code == ASHLAR_OK || code == ASHLAR_PENDING);
    if (code == ASHLAR_OK) {
      const ashlar_computed_run run = compute(&serving, work, 0);
      REQUIRE(ashlar_request_missing_count(work) == 1);
      REQUIRE(ashlar_request_publish(work, 0, &run, NULL) == ASHLAR_OK);
      ++taken;
    }
    ashlar_request_end(work);
    REQUIRE(ashlar_start_serve_prefill(serving.cache, 100, &work, &serves) == ASHLAR_OK);
  }
  REQUIRE(ashlar_job_result(waits) == ASHLAR_OK);
  REQUIRE(taken > 0);
  ashlar_job_end(waits);
  ashlar_job_end(serves);
  ashlar_request_end(work);
  finish(&asking, request, first);
  ashlar_close(serving.cache);
  ashlar_close(asking.cache);
}

/* A state that the library would have to read on the GPU is refused; so is memory that is no GPU's. */
static void refuse_what_lies_there(char** sockets) {
  static engine self;
  static int32_t tokens[TOKENS];
  ashlar_open_options options = ASHLAR_INIT(ashlar_open_options);
  ashlar_model model = ASHLAR_INIT(ashlar_model);
  ashlar_memory memory = ASHLAR_INIT(ashlar_memory);
  ashlar_layer layer = ASHLAR_INIT(ashlar_layer);
  ashlar_request* request;
  ashlar_computed_run run;
  ashlar_cache* cache = NULL;
  open_engine(&self, sockets, ASHLAR_MEMORY_GPU, 0);
  request = begin(&self, tokens, 9000, 0);
  run = compute(&self, request, 1);
  self.tensors[1].state = ashlar_data(self.cache) + 64;
  REQUIRE(ashlar_request_publish(request, 1, &run, NULL) == ASHLAR_INVALID_ARGUMENT);
  REQUIRE(strncmp(ashlar_error_message(), "computed.linear[0].state: lies on the GPU", 41) == 0);
  ashlar_request_end(request);
  ashlar_close(self.cache);
  layer.kind = ASHLAR_GQA;
  layer.kv_heads = layer.key_dim = layer.value_dim = 8;
  model.model_id = "refused";
  model.weights_digest = "1";
  model.page_tokens = PAGE_TOKENS;
  model.layers = &layer;
  model.layer_count = 1;
  take_gpu_memory(&memory);
  memory.pages = 8;
  options.rpc_socket = sockets[0];
  options.session_socket = sockets[1];
  options.model = &model;
  options.memory = &memory;
  memory.gpu[0] = 'E';
  REQUIRE(ashlar_open(&options, &cache) == ASHLAR_FAILED_PRECONDITION);
  REQUIRE(strstr(ashlar_error_message(), "is not a GPU of this daemon") != NULL);
  memory.size = offsetof(ashlar_memory, gpu_descriptor); /* of a header that knew no GPUs */
  REQUIRE(ashlar_open(&options, &cache) == ASHLAR_INVALID_ARGUMENT);
}

int main(int argc, char** argv) {
  if (argc == 4 && strcmp(argv[1], "many") == 0) {
    publish_many(argv + 2, ASHLAR_MEMORY_HOSTED);
  } else if (argc == 4 && strcmp(argv[1], "present") == 0) {
    land_beside_present(argv + 2, ASHLAR_MEMORY_HOSTED);
  } else if (argc == 4 && strcmp(argv[1], "gpu") == 0) {
    publish_many(argv + 2, ASHLAR_MEMORY_GPU);
    land_beside_present(argv + 2, ASHLAR_MEMORY_GPU);
    refuse_what_lies_there(argv + 2);
  } else if (argc == 4 && strcmp(argv[1], "cold") == 0) {
    share_a_cold_prompt(argv + 2);
  } else if (argc == 4 && strcmp(argv[1], "started") == 0) {
    share_a_cold_prompt_by_jobs(argv + 2);
  } else if (argc == 4 && strcmp(argv[1], "groups") == 0) {
    groups(argv + 2);
  } else if (argc == 4 && strcmp(argv[1], "other_pages") == 0) {
    other_pages(argv + 2);
  } else if (argc == 4 && strcmp(argv[1], "numbers") == 0) {
    numbers(argv + 2);
  } else if (argc == 4 && strcmp(argv[1], "salts") == 0) {
    salts(argv + 2);
  } else if (argc == 4 && strcmp(argv[1], "in_place") == 0) {
    in_place(argv + 2);
  } else if (argc == 6 && strcmp(argv[1], "handoff") == 0) {
    handoff(argv + 2, argv[4], argv[5]);
  } else if (argc == 4 && strcmp(argv[1], "resume") == 0) {
    resume(argv + 2);
  } else {
    fprintf(stderr,
            "usage: calls_c many|present|gpu|cold|started|groups|in_place|numbers|other_pages|salts|resume RPC-SOCKET "
            "SESSION-SOCKET\n"
            "       calls_c handoff RPC-SOCKET SESSION-SOCKET NODE OUTCOME\n");
    return 2;
  }
  return 0;
}
