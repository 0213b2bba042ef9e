// SPDX-License-Identifier: Apache-2.0
/* The engine API for C99 and for languages that call C. ashlar/engine.h describes the order of the calls, errors,
 * waiting, ownership of pages, in-place sharing, and scheduler and workers; all of it holds here, too.
 *
 * Structs begin with their size. Initialize them with ASHLAR_INIT, which sets the size and zeroes the rest; zero means
 * the default. A struct of an older header is shorter; its missing fields have their defaults. A struct of a newer
 * header is accepted if the fields that this library does not know are zero. All elements of an array have the size of
 * the first.
 *
 * Errors. Calls return ASHLAR_OK, one of the codes that are not errors, or an error. ashlar_error_message() returns the
 * text of the calling thread's last error. After ASHLAR_INVALID_ARGUMENT, whose text begins with the field's name,
 * nothing has changed.
 *
 * Memory. The library returns handles, which *_end and ashlar_close take back (null is allowed), and pointers into its
 * own memory, valid as documented. It keeps no pointer of the caller longer than documented.
 *
 * Threads. A cache may be used by any thread; a request or a job by one thread at a time. Handles may end in any order.
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
/* The text of this thread's last error, valid until its next call. Never null. */
ASHLAR_API const char* ashlar_error_message(void);

/* Cuts a prompt's tokens into segments, each of which ends with the separator: one or more token ids of the engine's
 * tokenizer. See ashlar::engine::SegmentLengths. Writes the number of segments to `count`. If it is at most `capacity`,
 * writes their lengths in tokens to `lengths`, for ashlar_prompt.segment_lengths; otherwise writes no lengths. */
ASHLAR_API int32_t ashlar_segment_lengths(const int32_t* tokens, uint64_t token_count, const int32_t* separator,
                                          uint64_t separator_count, uint64_t min_tokens, uint64_t* lengths,
                                          uint64_t capacity, uint64_t* count);

/* Waits for the daemon. ASHLAR_UNAVAILABLE: no daemon. */
ASHLAR_API int32_t ashlar_open(const ashlar_open_options* options, ashlar_cache** out);
/* Does not wait. Options and everything that they point to must stay valid until the job is over. If ashlar_job_result
 * is ASHLAR_OK then, *out is open. Do not use *out before that; close it after the job in any case. */
ASHLAR_API int32_t ashlar_start_open(const ashlar_open_options* options, ashlar_cache** out, ashlar_job** job);
/* Ends the session when its last request and job have ended. That last end waits until nothing can write to the memory;
 * if the daemon hangs, it waits for as long as the daemon hangs. */
ASHLAR_API void ashlar_close(ashlar_cache* cache);
ASHLAR_API uint8_t* ashlar_data(const ashlar_cache* cache); /* the memory, perhaps on a GPU; null: none */
ASHLAR_API uint64_t ashlar_bytes(const ashlar_cache* cache);
ASHLAR_API uint32_t ashlar_place_count(const ashlar_cache* cache);
ASHLAR_API int32_t ashlar_place(const ashlar_cache* cache, uint32_t index, ashlar_page_place* out);
ASHLAR_API int32_t ashlar_connected(const ashlar_cache* cache);
/* A non-fatal warning about the options; empty: none. Valid as long as the cache. */
ASHLAR_API const char* ashlar_warning(const ashlar_cache* cache);

/* Returns one request per prompt, or none on an error. The start forms do not wait. */
ASHLAR_API int32_t ashlar_begin(ashlar_cache* cache, const ashlar_prompt* prompts, uint32_t count,
                                ashlar_request** requests);
ASHLAR_API int32_t ashlar_start_begin(ashlar_cache* cache, const ashlar_prompt* prompts, uint32_t count,
                                      ashlar_request** requests);
ASHLAR_API int32_t ashlar_land(ashlar_cache* cache, const ashlar_plan_to_land* plans, uint32_t count,
                               ashlar_request** requests);
ASHLAR_API int32_t ashlar_start_land(ashlar_cache* cache, const ashlar_plan_to_land* plans, uint32_t count,
                                     ashlar_request** requests);
/* Computes one linear layer of a missing run with kernels in this process. Does not wait. */
ASHLAR_API int32_t ashlar_compute_alone(ashlar_cache* cache, const ashlar_request* request,
                                        const ashlar_alone_layer* layer);
