// SPDX-License-Identifier: Apache-2.0
/* Ashlar for engines in C, and for whatever calls C: the engine API (ashlar/engine.h has its full description, which
 * holds here, too: the order of calls, waiting, pages, two processes, forks).
 *
 * Structs begin with their size: set it to sizeof, all else to zero or to what is meant (ASHLAR_INIT). A struct of an
 * older header is shorter; what it lacks has its default. One of a newer header is taken if what this library does not
 * know is zero. In an array all elements have the size of the first.
 *
 * Errors. Calls return a code: ASHLAR_OK, one of the three that are no errors, or an error, whose text
 * ashlar_error_message() returns to the thread that made the call. ASHLAR_INVALID_ARGUMENT begins with the field's
 * name, and nothing has changed. A cache failure is a miss, never an error.
 *
 * Memory. The library gives out handles, which *_end and ashlar_close take back (null is allowed), and pointers into
 * its own memory, valid as long as said. It keeps no pointer of the caller's longer than said there.
 *
 * Threads. A cache may be used by any thread, a request and a job by one thread at a time. Handles may end in any
 * order.
 */
#ifndef ASHLAR_H
#define ASHLAR_H

#include <stddef.h>
#include <stdint.h>

#include "ashlar_types.h"

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define ASHLAR_API __attribute__((visibility("default")))
#else
#define ASHLAR_API
#endif

ASHLAR_API const char* ashlar_version(void);
/* Of this thread's last call that returned an error; until its next call. Never null. */
ASHLAR_API const char* ashlar_error_message(void);

/* Waits for the daemon. ASHLAR_UNAVAILABLE: there is none. */
ASHLAR_API int32_t ashlar_open(const ashlar_open_options* options, ashlar_cache** out);
/* Does not wait. Options and all that they name stay until the job is over. *out is open then if ashlar_job_result says
 * ASHLAR_OK. Until then no call takes it; close it behind the job, in any case. */
ASHLAR_API int32_t ashlar_start_open(const ashlar_open_options* options, ashlar_cache** out, ashlar_job** job);
/* Ends the session once its last request and job have ended, too. The last of them waits until nothing can write into
 * the memory any more: where pages are in doubt, for as long as the daemon stands still (a dead one writes nothing). */
ASHLAR_API void ashlar_close(ashlar_cache* cache);
ASHLAR_API uint8_t* ashlar_data(const ashlar_cache* cache); /* of the memory, maybe on a GPU; null without one */
ASHLAR_API uint64_t ashlar_bytes(const ashlar_cache* cache);
ASHLAR_API uint32_t ashlar_place_count(const ashlar_cache* cache);
ASHLAR_API int32_t ashlar_place(const ashlar_cache* cache, uint32_t index, ashlar_page_place* out);
ASHLAR_API int32_t ashlar_connected(const ashlar_cache* cache);
/* A doubt about the options that is no error; empty: none. As long as the cache. */
ASHLAR_API const char* ashlar_warning(const ashlar_cache* cache);

/* One request for each prompt; none where an error is returned. The start forms do not wait. */
ASHLAR_API int32_t ashlar_begin(ashlar_cache* cache, const ashlar_prompt* prompts, uint32_t count,
                                ashlar_request** requests);
ASHLAR_API int32_t ashlar_start_begin(ashlar_cache* cache, const ashlar_prompt* prompts, uint32_t count,
                                      ashlar_request** requests);
ASHLAR_API int32_t ashlar_land(ashlar_cache* cache, const ashlar_plan_to_land* plans, uint32_t count,
                               ashlar_request** requests);
ASHLAR_API int32_t ashlar_start_land(ashlar_cache* cache, const ashlar_plan_to_land* plans, uint32_t count,
                                     ashlar_request** requests);
/* By kernels of this process; waits for nobody. */
ASHLAR_API int32_t ashlar_compute_alone(ashlar_cache* cache, const ashlar_request* request,
                                        const ashlar_alone_layer* layer);
