// SPDX-License-Identifier: Apache-2.0
// Cache in Python: a session with the daemon, an opened model, and the memory of its pages.
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>

#include "client/engine/handles.h"
#include "client/python/src/handles.h"
#include "client/python/src/inputs.h"

namespace ashlar::python {
namespace {

constexpr uint64_t kMostQuiescedPages = 1 << 20;  // limit of one call

// Reads a fixed number of bytes. For None, the zeros are kept.
template <size_t count>
void ReadBytes(const char* name, nb::handle given, uint8_t (&out)[count], bool optional = true) {
  const std::string bytes = Bytes(name, given);
  if (bytes.empty() && optional) return;
  if (bytes.size() != count) {
    throw Refused(name, std::to_string(bytes.size()) + " bytes were given; expected " + std::to_string(count));
  }
  std::memcpy(out, bytes.data(), count);
}

std::vector<engine::Media> ReadMedia(nb::handle media) {
  std::vector<engine::Media> all;
  for (const nb::handle item : Elements("media", media, "a sequence of (offset, hash)")) {
    const std::string name = At("media", all.size());
    const nb::list pair = Elements(name, item, "a pair of offset and hash");
    if (nb::len(pair) != 2) throw Refused(name, "expected a pair of offset and hash");
    engine::Media out{.offset = Whole<uint64_t>(name, pair[0])};
    ReadBytes(name.c_str(), pair[1], out.hash, false);
    all.push_back(out);
  }
  return all;
}

engine::PagePlace ReadPlace(const std::string& name, nb::handle place) {
  CheckClass(name, place, "ashlar.cache", "PagePlace");
  const auto number = [&](const char* field) { return Whole<uint64_t>(name + "." + field, place.attr(field)); };
  return {.layer = Whole<uint32_t>(name + ".layer", place.attr("layer")),
          .key_offset = number("key_offset"),
          .value_offset = number("value_offset"),
          .page_stride = number("page_stride"),
          .token_stride = number("token_stride"),
          .key_head_stride = number("key_head_stride"),
          .value_head_stride = number("value_head_stride"),
          .key_scale_offset = number("key_scale_offset"),
          .value_scale_offset = number("value_scale_offset"),
          .scale_page_stride = number("scale_page_stride"),
          .scale_token_stride = number("scale_token_stride"),
          .scale_head_stride = number("scale_head_stride")};
}

// The groups of layers, and the lists to which they point.
struct ReadGroups {
  explicit ReadGroups(nb::handle groups) {
    for (const nb::handle group : Elements("groups", groups, "a sequence of ashlar.LayerGroup")) {
      const std::string name = At("groups", all.size());
      CheckClass(name, group, "ashlar.cache", "LayerGroup");
      layers.push_back(WholeNumbers<uint32_t>(name + ".layers", group.attr("layers")));
      const auto number = [&](const char* field) { return Whole<uint32_t>(name + "." + field, group.attr(field)); };
      all.push_back({.page_tokens = number("page_tokens"), .pages = number("pages")});
    }
    for (size_t i = 0; i < all.size(); ++i) {
      all[i].layers = layers[i].data();
      all[i].layer_count = static_cast<uint32_t>(layers[i].size());
    }
  }
  std::vector<std::vector<uint32_t>> layers;
  std::vector<engine::LayerGroup> all;
};

// The options of a cache, and everything to which they point.
struct ReadOptions {
  explicit ReadOptions(nb::handle options)
      : model(std::make_shared<OpenedModel>(options.attr("model"))),
        rpc(Path("rpc_socket", options.attr("rpc_socket"))),
        session(Path("session_socket", options.attr("session_socket"))),
        name(Text("name", options.attr("name"))),
        groups(options.attr("groups")) {
    const auto number = [&](const char* field) { return Whole<uint32_t>(field, options.attr(field)); };
    const auto descriptor = [&](const char* field) {
      return static_cast<int32_t>(WholeBetween(field, options.attr(field), -1, INT32_MAX));
    };
    open.rpc_socket = rpc.c_str();
    open.session_socket = session.c_str();
    open.name = name.c_str();
    open.timeout_ms = number("timeout_ms");
    open.model = model->description.model();
    ReadMemory(options, number, descriptor);
    model->groups = open.memory.kind == engine::MemoryKind::kNone ? 0 : groups.all.size();
    open.capture_tokens = number("capture_tokens");
    open.span_tokens = number("span_tokens");
    open.span_dtype = static_cast<DType>(MemberOf("span_dtype", options.attr("span_dtype"), "ashlar.model", "DType"));
    open.epsilon = Real("epsilon", options.attr("epsilon"));
    open.land_ms = number("land_ms");
    open.quiet_ms = number("quiet_ms");
    if (Flag("compose_in_daemon", options.attr("compose_in_daemon"))) open.compose = engine::ComposeBy::kDaemon;
  }
  ReadOptions(const ReadOptions&) = delete;
  ReadOptions& operator=(const ReadOptions&) = delete;

