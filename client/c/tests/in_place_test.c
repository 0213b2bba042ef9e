// SPDX-License-Identifier: Apache-2.0
/* Requests read one copy of each segment, in pages that the daemon allocates. */
#include "client/c/testing/engine.h"

/* Two requests of one prompt; the first computes its segments. */
void in_place(char** sockets) {
  enum { OWN = 8 };
  static engine self;
  static int32_t tokens[TOKENS];
  static uint64_t lengths[SEGMENTS];
  ashlar_prompt prompt = ASHLAR_INIT(ashlar_prompt);
  ashlar_page_shortage shortage = ASHLAR_INIT(ashlar_page_shortage);
  ashlar_shared_segment shared[2] = {ASHLAR_INIT(ashlar_shared_segment), ASHLAR_INIT(ashlar_shared_segment)};
  ashlar_request* request[2] = {NULL, NULL};
  const int32_t* own;
  uint64_t count = 0;
  uint32_t i, j;
  open_engine_by(&self, sockets, ASHLAR_MEMORY_HOSTED, 0, 0, 1);
  for (i = 0; i < TOKENS; ++i) tokens[i] = 9000 + (int32_t)i;
  for (i = 0; i < SEGMENTS; ++i) lengths[i] = SEGMENT_TOKENS;
  prompt.tokens = tokens;
  prompt.token_count = TOKENS;
  prompt.segment_lengths = lengths;
  prompt.segment_count = SEGMENTS;
  prompt.fill = 1;
  for (i = 0; i < 2; ++i) {
    REQUIRE(ashlar_begin(self.cache, &prompt, 1, &request[i]) == ASHLAR_OK);
    REQUIRE(ashlar_request_own_pages(request[i], &count) == NULL && count == 0);
    REQUIRE(ashlar_request_shared_segment(request[i], 1, &shared[i]) == ASHLAR_INVALID_ARGUMENT);
    REQUIRE(ashlar_request_admit(request[i], PAGES, &shortage) == ASHLAR_NO_PAGES);
    REQUIRE(shortage.needed > shortage.free && shortage.free + shortage.reclaimable + shortage.held == PAGES);
    REQUIRE(ashlar_request_admit(request[i], OWN, NULL) == ASHLAR_OK);
    own = ashlar_request_own_pages(request[i], &count);
    REQUIRE(own != NULL && count == OWN);
    if (i == 0) {
      REQUIRE(ashlar_request_missing_count(request[0]) == SEGMENTS);
      for (j = 0; j < SEGMENTS * RUN_PAGES; ++j) self.table[PROMPT_PAGES + j] = own[j % RUN_PAGES];
      for (j = 0; j < SEGMENTS; ++j) {
        const ashlar_computed_run run = compute(&self, request[0], j);
        REQUIRE(ashlar_request_publish(request[0], j, &run, NULL) == ASHLAR_OK);
      }
      REQUIRE(ashlar_request_look_again(request[0], NULL, 0) == ASHLAR_OK);
    }
    REQUIRE(ashlar_request_missing_count(request[i]) == 0);
    REQUIRE(ashlar_request_wait_layer(request[i], ATTENTION) == ASHLAR_OK);
    REQUIRE(ashlar_request_finish(request[i]) == ASHLAR_OK);
    REQUIRE(ashlar_request_shared_segment(request[i], 1, &shared[i]) == ASHLAR_OK);
    REQUIRE(shared[i].first_token == 4 && shared[i].end_token == SEGMENT_TOKENS - 4);
    for (j = 0; j < shared[i].page_count; ++j) self.table[j] = shared[i].pages[j];
    for (j = (uint32_t)shared[i].first_token; j < shared[i].end_token; ++j) {
      const float number = (float)tokens[SEGMENT_TOKENS];
      REQUIRE(row(&self, shared[i].first_slot + j, self.place.key_offset)[0] == number);
      REQUIRE(row(&self, shared[i].first_slot + j, self.place.value_offset)[WIDTH - 1] == number);
    }
  }
  REQUIRE(ashlar_request_shared_segment(request[0], ASHLAR_STEP_OF_PREFIX, &shared[0]) == ASHLAR_OK);
  REQUIRE(shared[0].page_count == 0);
  REQUIRE(ashlar_request_shared_segment(request[0], 1, &shared[0]) == ASHLAR_OK);
  REQUIRE(shared[0].page_count == shared[1].page_count);
  for (j = 0; j < shared[0].page_count; ++j) REQUIRE(shared[0].pages[j] == shared[1].pages[j]);
  for (i = 0; i < 2; ++i) ashlar_request_end(request[i]);
  ashlar_close(self.cache);
}
