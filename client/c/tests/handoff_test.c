// SPDX-License-Identifier: Apache-2.0
/* Prompts that are handed to an engine of another node. */
#include "client/c/testing/engine.h"

/* Commits the text, and hands it to that node: at once and by a job. */
void handoff(char** sockets, const char* node, const char* expected) {
  enum { TEXT = 592 };
  static engine self;
  static int32_t tokens[TEXT];
  ashlar_text text;
  ashlar_checkpoint checkpoint = ASHLAR_INIT(ashlar_checkpoint);
  ashlar_job* job = NULL;
  uint8_t outcome = 0, handed = 0;
  int32_t code;
  int i;
  open_engine(&self, sockets, ASHLAR_MEMORY_HOSTED, PAGE_TOKENS);
  for (i = 0; i < TEXT; ++i) tokens[i] = i % 251;
  text = computed_text(&self, tokens, TEXT, 6, &checkpoint, &outcome);
  REQUIRE(ashlar_commit(self.cache, &text, 1) == ASHLAR_OK);
  REQUIRE(strcmp(ashlar_commit_name(outcome), "kept") == 0 ||
          strcmp(ashlar_commit_name(outcome), "already_present") == 0); /* as by an earlier run */
  code = ashlar_handoff(self.cache, &text, node, 20000);
  REQUIRE(code == (strcmp(expected, "completed") == 0 ? ASHLAR_OK : ASHLAR_UNAVAILABLE));
  if (code != ASHLAR_OK) REQUIRE(strcmp(ashlar_error_message(), expected) == 0);
  REQUIRE(ashlar_start_handoff(self.cache, &text, node, 20000, &handed, &job) == ASHLAR_OK);
  while ((code = ashlar_job_poll(job)) == ASHLAR_PENDING) continue;
  REQUIRE(code == ASHLAR_OK);
  ashlar_job_end(job);
  REQUIRE(strcmp(ashlar_handoff_name(handed), expected) == 0);
  REQUIRE(ashlar_handoff(self.cache, &text, NULL, 0) == ASHLAR_INVALID_ARGUMENT);
  REQUIRE(strncmp(ashlar_error_message(), "node: ", 6) == 0);
  text.size = 0;
  REQUIRE(ashlar_start_handoff(self.cache, &text, node, 0, &handed, &job) == ASHLAR_INVALID_ARGUMENT);
  REQUIRE(strcmp(ashlar_error_message(), "text.size: not set; set it to sizeof the struct") == 0);
  ashlar_close(self.cache);
}

/* What was handed here is resumed from this node's own memory. */
void resume(char** sockets) {
  enum { TEXT = 592 };
  static engine self;
  static int32_t tokens[TEXT + 1];
  ashlar_prompt prompt = ASHLAR_INIT(ashlar_prompt);
  ashlar_plan plan = ASHLAR_INIT(ashlar_plan);
  ashlar_request* request = NULL;
  uint64_t p;
  int i;
  open_engine(&self, sockets, ASHLAR_MEMORY_HOSTED, PAGE_TOKENS);
  for (i = 0; i < TEXT; ++i) tokens[i] = i % 251;
  tokens[TEXT] = 7;
  prompt.tokens = tokens;
  prompt.token_count = TEXT + 1;
  prompt.page_table = self.table;
  prompt.page_count = PAGES;
  REQUIRE(ashlar_begin(self.cache, &prompt, 1, &request) == ASHLAR_OK);
  REQUIRE(ashlar_request_plan(request, &plan) == ASHLAR_OK);
  REQUIRE(plan.prefix_tokens == TEXT);
  REQUIRE(strcmp(ashlar_tier_name(plan.prefix_tier), "dram") == 0);
  REQUIRE(ashlar_request_finish(request) == ASHLAR_OK);
  for (p = 0; p < TEXT; ++p) REQUIRE(*row(&self, p, self.place.value_offset) == 6);
  ashlar_request_end(request);
  ashlar_close(self.cache);
}
