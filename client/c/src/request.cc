// SPDX-License-Identifier: Apache-2.0
// The calls on a request, and on a job.
#include <memory>

#include "client/c/src/boundary.h"

namespace ashlar::c {
namespace {

// A computed run, with the tensors that it points to.
struct OwnRun {
  OwnRun(const std::string& name, const ashlar_computed_run& given)
      : linear(TensorsOf(name + ".linear", given.linear, given.linear_count)),
        tables(TablesOf(name + ".page_tables", given.page_tables, given.page_table_count)),
        run{.linear = linear.data(),
            .linear_count = given.linear_count,
            .page_table = given.page_table,
            .page_count = given.page_count,
            .first_position = given.first_position,
            .page_tables = tables.data(),
            .page_table_count = given.page_table_count} {}

  std::vector<engine::LinearTensors> linear;
  std::vector<engine::PageTable> tables;
  engine::ComputedRun run;
};

template <typename Call>
int32_t Publish(const ashlar_computed_run* given, Call call) {
  const OwnRun own("computed", Read("computed", given));
  return Report(call(own.run));
}

template <typename Call>
int32_t PublishMany(const ashlar_computed_run* given, uint32_t count, Call call) {
  std::vector<OwnRun> own;  // whose elements are never moved
  std::vector<engine::ComputedRun> runs;
  for (const ashlar_computed_run& computed : ReadAll("computed", given, count)) {
    own.emplace_back("computed[" + std::to_string(runs.size()) + "]", computed);
    runs.push_back(own.back().run);
  }
  return Report(call(runs.data()));
}

int32_t Advance(ashlar_request* request, const ashlar_layer_advance* given) {
  const ashlar_layer_advance advance = Read("advance", given);
  std::vector<engine::StateCopy> copies;
  for (const ashlar_state_copy& copy : ReadAll("advance.copies", advance.copies, advance.copy_count)) {
    const std::string name = "advance.copies[" + std::to_string(copies.size()) + "].state";
    copies.push_back({copy.position, StateOf(name, copy.state)});
  }
  return Report(request->request.Advance({.layer = advance.layer,
                                          .begin = advance.begin,
                                          .end = advance.end,
                                          .inputs = RowsOf("advance.inputs", advance.inputs),
                                          .state = StateOf("advance.state", advance.state),
                                          .out = advance.out,
                                          .out_stride = advance.out_stride,
                                          .copies = copies.data(),
                                          .copy_count = advance.copy_count}));
}

}  // namespace
}  // namespace ashlar::c

using namespace ashlar::c;
namespace engine = ashlar::engine;

void ashlar_request_end(ashlar_request* request) {
  delete request;
}

int32_t ashlar_request_wait_plan(ashlar_request* request) {
  return Report(request->request.WaitPlan());
}

int32_t ashlar_request_poll_plan(ashlar_request* request) {
  return Report(request->request.PollPlan());
}

int32_t ashlar_request_plan(const ashlar_request* request, ashlar_plan* out) {
  const engine::Plan& plan = request->request.plan();
  const ashlar_plan own = {
      sizeof own, plan.step_count, plan.segment_count, plan.prefix_tokens,      plan.cached_tokens,
      plan.own,   plan.exact,      plan.prefix_tier,   plan.prefix_span_tokens, plan.shared_prefix_tokens};
  return Write(own, out);
}

int32_t ashlar_request_step(const ashlar_request* request, uint32_t index, ashlar_step* out) {
  const engine::Plan& plan = request->request.plan();
  if (index >= plan.step_count) return OutOfRange("index", index, plan.step_count, "steps");
  const engine::Step& step = plan.steps[index];
  const ashlar_step own = {sizeof own, static_cast<uint32_t>(step.kind), step.capture, step.segment, step.begin,
                           step.end};
  return Write(own, out);
}

int32_t ashlar_request_segment(const ashlar_request* request, uint32_t index, ashlar_segment* out) {
  const engine::Plan& plan = request->request.plan();
  if (index >= plan.segment_count) return OutOfRange("index", index, plan.segment_count, "segments");
  const engine::Segment& segment = plan.segments[index];
  const ashlar_segment own = {sizeof own,     segment.start, segment.tokens, segment.bytes,
                              segment.reason, segment.tier,  segment.used};
  return Write(own, out);
}

uint32_t ashlar_request_missing_count(const ashlar_request* request) {
  uint32_t count = 0;
  request->request.missing(&count);
  return count;
}