ASHLAR_API int32_t ashlar_commit(ashlar_cache* cache, const ashlar_text* texts, uint32_t count);
/* Tensors, rows, tokens and outcomes must stay valid until the job is over. */
ASHLAR_API int32_t ashlar_start_commit(ashlar_cache* cache, const ashlar_text* texts, uint32_t count, ashlar_job** job);
/* Sends a committed text to another node, for an engine there: tokens, conversation, media and salt of `text` are read.
 * ASHLAR_OK: the node has it. ASHLAR_PENDING: timeout; it may still arrive. ASHLAR_UNAVAILABLE: it will not arrive; the
 * text of the error has the reason. */
ASHLAR_API int32_t ashlar_handoff(ashlar_cache* cache, const ashlar_text* text, const char* node, uint32_t wait_ms);
/* Writes an outcome (ashlar_handoff_name). Tokens and outcome must stay valid until the job is over. */
ASHLAR_API int32_t ashlar_start_handoff(ashlar_cache* cache, const ashlar_text* text, const char* node,
                                        uint32_t wait_ms, uint8_t* outcome, ashlar_job** job);
/* Waits for a segment to compute for another engine. ASHLAR_OK: *work is a request with one missing run and no prompt;
 * publish it and end it before the next call, which reports the result. ASHLAR_PENDING: no work, *work is null. One
 * thread at a time: a second call ends the first. On a cache without pages another process publishes the run; then
 * call ashlar_request_mark_published. */
ASHLAR_API int32_t ashlar_serve_prefill(ashlar_cache* cache, uint32_t wait_ms, ashlar_request** work);
/* Does not wait. If ashlar_job_result is ASHLAR_OK when the job is over, *work is such a request. Do not use *work
 * before that; end it after the job in any case. */
ASHLAR_API int32_t ashlar_start_serve_prefill(ashlar_cache* cache, uint32_t wait_ms, ashlar_request** work,
                                              ashlar_job** job);
ASHLAR_API int32_t ashlar_get_stored_segments(const ashlar_cache* cache, ashlar_stored_segments* out);
/* Return the number of quiesced pages written to `pages`: pages that the cache kept, and to which nothing writes any
 * more. The first call waits up to timeout_ms. */
ASHLAR_API uint64_t ashlar_take_quiesced_pages(ashlar_cache* cache, int32_t* pages, uint64_t capacity,
                                               uint32_t timeout_ms);
ASHLAR_API uint64_t ashlar_poll_quiesced_pages(ashlar_cache* cache, int32_t* pages, uint64_t capacity);
/* The pages of one group of layers, if each group numbers its own pages. timeout_ms 0 does not wait. */
ASHLAR_API uint64_t ashlar_take_quiesced_pages_of(ashlar_cache* cache, uint32_t group, int32_t* pages,
                                                  uint64_t capacity, uint32_t timeout_ms);

/* Cancels calls in progress. Does not wait, unless it is the last handle of its cache (ashlar_close). */
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
/* Publishes several small runs with one call to the daemon: computed[i] is the run missing[i], each in pages of its
 * own. Writes one outcome per run; outcomes may be null. On an error nothing was published. */
ASHLAR_API int32_t ashlar_request_publish_many(ashlar_request* request, const uint32_t* missing,
                                               const ashlar_computed_run* computed, uint32_t count, uint8_t* outcomes);
ASHLAR_API int32_t ashlar_request_start_publish_many(ashlar_request* request, const uint32_t* missing,
                                                     const ashlar_computed_run* computed, uint32_t count,
                                                     uint8_t* outcomes, ashlar_job** job);
/* After ashlar_serve_prefill, it also reports that this engine can never compute the run. */
ASHLAR_API void ashlar_request_abandon(ashlar_request* request, uint32_t missing);
/* For work of ashlar_serve_prefill on a cache without pages: another process has published the run. */
ASHLAR_API int32_t ashlar_request_mark_published(ashlar_request* request, uint32_t missing);
/* With cold_parallel: the number of segments that other engines compute for this prompt. */
ASHLAR_API uint32_t ashlar_request_segments_computed_elsewhere(const ashlar_request* request);
/* Waits for these segments. ASHLAR_OK: nothing is left to wait for. ASHLAR_RESTART: there are more missing runs at the
 * end; compute them and call it again. ASHLAR_PENDING: timeout. Then look again. */
ASHLAR_API int32_t ashlar_request_wait_cold(ashlar_request* request, uint32_t timeout_ms);
/* Does not wait; ashlar_job_result has the code. Other calls on the request return ASHLAR_PENDING until the job is
 * over. */