ASHLAR_API int32_t ashlar_commit(ashlar_cache* cache, const ashlar_text* texts, uint32_t count);
/* Tensors, rows, tokens and outcomes stay until the job is over. */
ASHLAR_API int32_t ashlar_start_commit(ashlar_cache* cache, const ashlar_text* texts, uint32_t count, ashlar_job** job);
/* Hands a text that was committed to a node of the cluster, for an engine there: tokens, conversation and media of
 * `text` count. ASHLAR_OK: the node has it. ASHLAR_PENDING: not in time; it may still come. ASHLAR_UNAVAILABLE, with
 * the reason: it has not, and that engine computes. */
ASHLAR_API int32_t ashlar_hand_off(ashlar_cache* cache, const ashlar_text* text, const char* node, uint32_t wait_ms);
/* Writes an outcome (ashlar_hand_off_name). Tokens and outcome stay until the job is over. */
ASHLAR_API int32_t ashlar_start_hand_off(ashlar_cache* cache, const ashlar_text* text, const char* node,
                                         uint32_t wait_ms, uint8_t* outcome, ashlar_job** job);
/* Waits for a segment to compute for other engines. ASHLAR_OK: `work` is a request with one missing run, and no prompt;
 * publish and end it before the next call, which says what became of it. ASHLAR_PENDING: there was none, and *work is
 * null. One thread at a time: a second one ends the wait of the first. */
ASHLAR_API int32_t ashlar_serve_prefill(ashlar_cache* cache, uint32_t wait_ms, ashlar_request** work);
/* Does not wait. *work is such a request once the job is over, if ashlar_job_result says ASHLAR_OK. Until then no call
 * takes it; end it behind the job, in any case. */
ASHLAR_API int32_t ashlar_start_serve_prefill(ashlar_cache* cache, uint32_t wait_ms, ashlar_request** work,
                                              ashlar_job** job);
ASHLAR_API int32_t ashlar_stored(const ashlar_cache* cache, ashlar_stored_segments* out);
/* Return how many pages were written to `pages`. The first waits up to timeout_ms. */
ASHLAR_API uint64_t ashlar_take_quiet_pages(ashlar_cache* cache, int32_t* pages, uint64_t capacity,
                                            uint32_t timeout_ms);
ASHLAR_API uint64_t ashlar_poll_quiet_pages(ashlar_cache* cache, int32_t* pages, uint64_t capacity);
/* Of one group of layers, where groups number their pages apart; the calls above take the first. 0 does not wait. */
ASHLAR_API uint64_t ashlar_take_quiet_pages_of(ashlar_cache* cache, uint32_t group, int32_t* pages, uint64_t capacity,
                                               uint32_t timeout_ms);

/* Cancels what is under way, and does not wait. */
ASHLAR_API void ashlar_request_end(ashlar_request* request);
ASHLAR_API int32_t ashlar_request_wait_plan(ashlar_request* request);
ASHLAR_API int32_t ashlar_request_poll_plan(ashlar_request* request);
ASHLAR_API int32_t ashlar_request_plan(const ashlar_request* request, ashlar_plan* out);
ASHLAR_API int32_t ashlar_request_step(const ashlar_request* request, uint32_t index, ashlar_step* out);
ASHLAR_API int32_t ashlar_request_segment(const ashlar_request* request, uint32_t index, ashlar_segment* out);
ASHLAR_API uint32_t ashlar_request_missing_count(const ashlar_request* request);
ASHLAR_API int32_t ashlar_request_missing(const ashlar_request* request, uint32_t index, ashlar_run* out);
/* outcome (ashlar_publish_name) may be null. */
ASHLAR_API int32_t ashlar_request_publish(ashlar_request* request, uint32_t missing,
                                          const ashlar_computed_run* computed, uint8_t* outcome);
ASHLAR_API int32_t ashlar_request_start_publish(ashlar_request* request, uint32_t missing,
                                                const ashlar_computed_run* computed, uint8_t* outcome,
                                                ashlar_job** job);
/* Many small ones by one call to the daemon: computed[i], in pages of its own, is the run missing[i]. One outcome
 * a run; null: not wanted. An error: none was published. */
ASHLAR_API int32_t ashlar_request_publish_many(ashlar_request* request, const uint32_t* missing,
                                               const ashlar_computed_run* computed, uint32_t count, uint8_t* outcomes);
ASHLAR_API int32_t ashlar_request_start_publish_many(ashlar_request* request, const uint32_t* missing,
                                                     const ashlar_computed_run* computed, uint32_t count,
                                                     uint8_t* outcomes, ashlar_job** job);
