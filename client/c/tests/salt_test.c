// SPDX-License-Identifier: Apache-2.0
/* Texts of different salts share nothing. */
#include "client/c/testing/engine.h"

/* Commits a text under the second of three salts, and asks for it under each. */
void salts(char** sockets) {
  enum { TEXT = 592, SALTS = 3 };
  static const char* const given[SALTS] = {NULL, "one", "another"};
  static engine self;
  static int32_t tokens[TEXT + 1];
  ashlar_text text;
  ashlar_checkpoint checkpoint = ASHLAR_INIT(ashlar_checkpoint);
  ashlar_prompt prompt = ASHLAR_INIT(ashlar_prompt);
  ashlar_plan plan = ASHLAR_INIT(ashlar_plan);
  ashlar_request* request = NULL;
  uint8_t outcome = 0;
  int i;
  open_engine(&self, sockets, ASHLAR_MEMORY_HOSTED, PAGE_TOKENS);
  for (i = 0; i <= TEXT; ++i) tokens[i] = 5000 + i % 241;
  text = computed_text(&self, tokens, TEXT, 6, &checkpoint, &outcome);
  text.salt = given[1];
  text.salt_bytes = strlen(given[1]);
  REQUIRE(ashlar_commit(self.cache, &text, 1) == ASHLAR_OK);
  REQUIRE(strcmp(ashlar_commit_name(outcome), "kept") == 0);
  prompt.tokens = tokens;
  prompt.token_count = TEXT + 1;
  prompt.page_table = self.table;
  prompt.page_count = PAGES;
  for (i = 0; i < SALTS; ++i) {
    prompt.salt = given[i];
    prompt.salt_bytes = given[i] == NULL ? 0 : strlen(given[i]);
    REQUIRE(ashlar_begin(self.cache, &prompt, 1, &request) == ASHLAR_OK);
    REQUIRE(ashlar_request_plan(request, &plan) == ASHLAR_OK);
    REQUIRE(plan.prefix_tokens == (i == 1 ? TEXT : 0));
    REQUIRE(ashlar_request_finish(request) == ASHLAR_OK);
    ashlar_request_end(request);
  }
  prompt.salt = NULL;
  REQUIRE(ashlar_begin(self.cache, &prompt, 1, &request) == ASHLAR_INVALID_ARGUMENT);
  REQUIRE(strcmp(ashlar_error_message(), "prompts[0].salt: null") == 0);
  ashlar_close(self.cache);
}