int32_t ashlar_request_missing(const ashlar_request* request, uint32_t index, ashlar_run* out) {
  uint32_t count = 0;
  const engine::Run* const runs = request->request.missing(&count);
  if (index >= count) return OutOfRange("index", index, count, "missing runs");
  const engine::Run& run = runs[index];
  const ashlar_run own = {sizeof own,        run.tokens,      run.token_count, run.segment,
                          run.capture_begin, run.capture_end, run.transition};
  return Write(own, out);
}

int32_t ashlar_request_publish(ashlar_request* request, uint32_t missing, const ashlar_computed_run* computed,
                               uint8_t* outcome) {
  return Guarded([&] {
    return Publish(computed,
                   [&](const engine::ComputedRun& own) { return request->request.Publish(missing, own, outcome); });
  });
}

int32_t ashlar_request_start_publish(ashlar_request* request, uint32_t missing, const ashlar_computed_run* computed,
                                     uint8_t* outcome, ashlar_job** job) {
  return Guarded([&] {
    return Start(job, [&](engine::Job* started) {
      return Publish(computed, [&](const engine::ComputedRun& own) {
        return request->request.StartPublish(missing, own, outcome, started);
      });
    });
  });
}

int32_t ashlar_request_publish_many(ashlar_request* request, const uint32_t* missing,
                                    const ashlar_computed_run* computed, uint32_t count, uint8_t* outcomes) {
  return Guarded([&] {
    return PublishMany(computed, count, [&](const engine::ComputedRun* own) {
      return request->request.Publish(missing, own, count, outcomes);
    });
  });
}

int32_t ashlar_request_start_publish_many(ashlar_request* request, const uint32_t* missing,
                                          const ashlar_computed_run* computed, uint32_t count, uint8_t* outcomes,
                                          ashlar_job** job) {
  return Guarded([&] {
    return Start(job, [&](engine::Job* started) {
      return PublishMany(computed, count, [&](const engine::ComputedRun* own) {
        return request->request.StartPublish(missing, own, count, outcomes, started);
      });
    });
  });
}

void ashlar_request_abandon(ashlar_request* request, uint32_t missing) {
  request->request.Abandon(missing);
}

int32_t ashlar_request_mark_published(ashlar_request* request, uint32_t missing) {
  return Report(request->request.MarkPublished(missing));
}

uint32_t ashlar_request_segments_computed_elsewhere(const ashlar_request* request) {
  return request->request.segments_computed_elsewhere();
}

int32_t ashlar_request_wait_cold(ashlar_request* request, uint32_t timeout_ms) {
  return Report(request->request.WaitCold(timeout_ms));
}

int32_t ashlar_request_start_wait_cold(ashlar_request* request, uint32_t timeout_ms, ashlar_job** job) {
  return Guarded([&] {
    return Start(job,
                 [&](engine::Job* started) { return Report(request->request.StartWaitCold(timeout_ms, started)); });
  });
}

int32_t ashlar_request_look_again(ashlar_request* request, const int32_t* page_table, uint64_t page_count) {
  return Report(request->request.LookAgain(page_table, page_count));
}

int32_t ashlar_request_start_look_again(ashlar_request* request, const int32_t* page_table, uint64_t page_count) {
  return Report(request->request.StartLookAgain(page_table, page_count));
}

int32_t ashlar_request_look_again_groups(ashlar_request* request, const ashlar_page_table* page_tables,
                                         uint32_t count) {
  return Guarded([&] {
    return Report(request->request.LookAgain(TablesOf("look_again.page_tables", page_tables, count).data(), count));
  });
}

int32_t ashlar_request_start_look_again_groups(ashlar_request* request, const ashlar_page_table* page_tables,
                                               uint32_t count) {
  return Guarded([&] {
    const auto tables = TablesOf("look_again.page_tables", page_tables, count);
    return Report(request->request.StartLookAgain(tables.data(), count));
  });
}

int32_t ashlar_request_admit(ashlar_request* request, uint32_t own_pages, ashlar_page_shortage* shortage) {
  engine::PageShortage found;
  const int32_t code = Report(request->request.Admit(own_pages, &found));
  if (shortage == nullptr) return code;
  const ashlar_page_shortage own = {sizeof own, found.needed, found.free, found.reclaimable, found.held};
  const int32_t written = Write(own, shortage);
  return code == ASHLAR_OK ? written : code;
}