  std::shared_ptr<OpenedModel> model;
  std::string rpc, session, name;
  ReadGroups groups;
  std::vector<engine::PagePlace> places;
  engine::OpenOptions open;

 private:
  template <typename Number, typename Descriptor>
  void ReadMemory(nb::handle options, Number number, Descriptor descriptor) {
    engine::Memory& memory = open.memory;
    memory.kind = static_cast<engine::MemoryKind>(
        MemberOf("memory_kind", options.attr("memory_kind"), "ashlar.cache", "MemoryKind"));
    memory.pages = number("pages");
    for (const nb::handle place : Elements("places", options.attr("places"), "a sequence of ashlar.PagePlace")) {
      places.push_back(ReadPlace(At("places", places.size()), place));
    }
    if (!places.empty()) memory.places = places.data();
    memory.place_count = static_cast<uint32_t>(places.size());
    memory.bytes = Whole<uint64_t>("memory_bytes", options.attr("memory_bytes"));
    memory.memfd = descriptor("memfd");
    memory.gpu_descriptor = descriptor("gpu_descriptor");
    memory.gpu_data = reinterpret_cast<uint8_t*>(Whole<uintptr_t>("gpu_address", options.attr("gpu_address")));
    ReadBytes("gpu", options.attr("gpu"), memory.gpu);
    memory.groups = groups.all.empty() ? nullptr : groups.all.data();
    memory.group_count = static_cast<uint32_t>(groups.all.size());
    memory.common_pages = Flag("common_pages", options.attr("common_pages"));
    memory.share_in_place = Flag("share_in_place", options.attr("share_in_place"));
  }
};

std::unique_ptr<PyCache> Open(nb::handle given) {
  const ReadOptions options(given);
  auto self = std::make_unique<PyCache>();
  self->model = options.model;
  Checked(self->cache.WithoutGil([&](engine::Cache& cache) { return engine::Cache::Open(options.open, &cache); }));
  return self;
}

// Returns a cache that is open once its job is over, and the job.
nb::tuple StartOpen(nb::handle given) {
  auto options = std::make_shared<ReadOptions>(given);
  auto cache = std::make_unique<PyCache>();
  PyCache* const self = cache.get();
  self->model = options->model;
  auto job = std::make_unique<PyJob>();
  job->written = nb::cast(std::move(cache));
  job->kept = options;
  job->cache = self->cache.shared();
  Checked(engine::Cache::StartOpen(options->open, job->cache.get(), &job->job));
  const nb::object written = job->written;
  return nb::make_tuple(written, nb::cast(std::move(job)));
}

nb::list PlacesOf(const PyCache& self) {
  uint32_t count = 0;
  const engine::PagePlace* const places = self.cache->places(&count);
  nb::list all;
  for (uint32_t i = 0; i < count; ++i) {
    const engine::PagePlace& place = places[i];
    nb::dict out;
    out["layer"] = place.layer;
    out["key_offset"] = place.key_offset;
    out["value_offset"] = place.value_offset;
    out["page_stride"] = place.page_stride;
    out["token_stride"] = place.token_stride;
    out["key_head_stride"] = place.key_head_stride;
    out["value_head_stride"] = place.value_head_stride;
    out["key_scale_offset"] = place.key_scale_offset;
    out["value_scale_offset"] = place.value_scale_offset;
    out["scale_page_stride"] = place.scale_page_stride;
    out["scale_token_stride"] = place.scale_token_stride;
    out["scale_head_stride"] = place.scale_head_stride;
    all.append(out);
  }
  return all;
}

std::vector<int64_t> ReadShifts(nb::handle rotary_shifts) {
  std::vector<int64_t> shifts;
  for (const nb::handle shift : Elements("rotary_shifts", rotary_shifts, "a sequence of whole numbers")) {
    shifts.push_back(WholeBetween(At("rotary_shifts", shifts.size()), shift, INT64_MIN, INT64_MAX));
  }
  return shifts;
}

// `type` is ashlar.Request, which the result is one of.
nb::object Begin(PyCache& self, nb::handle type, nb::handle tokens, nb::handle segments, nb::handle page_table,
                 nb::handle fill, nb::handle conversation, nb::handle needed_in_ms, nb::handle media,
                 nb::handle cold_parallel, nb::handle store_only, nb::handle salt, nb::handle rotary_shifts,
                 bool wait) {
  auto [object, request] = MakeObject<PyRequest>(type);
  request->model = self.model;
  const Integers given("tokens", tokens);
  request->tokens.assign(given.data(), given.data() + given.size());
  const std::vector<uint64_t> lengths = WholeNumbers<uint64_t>("segments", segments);
  const std::vector<engine::Media> inputs = ReadMedia(media);
  const std::string secret = Bytes("salt", salt);
  engine::Prompt prompt{.tokens = request->tokens.data(),
                        .token_count = request->tokens.size(),
                        .segment_lengths = lengths.data(),
                        .segment_count = lengths.size(),
                        .needed_in_ms = Whole<uint64_t>("needed_in_ms", needed_in_ms),
                        .fill = Flag("fill", fill),
                        .media = inputs.data(),
                        .media_count = inputs.size(),
                        .cold_parallel = Flag("cold_parallel", cold_parallel),
                        .store_only = Flag("store_only", store_only),
                        .salt = secret.data(),
                        .salt_bytes = secret.size()};
  const std::vector<int64_t> shifts = ReadShifts(rotary_shifts);
  if (!shifts.empty() && shifts.size() != lengths.size()) {
    throw Refused("rotary_shifts",
                  std::to_string(shifts.size()) + "; expected one per segment, " + std::to_string(lengths.size()));
  }
  if (!shifts.empty()) prompt.rotary_shifts = shifts.data();
  const PageTables pages("page_table", page_table, self.model->groups);
  pages.Put(prompt);
  ReadBytes("conversation", conversation, prompt.conversation);
  engine::Request* const begun = &*request->request;  // not yet shared with other threads
  Checked(self.cache.WithoutGil([&](engine::Cache& cache) {
    return wait ? cache.Begin(&prompt, 1, begun) : cache.StartBegin(&prompt, 1, begun);
  }));
  if (wait && !page_table.is_none()) PlanOf({request, object});  // overlaps with the landing
  return object;
}

nb::object Land(PyCache& self, nb::handle type, nb::handle plan, nb::handle page_table, nb::handle present_tokens,
                nb::handle rotary_shifts, nb::handle wait) {
  auto [object, request] = MakeObject<PyRequest>(type);
  request->model = self.model;
  const std::string bytes = Bytes("plan", plan);
  const bool waits = Flag("wait", wait);
  const PageTables pages("page_table", page_table, self.model->groups);
  engine::PlanToLand landing{.plan = reinterpret_cast<const uint8_t*>(bytes.data()),
                             .plan_bytes = bytes.size(),
                             .present_tokens = Whole<uint64_t>("present_tokens", present_tokens)};
  const std::vector<int64_t> shifts = ReadShifts(rotary_shifts);
  if (!shifts.empty()) landing.rotary_shifts = shifts.data();
  landing.rotary_shift_count = shifts.size();
  pages.Put(landing);
  engine::Request* const landed = &*request->request;  // not yet shared with other threads
  Checked(self.cache.WithoutGil([&](engine::Cache& cache) {
    return waits ? cache.Land(&landing, 1, landed) : cache.StartLand(&landing, 1, landed);
  }));
  return object;
}

// `checkpoints`: (depth, every linear layer's tensors) each.
struct ReadCheckpoints {
  ReadCheckpoints(nb::handle checkpoints, const ModelDescription& model) {
    constexpr const char* kPair = "a pair of depth and the tensors of every linear layer";
    for (const nb::handle item : Elements("checkpoints", checkpoints, "a sequence of (depth, tensors)")) {
      const std::string name = At("checkpoints", views.size());
      const nb::list pair = Elements(name, item, kPair);
      if (nb::len(pair) != 2) throw Refused(name, std::string("expected ") + kPair);
      const uint64_t depth = Whole<uint64_t>(name + ".depth", pair[0]);
      views.emplace_back(name + ".linear", pair[1], model, false);
      const LinearTensorsView& view = views.back();
      offers.push_back({depth, view.tensors.data(), static_cast<uint32_t>(view.tensors.size())});
    }
  }
  std::deque<LinearTensorsView> views;
  std::vector<engine::Checkpoint> offers;
};

// `span`: (begin, ashlar.SpanRows of every linear layer), or None.
struct ReadSpan {
  ReadSpan(nb::handle span, uint64_t tokens, const ModelDescription& model) {
    if (span.is_none()) return;
    constexpr const char* kPair = "a pair of begin and the rows of every linear layer";
    const nb::list pair = Elements("span", span, kPair);
    if (nb::len(pair) != 2) throw Refused("span", std::string("expected ") + kPair);
    begin = Whole<uint64_t>("span.begin", pair[0]);
    if (begin == 0 || begin >= tokens) {
      throw Refused("span.begin",
                    std::to_string(begin) + " is out of range; the text has " + std::to_string(tokens) + " tokens");
    }
    for (const nb::handle item : Elements("span.layers", pair[1], "a sequence of ashlar.SpanRows")) {
      const std::string name = At("span.layers", layers.size());
      CheckClass(name, item, "ashlar.request", "SpanRows");
      engine::SpanRows rows{.layer = Whole<uint32_t>(name + ".layer", item.attr("layer"))};
      const LinearWidths& widths = model.Linear(rows.layer, name + ".layer");
      const auto take = [&](const char* part, uint64_t width) {
        return Rows(name + "." + part, item.attr(part), width, tokens - begin);
      };
      rows.keys = take("k", widths.keys);
      rows.values = take("v", widths.values);
      rows.gates = take("g", widths.gates);
      rows.betas = take("beta", widths.betas);
      rows.conv_inputs = take("conv_inputs", widths.conv_channels);
      layers.push_back(rows);
    }
    if (layers.empty()) throw Refused("span.layers", "empty; expected the rows of every linear layer");
  }
  uint64_t begin = 0;
  std::vector<engine::SpanRows> layers;

