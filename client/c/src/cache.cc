// SPDX-License-Identifier: Apache-2.0
// The calls on a cache.
#include <memory>

#include "client/c/src/boundary.h"

namespace ashlar::c {
namespace {

using Requests = std::vector<engine::Request>;

// Returns requests once all have begun: all, or none. Requests that need other pages have begun.
int32_t HandOut(const engine::Status& status, Requests requests, ashlar_request** out) {
  const int32_t code = Report(status);
  if (code != ASHLAR_OK && code != ASHLAR_OTHER_PAGES) return code;
  std::vector<std::unique_ptr<ashlar_request>> handles;
  for (engine::Request& request : requests) {
    handles.push_back(std::make_unique<ashlar_request>());
    handles.back()->request = std::move(request);
  }
  for (size_t i = 0; i < handles.size(); ++i) out[i] = handles[i].release();
  return code;
}

using BeginCall = engine::Status (engine::Cache::*)(const engine::Prompt*, uint32_t, engine::Request*) noexcept;

int32_t Begin(ashlar_cache* cache, const ashlar_prompt* given, uint32_t count, ashlar_request** out, BeginCall call) {
  if (out == nullptr && count > 0) throw Refused("requests: null");
  const std::vector<ashlar_prompt> prompts = ReadAll("prompts", given, count);
  std::vector<std::vector<engine::Media>> media;
  std::vector<std::vector<engine::PageTable>> tables;
  std::vector<engine::Prompt> own;
  for (const ashlar_prompt& prompt : prompts) {
    const std::string name = "prompts[" + std::to_string(own.size()) + "]";
    media.push_back(MediaOf(name + ".media", prompt.media, prompt.media_count));
    tables.push_back(TablesOf(name + ".page_tables", prompt.page_tables, prompt.page_table_count));
    engine::Prompt to{.tokens = prompt.tokens,
                      .token_count = prompt.token_count,
                      .segment_lengths = prompt.segment_lengths,
                      .segment_count = prompt.segment_count,
                      .page_table = prompt.page_table,
                      .page_count = prompt.page_count,
                      .needed_in_ms = prompt.needed_in_ms,
                      .fill = prompt.fill != 0,
                      .media = media.back().data(),
                      .media_count = prompt.media_count,
                      .cold_parallel = prompt.cold_parallel != 0,
                      .page_tables = tables.back().data(),
                      .page_table_count = prompt.page_table_count,
                      .store_only = prompt.store_only != 0,
                      .salt = prompt.salt,
                      .salt_bytes = prompt.salt_bytes,
                      .rotary_shifts = prompt.rotary_shifts};
    std::memcpy(to.conversation, prompt.conversation, sizeof to.conversation);
    own.push_back(to);
  }
  Requests requests(count);
  const engine::Status status = (cache->cache.*call)(own.data(), count, requests.data());
  return HandOut(status, std::move(requests), out);
}

using LandCall = engine::Status (engine::Cache::*)(const engine::PlanToLand*, uint32_t, engine::Request*) noexcept;

int32_t Land(ashlar_cache* cache, const ashlar_plan_to_land* given, uint32_t count, ashlar_request** out,
             LandCall call) {
  if (out == nullptr && count > 0) throw Refused("requests: null");
  std::vector<std::vector<engine::PageTable>> tables;
  std::vector<engine::PlanToLand> own;
  for (const ashlar_plan_to_land& plan : ReadAll("plans", given, count)) {
    const std::string name = "plans[" + std::to_string(own.size()) + "].page_tables";
    tables.push_back(TablesOf(name, plan.page_tables, plan.page_table_count));
    own.push_back({plan.plan, plan.plan_bytes, plan.page_table, plan.page_count, plan.present_tokens,
                   tables.back().data(), plan.page_table_count, plan.rotary_shifts, plan.rotary_shift_count});
  }
  Requests requests(count);
  const engine::Status status = (cache->cache.*call)(own.data(), count, requests.data());
  return HandOut(status, std::move(requests), out);
}

// A text in C++, with the arrays that it points to.
struct OwnText {
  OwnText(const std::string& name, const ashlar_text& given)
      : media(MediaOf(name + ".media", given.media, given.media_count)),
        tables(TablesOf(name + ".page_tables", given.page_tables, given.page_table_count)) {
    for (const ashlar_checkpoint& checkpoint :
         ReadAll(name + ".checkpoints", given.checkpoints, given.checkpoint_count)) {
      const std::string field = name + ".checkpoints[" + std::to_string(checkpoints.size()) + "].linear";
      linear.push_back(TensorsOf(field, checkpoint.linear, checkpoint.linear_count));
      checkpoints.push_back({checkpoint.depth, linear.back().data(), checkpoint.linear_count});
    }
    for (const ashlar_span_rows& rows : ReadAll(name + ".span", given.span, given.span_count)) {
      span.push_back({rows.layer, rows.keys, rows.values, rows.gates, rows.betas, rows.conv_inputs});
    }
    text = {.request = given.request == nullptr ? nullptr : &given.request->request,
            .tokens = given.tokens,
            .token_count = given.token_count,
            .prompt_tokens = given.prompt_tokens,
            .checkpoints = checkpoints.data(),
            .checkpoint_count = given.checkpoint_count,
            .page_table = given.page_table,
            .page_count = given.page_count,
            .span_begin = given.span_begin,
            .span = given.span == nullptr ? nullptr : span.data(),
            .span_count = given.span_count,
            .composed = given.composed != 0,
            .outcomes = given.outcomes,
            .media = media.data(),
            .media_count = given.media_count,
            .page_tables = tables.data(),
            .page_table_count = given.page_table_count,
            .salt = given.salt,
            .salt_bytes = given.salt_bytes};
    std::memcpy(text.conversation, given.conversation, sizeof text.conversation);
  }

