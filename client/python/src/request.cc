// SPDX-License-Identifier: Apache-2.0
// Request in Python: a prompt that is being assembled.
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>

#include "client/python/src/handles.h"
#include "client/python/src/inputs.h"
#include "kernels/dtype.h"

namespace ashlar::python {
namespace {

using engine::Code;

// `copies`: (position, array) pairs. `kept` keeps their arrays alive.
std::vector<engine::StateCopy> ReadCopies(nb::handle copies, const LinearWidths& widths, std::deque<Strided>& kept) {
  std::vector<engine::StateCopy> wanted;
  for (const nb::handle item : Elements("copies", copies, "a sequence of (position, array)")) {
    const std::string name = At("copies", wanted.size());
    const nb::list pair = Elements(name, item, "a pair of position and array");
    if (nb::len(pair) != 2) throw Refused(name, "expected a pair of position and array");
    const uint64_t position = Whole<uint64_t>(name + ".position", pair[0]);
    const Strided& array = kept.emplace_back(ArrayOf(name + ".state", pair[1]));
    wanted.push_back({position, StateOf(name + ".state", array, std::nullopt, widths)});
  }
  return wanted;
}

Verdict Advance(PyRequest& self, nb::handle layer, nb::handle begin, nb::handle end, nb::handle state, nb::handle q,
                nb::handle k, nb::handle v, nb::handle g, nb::handle beta, nb::handle out, nb::handle exponents,
                nb::handle copies, nb::handle norm_epsilon, nb::handle q_scale) {
  const auto number = Whole<uint32_t>("layer", layer);
  const LinearWidths& widths = self.model->description.Linear(number);
  const GivenRows rows(q, k, v, g, beta, out);
  engine::LayerAdvance advance{.layer = number,
                               .begin = Whole<uint64_t>("begin", begin),
                               .end = Whole<uint64_t>("end", end),
                               .inputs = RowsFrom(rows, widths)};
  advance.inputs.norm_epsilon = static_cast<float>(Real("norm_epsilon", norm_epsilon));
  advance.inputs.q_scale = static_cast<float>(Real("q_scale", q_scale));
  const Strided running = ArrayOf("state", state);
  const std::optional<Exponents> scaled = OptionalExponents("exponents", exponents);
  advance.state = StateOf("state", running, scaled, widths);
  TakeOutput(rows.out, advance.inputs, widths, &advance.out, &advance.out_stride);
  std::deque<Strided> kept;
  const std::vector<engine::StateCopy> wanted = ReadCopies(copies, widths, kept);
  advance.copies = wanted.data();
  advance.copy_count = static_cast<uint32_t>(wanted.size());
  return VerdictOf(self.request.WithoutGil([&](engine::Request& request) { return request.Advance(advance); }));
}

// Writes one head's transition in the family's own form, and dense ones in the state's order (ashlar.LinearTensors).
void WriteTransition(const engine::Layer& layer, const engine::Tuple& tuple, const engine::Head& head, float* out,
                     uint64_t numbers) {
  const bool matrix = NaturalForm(layer.family) == TransitionForm::kDense;
  const uint64_t d_k = layer.d_k;
  const auto* const floats = static_cast<const float*>(head.transition);
  if (head.form == TransitionForm::kZero) {
    const float infinity = std::numeric_limits<float>::infinity();
    const float decayed = NaturalForm(layer.family) == TransitionForm::kElementwise ? infinity : -infinity;
    std::fill_n(out, numbers, matrix ? 0.0F : decayed);
  } else if (head.form == TransitionForm::kDense) {
    for (uint64_t i = 0; i < numbers; ++i) {
      out[i] = kernels::ReadElement(tuple.transition_dtype, head.transition, static_cast<int64_t>(i));
    }
  } else if (head.form == TransitionForm::kLowRank) {
    const auto factor = [&](uint64_t index) {
      return kernels::ReadElement(tuple.transition_dtype, floats + d_k, static_cast<int64_t>(index));
    };
    const auto rank = static_cast<uint64_t>(head.rank);
    for (uint64_t i = 0; i < d_k; ++i) {
      for (uint64_t j = 0; j < d_k; ++j) {
        double sum = i == j ? floats[i] : 0.0;
        for (uint64_t r = 0; r < rank; ++r) sum += double{factor(r * d_k + i)} * factor((rank + r) * d_k + j);
        out[layer.order == StateOrder::kKeyFirst ? i * d_k + j : j * d_k + i] = static_cast<float>(sum);
      }
    }
  } else {
    std::copy_n(floats, numbers, out);
  }
}

bool ReadTuple(PyRequest& self, nb::handle step, nb::handle layer, nb::handle state, nb::handle transition) {
  const auto number = Whole<uint32_t>("layer", layer);
  const LinearWidths& widths = self.model->description.Linear(number);
  if (widths.opaque) throw Refused("layer", "an opaque layer has no tuples");
  const Strided states = ArrayOf("state", state), transitions = ArrayOf("transition", transition);
  auto* const state_out = DataOf<float>("state", states, widths.state);
  auto* const transition_out = DataOf<float>("transition", transitions, widths.transition);
  engine::Tuple tuple;
  if (Checked(self.request->StepTuple(Whole<uint32_t>("step", step), number, &tuple)) != Code::kOk) return false;
  const uint64_t width = widths.state / widths.heads, numbers = widths.transition / widths.heads;
  for (uint64_t h = 0; h < widths.heads; ++h) {
    const engine::Head& head = tuple.heads[h];
    for (uint64_t i = 0; i < width; ++i) {
      const float value = kernels::ReadElement(tuple.state_dtype, head.state, static_cast<int64_t>(i));
      state_out[h * width + i] = std::ldexp(value, head.state_exponent);
    }
    WriteTransition(self.model->description.model().layers[number], tuple, head, transition_out + h * numbers, numbers);
  }
  return true;
}

nb::list Missing(const PyRequest& self) {
  uint32_t count = 0;
  const engine::Run* const runs = self.request->missing(&count);
  nb::list all;
  for (uint32_t i = 0; i < count; ++i) {
    const engine::Run& run = runs[i];
    nb::dict out;
    out["tokens"] = std::vector<int32_t>(run.tokens, run.tokens + run.token_count);
    out["segment"] = run.segment;
    out["capture_begin"] = run.capture_begin;
    out["capture_end"] = run.capture_end;
    out["transition"] = run.transition;
    all.append(out);
  }
  return all;
}

// The fields of ashlar.Step, in order.
nb::list StepsOf(const PyPlan& self) {
  nb::list steps;
  for (const engine::Step& step : self.steps) {
    const bool of_segment = step.kind != engine::StepKind::kCompute && step.segment != engine::Step::kPrefix;
    steps.append(nb::make_tuple(static_cast<int>(step.kind), step.begin, step.end, step.capture,
                                of_segment ? nb::cast(step.segment) : nb::object(nb::none())));
  }
  return steps;
}

// The fields of ashlar.Segment, in order.
nb::list SegmentsOf(const PyPlan& self) {
  nb::list segments;
  for (const engine::Segment& segment : self.segments) {
    const bool hit = segment.reason == 0;
    segments.append(nb::make_tuple(segment.start, segment.tokens, segment.bytes,
                                   hit ? nb::object(nb::none()) : nb::cast(engine::MissName(segment.reason)),
                                   hit ? nb::cast(engine::TierName(segment.tier)) : nb::object(nb::none()),
                                   segment.used));
  }
  return segments;
}

nb::object PrefixTierOf(const PyPlan& self) {
  if (self.plan.prefix_tokens == 0) return nb::none();
  return nb::cast(engine::TierName(self.plan.prefix_tier));
}

// One computed run, and the objects that keep its arrays alive.
struct RunOfArrays {
  RunOfArrays(const std::string& of, const PyRequest& self, nb::handle its_missing, nb::handle linear,
              nb::handle page_table, nb::handle first_position)
      : missing(Whole<uint32_t>(of + "missing", its_missing)),
        view(of + "linear", linear, self.model->description, RunAt(of, self, missing).transition),
        pages(of + "page_table", page_table, self.model->groups) {
    run = {.linear = view.tensors.data(),
           .linear_count = static_cast<uint32_t>(view.tensors.size()),
           .first_position = Whole<uint64_t>(of + "first_position", first_position)};
    pages.Put(run);
  }
  static const engine::Run& RunAt(const std::string& of, const PyRequest& self, uint32_t missing) {
    uint32_t count = 0;
    const engine::Run* const runs = self.request->missing(&count);
    if (missing >= count)
      throw Refused(of + "missing", "out of range; the request has " + std::to_string(count) + " missing runs");
    return runs[missing];
  }