 private:
  const float* Rows(const std::string& name, nb::handle given, uint64_t width, uint64_t tokens) {
    if (width == 0) return nullptr;
    const std::optional<Floats> array = OptionalFloats(name, given);
    if (!array.has_value()) throw Refused(name, "required for this layer");
    const RowsView view = RowsOf(name, *array, width);
    if (view.tokens != tokens) {
      throw Refused(name, std::to_string(view.tokens) + " rows; expected one for each of the span's " +
                              std::to_string(tokens) + " tokens");
    }
    if (tokens > 1 && view.stride != static_cast<int64_t>(width))
      throw Refused(name, "the rows are not adjacent; expected a contiguous array");
    kept_.push_back(*array);
    return view.data;
  }
  std::deque<Floats> kept_;
};

std::vector<std::string> Commit(PyCache& self, nb::handle request, nb::handle tokens, nb::handle prompt_tokens,
                                nb::handle checkpoints, nb::handle page_table, nb::handle conversation,
                                nb::handle composed, nb::handle media, nb::handle salt, nb::handle span) {
  const Integers given("tokens", tokens);
  std::shared_ptr<engine::Request> of_request;
  if (!request.is_none()) of_request = Bound<PyRequest>("request", request, "ashlar.Request").request.shared();
  const ReadCheckpoints read(checkpoints, self.model->description);
  const ReadSpan rows(span, given.size(), self.model->description);
  const std::vector<engine::Media> inputs = ReadMedia(media);
  const std::string secret = Bytes("salt", salt);
  std::vector<uint8_t> outcomes(read.offers.size());
  engine::Text text{
      .request = of_request.get(),
      .tokens = given.data(),
      .token_count = given.size(),
      .prompt_tokens = prompt_tokens.is_none() ? given.size() : Whole<uint64_t>("prompt_tokens", prompt_tokens),
      .checkpoints = read.offers.data(),
      .checkpoint_count = static_cast<uint32_t>(read.offers.size()),
      .span_begin = rows.begin,
      .span = rows.layers.data(),
      .span_count = static_cast<uint32_t>(rows.layers.size()),
      .composed = Flag("composed", composed),
      .outcomes = outcomes.data(),
      .media = inputs.data(),
      .media_count = inputs.size(),
      .salt = secret.data(),
      .salt_bytes = secret.size()};
  const PageTables pages("page_table", page_table, self.model->groups);
  pages.Put(text);
  ReadBytes("conversation", conversation, text.conversation);
  Checked(self.cache.WithoutGil([&](engine::Cache& cache) {
    const engine::Status status = cache.Commit(&text, 1);
    of_request.reset();
    return status;
  }));
  std::vector<std::string> names;
  for (const uint8_t outcome : outcomes) names.emplace_back(engine::CommitName(outcome));
  return names;
}

std::string Handoff(PyCache& self, nb::handle tokens, nb::handle node, nb::handle conversation, nb::handle media,
                    nb::handle salt, nb::handle wait_ms) {
  const Integers given("tokens", tokens);
  const std::vector<engine::Media> inputs = ReadMedia(media);
  const std::string secret = Bytes("salt", salt), to = Text("node", node);
  const auto wait = Whole<uint32_t>("wait_ms", wait_ms);
  engine::Text text{.tokens = given.data(),
                    .token_count = given.size(),
                    .media = inputs.data(),
                    .media_count = inputs.size(),
                    .salt = secret.data(),
                    .salt_bytes = secret.size()};
  ReadBytes("conversation", conversation, text.conversation);
  uint8_t outcome = 0;
  engine::Job job;
  Checked(self.cache.WithoutGil([&](engine::Cache& cache) {
    const engine::Status status = cache.StartHandoff(text, to.c_str(), wait, &outcome, &job);
    job.Wait();
    return status;
  }));
  return engine::HandoffName(outcome);
}

// Returns None if there is nothing to compute, or no daemon, which is a miss and not an error.
nb::object ServePrefill(PyCache& self, nb::handle type, nb::handle wait_ms) {
  auto [object, work] = MakeObject<PyRequest>(type);
  work->model = self.model;
  engine::Request* const given = &*work->request;  // not yet shared with other threads
  const auto wait = Whole<uint32_t>("wait_ms", wait_ms);
  const engine::Status status =
      self.cache.WithoutGil([&](engine::Cache& cache) { return cache.ServePrefill(wait, given); });
  if (status.code == engine::Code::kUnavailable || Checked(status) == engine::Code::kPending) return nb::none();
  return object;
}

// Returns a request that has its work, if any, once its job is over, and the job.
nb::tuple StartServePrefill(PyCache& self, nb::handle type, nb::handle wait_ms) {
  auto [object, work] = MakeObject<PyRequest>(type);
  work->model = self.model;
  auto job = std::make_unique<PyJob>();
  job->written = object;
  job->cache = self.cache.shared();
  job->request = work->request.shared();
  Checked(job->cache->StartServePrefill(Whole<uint32_t>("wait_ms", wait_ms), job->request.get(), &job->job));
  return nb::make_tuple(object, nb::cast(std::move(job)));
}

std::vector<int32_t> TakeQuiescedPages(PyCache& self, nb::handle most, nb::handle timeout_ms, nb::handle group) {
  const auto wait = Whole<uint32_t>("timeout_ms", timeout_ms);
  const auto of = Whole<uint32_t>("group", group);
  std::vector<int32_t> pages(std::min(Whole<uint64_t>("most", most), kMostQuiescedPages));
  pages.resize(self.cache.WithoutGil(
      [&](engine::Cache& cache) { return cache.TakeQuiescedPages(pages.data(), pages.size(), wait, of); }));
  return pages;
}

void ComputeAlone(PyCache& self, nb::handle of, nb::handle missing_run, nb::handle of_layer, nb::handle state,
                  nb::handle q, nb::handle k, nb::handle v, nb::handle g, nb::handle beta, nb::handle out,
                  nb::handle transition, nb::handle decay, nb::handle exponents, nb::handle norm_epsilon,
                  nb::handle q_scale) {
  const PyRequest& request = Bound<PyRequest>("request", of, "ashlar.Request");
  const auto missing = Whole<uint32_t>("missing", missing_run);
  const auto layer = Whole<uint32_t>("layer", of_layer);
  std::shared_ptr<engine::Request> of_request = request.request.shared();  // owns the runs
  uint32_t count = 0;
  const engine::Run* const runs = of_request->missing(&count);
  if (missing >= count)
    throw Refused("missing", "out of range; the request has " + std::to_string(count) + " missing runs");
  const LinearWidths& widths = self.model->description.Linear(layer);
  const GivenRows rows(q, k, v, g, beta, out);
  engine::AloneLayer alone{.layer = layer, .inputs = RowsFrom(rows, widths), .run = &runs[missing]};
  alone.inputs.norm_epsilon = static_cast<float>(Real("norm_epsilon", norm_epsilon));
  alone.inputs.q_scale = static_cast<float>(Real("q_scale", q_scale));
  const Strided running = ArrayOf("state", state);
  const std::optional<Exponents> scaled = OptionalExponents("exponents", exponents);
  alone.state = StateOf("state", running, scaled, widths);
  TakeOutput(rows.out, alone.inputs, widths, &alone.out, &alone.out_stride);
  std::optional<Strided> kept[2];
  if (runs[missing].transition && transition.is_none()) throw Refused("transition", "required for this run");
  if (!transition.is_none()) {
    alone.transition =
        DataOf<float>("transition", kept[0].emplace(ArrayOf("transition", transition)), widths.transition);
  }
  if (!decay.is_none()) alone.decay = DataOf<float>("decay", kept[1].emplace(ArrayOf("decay", decay)), widths.decays);
  Checked(self.cache.WithoutGil([&](engine::Cache& cache) {
    const engine::Status status = cache.ComputeAlone(alone);
    of_request.reset();
    return status;
  }));
}

nb::dict StoredSegments(const PyCache& self) {
  engine::StoredSegments stored;
  self.cache->StoredSegments(&stored);
  nb::dict out;
  out["segments"] = stored.segments;
  out["bytes"] = stored.bytes;
  out["own_bytes"] = stored.own_bytes;
  return out;
}

// All of the memory, in place. It stays mapped as long as the array.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> MemoryOf(const PyCache& self) {
  if (self.closed) throw std::runtime_error("the cache is closed");
  const size_t shape[1] = {self.cache->bytes()};
  const engine::CacheState* const state = engine::Access::Of(*self.cache);
  return {self.cache->data(), 1, shape, KeepMapped(state == nullptr ? Region() : state->region)};
}

void Close(PyCache& self) {
  self.closed = true;
  self.cache.Close(std::make_shared<engine::Cache>());
}

}  // namespace