  std::vector<engine::Media> media;
  std::vector<engine::PageTable> tables;
  std::vector<std::vector<engine::LinearTensors>> linear;
  std::vector<engine::Checkpoint> checkpoints;
  std::vector<engine::SpanRows> span;
  engine::Text text;
};

template <typename Call>
int32_t Commit(const ashlar_text* given, uint32_t count, Call call) {
  std::vector<std::unique_ptr<OwnText>> own;
  std::vector<engine::Text> texts;
  for (const ashlar_text& text : ReadAll("texts", given, count)) {
    own.push_back(std::make_unique<OwnText>("texts[" + std::to_string(own.size()) + "]", text));
    texts.push_back(own.back()->text);
  }
  return Report(call(texts.data()));
}

}  // namespace
}  // namespace ashlar::c

using namespace ashlar::c;
namespace engine = ashlar::engine;

int32_t ashlar_begin(ashlar_cache* cache, const ashlar_prompt* prompts, uint32_t count, ashlar_request** requests) {
  return Guarded([&] { return Begin(cache, prompts, count, requests, &engine::Cache::Begin); });
}

int32_t ashlar_start_begin(ashlar_cache* cache, const ashlar_prompt* prompts, uint32_t count,
                           ashlar_request** requests) {
  return Guarded([&] { return Begin(cache, prompts, count, requests, &engine::Cache::StartBegin); });
}

int32_t ashlar_land(ashlar_cache* cache, const ashlar_plan_to_land* plans, uint32_t count, ashlar_request** requests) {
  return Guarded([&] { return Land(cache, plans, count, requests, &engine::Cache::Land); });
}

int32_t ashlar_start_land(ashlar_cache* cache, const ashlar_plan_to_land* plans, uint32_t count,
                          ashlar_request** requests) {
  return Guarded([&] { return Land(cache, plans, count, requests, &engine::Cache::StartLand); });
}