  const uint32_t missing;
  LinearTensorsView view;
  PageTables pages;
  engine::ComputedRun run;
};

std::string Publish(PyRequest& self, nb::handle missing, nb::handle linear, nb::handle page_table,
                    nb::handle first_position) {
  const RunOfArrays computed("", self, missing, linear, page_table, first_position);
  uint8_t outcome = 0;
  Checked(self.request.WithoutGil(
      [&](engine::Request& request) { return request.Publish(computed.missing, computed.run, &outcome); }));
  return engine::PublishName(outcome);
}

// `runs`: of ashlar.ComputedRun.
std::vector<std::string> PublishMany(PyRequest& self, nb::handle runs) {
  std::deque<RunOfArrays> arrays;
  std::vector<uint32_t> missing;
  std::vector<engine::ComputedRun> computed;
  for (const nb::handle item : Elements("runs", runs, "a sequence of ashlar.ComputedRun")) {
    const std::string name = At("runs", arrays.size());
    CheckClass(name, item, "ashlar.request", "ComputedRun");
    arrays.emplace_back(name + ".", self, item.attr("missing"), item.attr("linear"), item.attr("page_table"),
                        item.attr("first_position"));
    missing.push_back(arrays.back().missing);
    computed.push_back(arrays.back().run);
  }
  const auto count = static_cast<uint32_t>(missing.size());
  std::vector<uint8_t> outcomes(count);
  Checked(self.request.WithoutGil([&](engine::Request& request) {
    return request.Publish(missing.data(), computed.data(), count, outcomes.data());
  }));
  std::vector<std::string> names;
  for (const uint8_t outcome : outcomes) names.emplace_back(engine::PublishName(outcome));
  return names;
}

// A plan stays as it was where the verdict is OK.
template <engine::Status (engine::Request::*call)() noexcept>
Verdict Waiting(PyRequest& self) {
  const engine::Status status = self.request.WithoutGil([](engine::Request& request) { return (request.*call)(); });
  if (status.code != Code::kOk) self.plan.reset();
  return VerdictOf(status);
}

// `name`: the name of the call's number.
constexpr char kLayer[] = "layer", kTimeout[] = "timeout_ms";
template <const char* name, engine::Status (engine::Request::*call)(uint32_t) noexcept>
Verdict WaitingFor(PyRequest& self, nb::handle given) {
  const auto number = Whole<uint32_t>(name, given);
  const engine::Status status =
      self.request.WithoutGil([number](engine::Request& request) { return (request.*call)(number); });
  if (status.code != Code::kOk) self.plan.reset();
  return VerdictOf(status);
}

// The job does not keep the request alive, because ending the request ends the wait.
std::unique_ptr<PyJob> StartWaitCold(PyRequest& self, nb::handle timeout_ms) {
  auto job = std::make_unique<PyJob>();
  Checked(self.request->StartWaitCold(Whole<uint32_t>("timeout_ms", timeout_ms), &job->job));
  self.plan.reset();
  return job;
}

Verdict WaitForJob(PyJob& self) {
  engine::Status status;
  {
    nb::gil_scoped_release release;
    status = self.job.Wait();
  }
  return VerdictOf(status);
}

// Returns or raises as the call would if it had not been started. A lost daemon gives None if the call has no error for
// it.
nb::object ResultOfJob(const PyJob& self, bool none_if_unavailable) {
  const engine::Status status = self.job.Result();
  if (none_if_unavailable && status.code == Code::kUnavailable) return nb::none();
  return nb::cast(VerdictOf(status));
}

// In one page table, or one per group of layers.
template <engine::Status (engine::Request::*call)(const int32_t*, uint64_t) noexcept,
          engine::Status (engine::Request::*call_in)(const engine::PageTable*, uint32_t) noexcept>
Verdict InPages(PyRequest& self, nb::handle page_table) {
  const PageTables tables("page_table", page_table, self.model->groups);
  engine::Prompt pages;
  tables.Put(pages);
  const engine::Status status = self.request.WithoutGil([&](engine::Request& request) {
    return pages.page_table_count > 0 ? (request.*call_in)(pages.page_tables, pages.page_table_count)
                                      : (request.*call)(pages.page_table, pages.page_count);
  });
  self.plan.reset();
  return VerdictOf(status);
}

void End(PyRequest& self) {
  self.plan.reset();
  self.request.Close(std::make_shared<engine::Request>());
}

nb::bytes PlanBytes(const PyRequest& self) {
  std::vector<uint8_t> bytes(self.request->PlanBytes(nullptr, 0));
  self.request->PlanBytes(bytes.data(), bytes.size());
  return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// Copies the convolution's tail after a cached step. Returns None without a convolution.
nb::object ConvTail(PyRequest& self, nb::handle step, nb::handle layer) {
  const auto number = Whole<uint32_t>("layer", layer);
  const LinearWidths& widths = self.model->description.Linear(number);
  engine::Tuple tuple;
  if (Checked(self.request->StepTuple(Whole<uint32_t>("step", step), number, &tuple)) != Code::kOk ||
      tuple.conv_tail == nullptr) {
    return nb::none();
  }
  return nb::bytes(static_cast<const char*>(tuple.conv_tail), widths.conv_tail_bytes);
}

}  // namespace

nb::object PlanOf(nb::pointer_and_handle<PyRequest> self) {
  if (self.p->plan.is_valid()) return self.p->plan;
  const engine::Plan& plan = self.p->request->plan();
  auto [object, copy] = MakeObject<PyPlan>(self.h.type().attr("plan_type"));
  copy->plan = plan;
  copy->steps.assign(plan.steps, plan.steps + plan.step_count);
  copy->segments.assign(plan.segments, plan.segments + plan.segment_count);
  if (plan.step_count > 0) self.p->plan = object;  // otherwise it may not be known yet
  return object;
}

LinearTensorsView::LinearTensorsView(const std::string& name, nb::handle layers, const ModelDescription& model,
                                     bool transitions) {
  for (const nb::handle item : Elements(name, layers, "a sequence of ashlar.LinearTensors")) {
    const std::string field = At(name, tensors.size());
    CheckClass(field, item, "ashlar.request", "LinearTensors");
    engine::LinearTensors out{.layer = Whole<uint32_t>(field + ".layer", item.attr("layer"))};
    const LinearWidths& widths = model.Linear(out.layer, field + ".layer");
    // Null if there is none.
    const auto take = [&](const char* part) -> const Strided* {
      const nb::object value = item.attr(part);
      return value.is_none() ? nullptr : &kept.emplace_back(ArrayOf(field + "." + part, value));
    };
    const Strided* const state = take("state");
    if (state == nullptr) throw Refused(field + ".state", "required");
    if (widths.opaque) {
      out.state = BytesOf(field + ".state", *state, widths.state);
      tensors.push_back(out);
      continue;
    }
    CheckType(field + ".state", *state, widths.state_dtype);
    const RowsOfElements heads = ElementRows(field + ".state", *state, widths.heads, widths.state / widths.heads);
    out.state = heads.data;
    out.state_head_stride = heads.stride;
    if (const Strided* const tail = take("conv_tail"); tail != nullptr) {
      if (tail->itemsize() > 1) CheckType(field + ".conv_tail", *tail, widths.conv_dtype);  // otherwise bytes
      const uint64_t bytes = tail->itemsize() * tail->size();
      if (bytes != widths.conv_tail_bytes) {
        throw Refused(field + ".conv_tail",
                      std::to_string(bytes) + " bytes; expected " + std::to_string(widths.conv_tail_bytes));
      }
      const uint64_t rows = widths.conv_rows;
      const RowsOfElements found = ElementRows(field + ".conv_tail", *tail, rows, tail->size() / rows);
      if (tail->itemsize() == 1 && found.stride != 0) throw Refused(field + ".conv_tail", "its bytes are not dense");
      out.conv_tail = found.data;
      out.conv_row_stride = found.stride;
    } else if (widths.conv_tail_bytes > 0) {
      throw Refused(field + ".conv_tail", "required");
    }
    if (const Strided* const exponents = take("exponents"); exponents != nullptr) {
      out.state_exponents = DataOf<int32_t>(field + ".exponents", *exponents, widths.heads);
    }
    if (transitions) {
      const Strided* const transition = take("transition");
      if (transition == nullptr) throw Refused(field + ".transition", "required");
      out.transition = DataOf<float>(field + ".transition", *transition, widths.transition);
      if (const Strided* const decay = take("decay"); decay != nullptr) {
        out.decay = DataOf<float>(field + ".decay", *decay, widths.decays);
      }
    }
    tensors.push_back(out);
  }
}

namespace {

void BindPlan(nb::module_& module) {
  nb::class_<PyPlan>(module, "Plan")
      .def("raw_steps", &StepsOf)
      .def("raw_segments", &SegmentsOf)
      .def_prop_ro(
          "prefix_tokens", [](const PyPlan& self) { return self.plan.prefix_tokens; },
          "Tokens of the first step, if it is a prefix that is not a segment.")
      .def_prop_ro(
          "prefix_span_tokens", [](const PyPlan& self) { return self.plan.prefix_span_tokens; },
          "Number of the prefix's last tokens whose states the cache rebuilds from a buffered span.")
      .def_prop_ro(
          "shared_prefix_tokens", [](const PyPlan& self) { return self.plan.shared_prefix_tokens; },
          "With `share_in_place`: number of the prefix's first tokens that are in shared pages.")
      .def_prop_ro(
          "cached_tokens", [](const PyPlan& self) { return self.plan.cached_tokens; },
          "Tokens of all steps that are not computed.")
      .def_prop_ro(
          "own", [](const PyPlan& self) { return self.plan.own; }, "Whether the prefix is the conversation's own.")
      .def_prop_ro(
          "exact", [](const PyPlan& self) { return self.plan.exact; },
          "Whether the computed tokens are exact: the plan has no interior and no composed prefix.")
      .def_prop_ro("prefix_tier", &PrefixTierOf, nb::sig("def prefix_tier(self) -> str | None"),
                   "The slowest tier that a part of the prefix is in; None: no prefix.");
  nb::class_<PyJob>(module, "Job")
      .def("poll", [](PyJob& self) { return VerdictOf(self.job.Poll()); })
      .def("wait", &WaitForJob)
      .def("result", &ResultOfJob, nb::arg("none_if_unavailable"),
           nb::sig("def result(self, none_if_unavailable: bool) -> Verdict | None"));
}

void Abandon(PyRequest& self, nb::handle missing) {
  const auto number = Whole<uint32_t>("missing", missing);
  self.request.WithoutGil([number](engine::Request& request) { return request.Abandon(number), true; });
}

void MarkPublished(PyRequest& self, nb::handle missing) {
  const auto number = Whole<uint32_t>("missing", missing);
  Checked(self.request.WithoutGil([number](engine::Request& request) { return request.MarkPublished(number); }));
}

Verdict DropSegments(PyRequest& self, nb::handle segments) {
  const std::vector<uint32_t> numbers = WholeNumbers<uint32_t>("segments", segments);
  self.plan.reset();
  return VerdictOf(self.request->DropSegments(numbers.data(), static_cast<uint32_t>(numbers.size())));
}

// None, or the fields of ashlar.PageShortage, in order.
nb::object Admit(PyRequest& self, nb::handle own_pages) {
  const auto number = Whole<uint32_t>("own_pages", own_pages);
  engine::PageShortage shortage;
  const engine::Status status =
      self.request.WithoutGil([&](engine::Request& request) { return request.Admit(number, &shortage); });
  if (Checked(status) != Code::kNoPages) return nb::none();
  return nb::make_tuple(shortage.needed, shortage.free, shortage.reclaimable, shortage.held);
}

std::vector<int32_t> PrefixPages(const PyRequest& self) {
  const engine::SharedSegment& prefix = self.request->admitted().prefix;
  return {prefix.pages, prefix.pages + prefix.page_count};
}

// The fields of ashlar.SharedSegment, in order.
nb::list SharedSegments(const PyRequest& self) {
  const engine::AdmittedPages& admitted = self.request->admitted();
  nb::list segments;
  for (uint32_t i = 0; i < admitted.segment_count; ++i) {
    const engine::SharedSegment& segment = admitted.segments[i];
    const std::vector<int32_t> pages(segment.pages, segment.pages + segment.page_count);
    segments.append(nb::make_tuple(segment.first_slot, segment.first_token, segment.end_token, pages));
  }
  return segments;
}

std::vector<int32_t> OwnPages(const PyRequest& self) {
  const engine::AdmittedPages& admitted = self.request->admitted();
  return {admitted.own_pages, admitted.own_pages + admitted.own_page_count};
}

// raw_: the methods that ashlar.Request wraps with other arguments.
void BindSegments(nb::class_<PyRequest>& request) {
  using engine::Request;
  request.def("raw_missing", &Missing)
      .def("raw_publish", &Publish, Any("missing"), Any("linear"), Any("page_table"), Any("first_position"))
      .def("raw_publish_many", &PublishMany, Any("runs"))
      .def_prop_ro(
          "segments_computed_elsewhere",
          [](const PyRequest& self) { return self.request->segments_computed_elsewhere(); },
          "Number of segments that other engines compute for a request begun with `cold_parallel`. If it is not 0, "
          "call `wait_cold` and `look_again`.")
      .def(
          "wait_cold", &WaitingFor<kTimeout, &Request::WaitCold>, Any("timeout_ms"),
          nb::sig("def wait_cold(self, timeout_ms: int) -> Verdict"),
          "Waits for the segments that other engines compute (`segments_computed_elsewhere`), at most `timeout_ms`.\n\n"
          "OK: all were published, or have become this engine's. RESTART: some engines failed; their segments are "
          "appended to `missing`: compute them and call it again. PENDING: timeout; call it again, or `look_again`, "
          "which uses what was published.")
      .def("raw_start_wait_cold", &StartWaitCold, Any("timeout_ms"))
      .def("abandon", &Abandon, Any("missing"), nb::sig("def abandon(self, missing: int) -> None"),
           "Releases the run missing[missing] without publishing it. For work of `Cache.serve_prefill`: also reports "
           "that this engine can never compute it.")
      .def("mark_published", &MarkPublished, Any("missing"), nb::sig("def mark_published(self, missing: int) -> None"),
           "Reports that another process has published the run, for work of `Cache.serve_prefill` on a cache without "
           "pages. RuntimeError: the request is no such work.")
      .def("look_again", &InPages<&Request::LookAgain, &Request::LookAgain>, Any("page_table"),
           nb::sig("def look_again(self, page_table: object = None) -> Verdict"),
           "Looks the prompt up again and lands the hits in these pages; None: in the same pages. Segments that miss "
           "again are computed as part of the plan, and `missing` is empty.")
      .def("raw_admit", &Admit, Any("own_pages"))
      .def("raw_shared_segments", &SharedSegments)
      .def_prop_ro("shared_prefix_pages", &PrefixPages, nb::sig("def shared_prefix_pages(self) -> list[int]"),
                   "The pages of the prefix's shared blocks, from position 0; empty before `admit`.")
      .def_prop_ro("own_pages", &OwnPages, nb::sig("def own_pages(self) -> list[int]"),
                   "The request's own pages, in the order in which `admit` added them; empty before `admit`.")
      .def("drop_segments", &DropSegments, Any("segments"),
           nb::sig("def drop_segments(self, segments: collections.abc.Sequence[int]) -> Verdict"),
           "Removes segments that another rank has missed from the plan. Call it after `finish`. Returns RESTART.");
}

void BindAssembly(nb::class_<PyRequest>& request) {
  using engine::Request;
  request
      .def_prop_ro("plan", &PlanOf,
                   "The current plan. It changes when a call returns RESTART or OTHER_PAGES, and with `look_again`.")
      .def("raw_advance", &Advance, Any("layer"), Any("begin"), Any("end"), Any("state"), Any("q"), Any("k"), Any("v"),
           Any("g"), Any("beta"), Any("out"), Any("exponents"), Any("copies"), Any("norm_epsilon"), Any("q_scale"))
      .def("wait_plan", &Waiting<&Request::WaitPlan>, "Waits until the plan is known, after `Cache.start_begin`.")
      .def("poll_plan", &Waiting<&Request::PollPlan>, "Like `wait_plan`, but returns PENDING instead of waiting.")
      .def("wait_layer", &WaitingFor<kLayer, &Request::WaitLayer>, Any("layer"),
           nb::sig("def wait_layer(self, layer: int) -> Verdict"),
           "Waits until a layer's cached keys and values are in their pages, and its tuples can be read. RESTART: they "
           "will not arrive; abandon the plan and call `finish`.")
      .def("poll_layer", &WaitingFor<kLayer, &Request::PollLayer>, Any("layer"),
           nb::sig("def poll_layer(self, layer: int) -> Verdict"),
           "Like `wait_layer`, but returns PENDING instead of waiting.")
      .def("read_tuple", &ReadTuple, Any("step"), Any("layer"), Any("state"), Any("transition"),
           nb::sig("def read_tuple(self, step: int, layer: int, state: object, transition: object) -> bool"),
           "Copies the tuple of a cached step, for engines that compose it themselves. Call `wait_layer` first.\n\n"
           "`step`: index into the plan's steps. Writes `state` and `transition`, which are float32 and have the "
           "shapes of `LinearTensors`. Transitions that were stored in a smaller form are expanded. Returns False if "
           "the tuple is no longer available; then call `finish`.")
      .def("conv_tail", &ConvTail, Any("step"), Any("layer"),
           nb::sig("def conv_tail(self, step: int, layer: int) -> bytes | None"),
           "Returns the convolution's last inputs after a cached step, in the form of `LinearTensors`. Call `advance` "
           "or `wait_layer` first. None: the layer has not landed, or has no convolution.")
      .def("finish", &Waiting<&Request::Finish>,
           "Waits for the verdict; emit no token before it. OK: all cached objects were valid, and the pages are the "
           "engine's. RESTART: compute the new plan in a fresh state and call `finish` again. OTHER_PAGES: `move` "
           "first.")
      .def("poll_finish", &Waiting<&Request::PollFinish>, "Like `finish`, but returns PENDING instead of waiting.")
      .def("move", &InPages<&Request::Move, &Request::Move>, Any("page_table"),
           nb::sig("def move(self, page_table: object) -> Verdict"),
           "Continues in these pages after OTHER_PAGES. The plan then takes nothing from the cache.")
      .def_prop_ro(
          "pages_kept", [](const PyRequest& self) { return self.request->pages_kept(); },
          "Whether the request's former pages belong to the cache, after OTHER_PAGES.")
      .def("plan_bytes", &PlanBytes, "Returns the plan for another process (`Cache.land`); empty: no hit.");
}

void BindEnd(nb::class_<PyRequest>& request) {
  using engine::Request;
  request
      .def(
          "cancel",
          [](PyRequest& self) {
            self.plan.reset();
            self.request->Cancel();
          },
          "Cancels the landing. Does not wait.")
      .def("poll_quiesced", &Waiting<&Request::PollQuiesced>,
           "Returns OK if nothing can write to the pages any longer: they are the engine's, and "
           "`Cache.take_quiesced_pages` does not return them. Otherwise PENDING. RuntimeError: it has returned them.")
      .def(
          "release", [](PyRequest& self) { self.request->Release(); },
          "Releases the lease. The request can still be passed to `Cache.commit`.")
      .def("end", &End,
           "Cancels pending calls and releases the lease. Does not wait. `Cache.take_quiesced_pages` returns its pages "
           "if the daemon may still write to them.");
}

}  // namespace

void BindRequest(nb::module_& module) {
  BindPlan(module);
  nb::class_<PyRequest> request(module, "Request");
  BindSegments(request);
  BindAssembly(request);
  BindEnd(request);
}

}  // namespace ashlar::python