void BindCache(nb::module_& module) {
  nb::class_<PyCache>(module, "Cache")
      .def("memory", &MemoryOf)
      .def("places", &PlacesOf)
      .def("connected", [](const PyCache& self) { return self.cache->connected(); })
      .def("warning", [](const PyCache& self) { return self.cache->warning(); })
      .def("begin", &Begin, nb::arg("type"), Any("tokens"), Any("segments"), Any("page_table"), Any("fill"),
           Any("conversation"), Any("needed_in_ms"), Any("media"), Any("cold_parallel"), Any("store_only"), Any("salt"),
           Any("rotary_shifts"), nb::arg("wait") = true)
      .def("land", &Land, nb::arg("type"), Any("plan"), Any("page_table"), Any("present_tokens"), Any("rotary_shifts"),
           Any("wait"))
      .def("commit", &Commit, Any("request"), Any("tokens"), Any("prompt_tokens"), Any("checkpoints"),
           Any("page_table"), Any("conversation"), Any("composed"), Any("media"), Any("salt"), Any("span"))
      .def("compute_alone", &ComputeAlone, Any("request"), Any("missing"), Any("layer"), Any("state"), Any("q"),
           Any("k"), Any("v"), Any("g"), Any("beta"), Any("out"), Any("transition"), Any("decay"), Any("exponents"),
           Any("norm_epsilon"), Any("q_scale"))
      .def("handoff", &Handoff, Any("tokens"), Any("node"), Any("conversation"), Any("media"), Any("salt"),
           Any("wait_ms"))
      .def("serve_prefill", &ServePrefill, nb::arg("type"), Any("wait_ms"))
      .def("start_serve_prefill", &StartServePrefill, nb::arg("type"), Any("wait_ms"))
      .def("take_quiesced_pages", &TakeQuiescedPages, Any("most"), Any("timeout_ms"), Any("group"))
      .def("stored_segments", &StoredSegments)
      .def("close", &Close);
  module.def("open", &Open);
  module.def("start_open", &StartOpen);
}

}  // namespace ashlar::python