int32_t ashlar_request_shared_segment(const ashlar_request* request, uint32_t index, ashlar_shared_segment* out) {
  const engine::AdmittedPages& pages = request->request.admitted();
  const bool prefix = index == ASHLAR_STEP_OF_PREFIX;
  if (!prefix && index >= pages.segment_count) return OutOfRange("index", index, pages.segment_count, "segments");
  const engine::SharedSegment& segment = prefix ? pages.prefix : pages.segments[index];
  const ashlar_shared_segment own = {sizeof own,        segment.first_slot, segment.first_token,
                                     segment.end_token, segment.pages,      segment.page_count};
  return Write(own, out);
}

const int32_t* ashlar_request_own_pages(const ashlar_request* request, uint64_t* count) {
  const engine::AdmittedPages& pages = request->request.admitted();
  if (count != nullptr) *count = pages.own_page_count;
  return pages.own_pages;
}

int32_t ashlar_request_wait_layer(ashlar_request* request, uint32_t layer) {
  return Report(request->request.WaitLayer(layer));
}

int32_t ashlar_request_poll_layer(ashlar_request* request, uint32_t layer) {
  return Report(request->request.PollLayer(layer));
}

int32_t ashlar_request_tuple(ashlar_request* request, uint32_t step, uint32_t layer, ashlar_tuple* out) {
  engine::Tuple tuple;
  if (const int32_t code = Report(request->request.StepTuple(step, layer, &tuple)); code != ASHLAR_OK) return code;
  const ashlar_tuple own = {sizeof own,
                            tuple.head_count,
                            static_cast<uint32_t>(tuple.transition_dtype),
                            static_cast<uint32_t>(tuple.state_dtype),
                            tuple.position,
                            tuple.conv_tail};
  return Write(own, out);
}

int32_t ashlar_request_head(ashlar_request* request, uint32_t step, uint32_t layer, uint32_t head, ashlar_head* out) {
  engine::Tuple tuple;
  if (const int32_t code = Report(request->request.StepTuple(step, layer, &tuple)); code != ASHLAR_OK) return code;
  if (head >= tuple.head_count) return OutOfRange("head", head, tuple.head_count, "heads");
  const engine::Head& of = tuple.heads[head];
  const ashlar_head own = {sizeof own,       static_cast<uint32_t>(of.form), of.rank, of.transition, of.state,
                           of.state_exponent};
  return Write(own, out);
}

int32_t ashlar_request_advance(ashlar_request* request, const ashlar_layer_advance* advance) {
  return Guarded([&] { return Advance(request, advance); });
}

int32_t ashlar_request_finish(ashlar_request* request) {
  return Report(request->request.Finish());
}

int32_t ashlar_request_poll_finish(ashlar_request* request) {
  return Report(request->request.PollFinish());
}

int32_t ashlar_request_move(ashlar_request* request, const int32_t* page_table, uint64_t page_count) {
  return Report(request->request.Move(page_table, page_count));
}

int32_t ashlar_request_move_groups(ashlar_request* request, const ashlar_page_table* page_tables, uint32_t count) {
  return Guarded(
      [&] { return Report(request->request.Move(TablesOf("move.page_tables", page_tables, count).data(), count)); });
}

int32_t ashlar_request_drop_segments(ashlar_request* request, const uint32_t* segments, uint32_t count) {
  return Report(request->request.DropSegments(segments, count));
}

int32_t ashlar_request_pages_kept(const ashlar_request* request) {
  return request->request.pages_kept() ? 1 : 0;
}

void ashlar_request_cancel(ashlar_request* request) {
  request->request.Cancel();
}

int32_t ashlar_request_poll_quiesced(ashlar_request* request) {
  return Report(request->request.PollQuiesced());
}

void ashlar_request_release(ashlar_request* request) {
  request->request.Release();
}

uint64_t ashlar_request_plan_bytes(const ashlar_request* request, uint8_t* out, uint64_t capacity) {
  return request->request.PlanBytes(out, capacity);
}

int32_t ashlar_job_wait(ashlar_job* job) {
  return Report(job->job.Wait());
}

int32_t ashlar_job_poll(ashlar_job* job) {
  return Report(job->job.Poll());
}

int32_t ashlar_job_result(ashlar_job* job) {
  return Report(job->job.Result());
}

void ashlar_job_end(ashlar_job* job) {
  delete job;
}