ASHLAR_API int32_t ashlar_request_start_wait_cold(ashlar_request* request, uint32_t timeout_ms, ashlar_job** job);
ASHLAR_API int32_t ashlar_request_look_again(ashlar_request* request, const int32_t* page_table, uint64_t page_count);
ASHLAR_API int32_t ashlar_request_start_look_again(ashlar_request* request, const int32_t* page_table,
                                                   uint64_t page_count);
/* The same with one page table per group of layers. */
ASHLAR_API int32_t ashlar_request_look_again_groups(ashlar_request* request, const ashlar_page_table* page_tables,
                                                    uint32_t count);
ASHLAR_API int32_t ashlar_request_start_look_again_groups(ashlar_request* request, const ashlar_page_table* page_tables,
                                                          uint32_t count);
/* With ashlar_memory.share_in_place: gets the shared pages of the prompt's segments and prefix, and own_pages pages for
 * all other tokens. The prefix's tokens after ashlar_plan.shared_prefix_tokens land on the first own pages. Further
 * calls raise the number of own pages. ASHLAR_NO_PAGES: too few are free; `shortage` (may be null) has the numbers, and
 * nothing has changed. ASHLAR_UNAVAILABLE: the daemon did not answer or is busy. */
ASHLAR_API int32_t ashlar_request_admit(ashlar_request* request, uint32_t own_pages, ashlar_page_shortage* shortage);
/* `index`: a segment of the prompt, or ASHLAR_STEP_OF_PREFIX; see ashlar::engine::AdmittedPages. */
ASHLAR_API int32_t ashlar_request_shared_segment(const ashlar_request* request, uint32_t index,
                                                 ashlar_shared_segment* out);
/* Returns the own pages, in the order in which ashlar_request_admit has added them; null before it. Valid until its
 * next call. */
ASHLAR_API const int32_t* ashlar_request_own_pages(const ashlar_request* request, uint64_t* count);
ASHLAR_API int32_t ashlar_request_wait_layer(ashlar_request* request, uint32_t layer);
ASHLAR_API int32_t ashlar_request_poll_layer(ashlar_request* request, uint32_t layer);
ASHLAR_API int32_t ashlar_request_tuple(ashlar_request* request, uint32_t step, uint32_t layer, ashlar_tuple* out);
ASHLAR_API int32_t ashlar_request_head(ashlar_request* request, uint32_t step, uint32_t layer, uint32_t head,
                                       ashlar_head* out);
ASHLAR_API int32_t ashlar_request_advance(ashlar_request* request, const ashlar_layer_advance* advance);
ASHLAR_API int32_t ashlar_request_finish(ashlar_request* request);
ASHLAR_API int32_t ashlar_request_poll_finish(ashlar_request* request);
ASHLAR_API int32_t ashlar_request_move(ashlar_request* request, const int32_t* page_table, uint64_t page_count);
ASHLAR_API int32_t ashlar_request_move_groups(ashlar_request* request, const ashlar_page_table* page_tables,
                                              uint32_t count);
ASHLAR_API int32_t ashlar_request_drop_segments(ashlar_request* request, const uint32_t* segments, uint32_t count);
ASHLAR_API int32_t ashlar_request_pages_kept(const ashlar_request* request);
ASHLAR_API void ashlar_request_cancel(ashlar_request* request);
ASHLAR_API int32_t ashlar_request_poll_quiesced(ashlar_request* request);
ASHLAR_API void ashlar_request_release(ashlar_request* request);
/* Returns the size of the plan for other processes, and writes it if `capacity` suffices. 0: no hit. */
ASHLAR_API uint64_t ashlar_request_plan_bytes(const ashlar_request* request, uint8_t* out, uint64_t capacity);

ASHLAR_API int32_t ashlar_job_wait(ashlar_job* job);
ASHLAR_API int32_t ashlar_job_poll(ashlar_job* job);
/* After ashlar_job_poll has returned ASHLAR_OK: the code of the call itself; ASHLAR_OK for calls that write outcomes.
 */
ASHLAR_API int32_t ashlar_job_result(ashlar_job* job);
ASHLAR_API void ashlar_job_end(ashlar_job* job); /* waits until the call is over */

/* Names of numbers, as in metrics. Static; never null. */
ASHLAR_API const char* ashlar_miss_name(uint32_t reason);
ASHLAR_API const char* ashlar_tier_name(uint32_t tier);
ASHLAR_API const char* ashlar_publish_name(uint32_t outcome);
ASHLAR_API const char* ashlar_commit_name(uint32_t outcome);
ASHLAR_API const char* ashlar_handoff_name(uint32_t outcome);

#ifdef __cplusplus
}
#endif

#endif /* ASHLAR_H */