ASHLAR_API void ashlar_request_abandon(ashlar_request* request, uint32_t missing);
/* With cold_parallel: how many segments other engines compute for this prompt. */
ASHLAR_API uint32_t ashlar_request_elsewhere(const ashlar_request* request);
/* Waits for them. ASHLAR_RESTART: there are more missing runs, at the end; compute them, and call it again.
 * ASHLAR_PENDING: not all have come in time. ASHLAR_OK: nothing is left to wait for. Then look again. */
ASHLAR_API int32_t ashlar_request_wait_cold(ashlar_request* request, uint32_t timeout_ms);
/* Does not wait: ashlar_job_result has the code. Other calls on the request say ASHLAR_PENDING until the job is over.
 */
ASHLAR_API int32_t ashlar_request_start_wait_cold(ashlar_request* request, uint32_t timeout_ms, ashlar_job** job);
ASHLAR_API int32_t ashlar_request_look_again(ashlar_request* request, const int32_t* page_table, uint64_t page_count);
ASHLAR_API int32_t ashlar_request_start_look_again(ashlar_request* request, const int32_t* page_table,
                                                   uint64_t page_count);
/* The same in one table a group of layers. */
ASHLAR_API int32_t ashlar_request_look_again_in(ashlar_request* request, const ashlar_page_table* page_tables,
                                                uint32_t count);
ASHLAR_API int32_t ashlar_request_start_look_again_in(ashlar_request* request, const ashlar_page_table* page_tables,
                                                      uint32_t count);
ASHLAR_API int32_t ashlar_request_wait_layer(ashlar_request* request, uint32_t layer);
ASHLAR_API int32_t ashlar_request_poll_layer(ashlar_request* request, uint32_t layer);
ASHLAR_API int32_t ashlar_request_tuple(ashlar_request* request, uint32_t step, uint32_t layer, ashlar_tuple* out);
ASHLAR_API int32_t ashlar_request_head(ashlar_request* request, uint32_t step, uint32_t layer, uint32_t head,
                                       ashlar_head* out);
ASHLAR_API int32_t ashlar_request_advance(ashlar_request* request, const ashlar_layer_advance* advance);
ASHLAR_API int32_t ashlar_request_finish(ashlar_request* request);
ASHLAR_API int32_t ashlar_request_poll_finish(ashlar_request* request);
ASHLAR_API int32_t ashlar_request_move(ashlar_request* request, const int32_t* page_table, uint64_t page_count);
ASHLAR_API int32_t ashlar_request_move_to(ashlar_request* request, const ashlar_page_table* page_tables,
                                          uint32_t count);
ASHLAR_API int32_t ashlar_request_lose(ashlar_request* request, const uint32_t* segments, uint32_t count);
ASHLAR_API int32_t ashlar_request_pages_kept(const ashlar_request* request);
ASHLAR_API void ashlar_request_cancel(ashlar_request* request);
ASHLAR_API int32_t ashlar_request_poll_quiet(ashlar_request* request);
ASHLAR_API void ashlar_request_release(ashlar_request* request);
/* Returns the size, and writes the plan if `capacity` suffices. 0: no hit. */
ASHLAR_API uint64_t ashlar_request_plan_bytes(const ashlar_request* request, uint8_t* out, uint64_t capacity);

ASHLAR_API int32_t ashlar_job_wait(ashlar_job* job);
ASHLAR_API int32_t ashlar_job_poll(ashlar_job* job);
/* Once ashlar_job_poll says ASHLAR_OK: the code of the call that waits; ASHLAR_OK of jobs that write outcomes. */
ASHLAR_API int32_t ashlar_job_result(ashlar_job* job);
ASHLAR_API void ashlar_job_end(ashlar_job* job); /* waits until the call is over */

/* Names of numbers, as metrics have them. Static; never null. */
ASHLAR_API const char* ashlar_miss_name(uint32_t reason);
ASHLAR_API const char* ashlar_tier_name(uint32_t tier);
ASHLAR_API const char* ashlar_publish_name(uint32_t outcome);
ASHLAR_API const char* ashlar_commit_name(uint32_t outcome);
ASHLAR_API const char* ashlar_hand_off_name(uint32_t outcome);

#ifdef __cplusplus
}
#endif

#endif /* ASHLAR_H */