int32_t ashlar_compute_alone(ashlar_cache* cache, const ashlar_request* request, const ashlar_alone_layer* layer) {
  return Guarded([&] {
    const ashlar_alone_layer given = Read("layer", layer);
    uint32_t count = 0;
    const engine::Run* const runs = request->request.missing(&count);
    if (given.missing >= count) return OutOfRange("layer.missing", given.missing, count, "missing runs");
    return Report(cache->cache.ComputeAlone({.layer = given.layer,
                                             .inputs = RowsOf("layer.inputs", given.inputs),
                                             .out = given.out,
                                             .out_stride = given.out_stride,
                                             .run = &runs[given.missing],
                                             .state = StateOf("layer.state", given.state),
                                             .transition = given.transition,
                                             .decay = given.decay}));
  });
}

int32_t ashlar_commit(ashlar_cache* cache, const ashlar_text* texts, uint32_t count) {
  return Guarded(
      [&] { return Commit(texts, count, [&](const engine::Text* own) { return cache->cache.Commit(own, count); }); });
}

int32_t ashlar_start_commit(ashlar_cache* cache, const ashlar_text* texts, uint32_t count, ashlar_job** job) {
  return Guarded([&] {
    return Start(job, [&](engine::Job* started) {
      return Commit(texts, count,
                    [&](const engine::Text* own) { return cache->cache.StartCommit(own, count, started); });
    });
  });
}

int32_t ashlar_handoff(ashlar_cache* cache, const ashlar_text* text, const char* node, uint32_t wait_ms) {
  return Guarded([&] {
    const OwnText own("text", Read("text", text));
    return Report(cache->cache.Handoff(own.text, node, wait_ms));
  });
}

int32_t ashlar_start_handoff(ashlar_cache* cache, const ashlar_text* text, const char* node, uint32_t wait_ms,
                             uint8_t* outcome, ashlar_job** job) {
  return Guarded([&] {
    return Start(job, [&](engine::Job* started) {
      const OwnText own("text", Read("text", text));
      return Report(cache->cache.StartHandoff(own.text, node, wait_ms, outcome, started));
    });
  });
}

int32_t ashlar_serve_prefill(ashlar_cache* cache, uint32_t wait_ms, ashlar_request** work) {
  return Guarded([&] {
    if (work == nullptr) throw Refused("work: null");
    *work = nullptr;
    Requests requests(1);
    const engine::Status status = cache->cache.ServePrefill(wait_ms, requests.data());
    return HandOut(status, std::move(requests), work);
  });
}

int32_t ashlar_start_serve_prefill(ashlar_cache* cache, uint32_t wait_ms, ashlar_request** work, ashlar_job** job) {
  return Guarded([&] {
    if (work == nullptr) throw Refused("work: null");
    *work = nullptr;
    auto handle = std::make_unique<ashlar_request>();
    const int32_t code = Start(job, [&](engine::Job* started) {
      return Report(cache->cache.StartServePrefill(wait_ms, &handle->request, started));
    });
    if (code == ASHLAR_OK) *work = handle.release();
    return code;
  });
}

int32_t ashlar_get_stored_segments(const ashlar_cache* cache, ashlar_stored_segments* out) {
  engine::StoredSegments stored;
  cache->cache.StoredSegments(&stored);
  ashlar_stored_segments own = {sizeof own, stored.segments, stored.bytes, stored.own_bytes, {}};
  static_assert(sizeof own.heads == sizeof stored.heads);
  std::memcpy(own.heads, stored.heads, sizeof own.heads);
  return Write(own, out);
}

uint64_t ashlar_take_quiesced_pages(ashlar_cache* cache, int32_t* pages, uint64_t capacity, uint32_t timeout_ms) {
  return cache->cache.TakeQuiescedPages(pages, capacity, timeout_ms);
}

uint64_t ashlar_take_quiesced_pages_of(ashlar_cache* cache, uint32_t group, int32_t* pages, uint64_t capacity,
                                       uint32_t timeout_ms) {
  return cache->cache.TakeQuiescedPages(pages, capacity, timeout_ms, group);
}

uint64_t ashlar_poll_quiesced_pages(ashlar_cache* cache, int32_t* pages, uint64_t capacity) {
  return cache->cache.TakeQuiescedPages(pages, capacity, 0);
}
