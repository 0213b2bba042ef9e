// Cache in Python: a session with the daemon, an opened model, and the memory of its pages.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "client/python/src/handles.h"
#include "client/python/src/inputs.h"

namespace ashlar::python {
namespace {

void ReadConversation(const nb::bytes& conversation, uint8_t (&out)[16]) {
  if (conversation.size() == 0) return;
  if (conversation.size() != sizeof out) throw Refused("conversation", "16 bytes are needed");
  std::memcpy(out, conversation.c_str(), sizeof out);
}

void ReadGpu(const nb::bytes& gpu, uint8_t (&out)[16]) {
  if (gpu.size() == 0) return;
  if (gpu.size() != sizeof out) throw Refused("gpu", "16 bytes are needed, CUDA's UUID");
  std::memcpy(out, gpu.c_str(), sizeof out);
}

std::vector<engine::Media> ReadMedia(nb::sequence media) {
  std::vector<engine::Media> all;
  for (const nb::handle item : media) {
    const auto pair = nb::cast<nb::tuple>(item);
    const auto hash = nb::cast<nb::bytes>(pair[1]);
    engine::Media out{.offset = nb::cast<uint64_t>(pair[0])};
    if (hash.size() != sizeof out.hash) throw Refused("media", "a hash has 32 bytes");
    std::memcpy(out.hash, hash.c_str(), sizeof out.hash);
    all.push_back(out);
  }
  return all;
}

engine::PagePlace ReadPlace(nb::handle place) {
  const auto number = [&](const char* name) { return nb::cast<uint64_t>(place.attr(name)); };
  return {.layer = nb::cast<uint32_t>(place.attr("layer")),
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

// The groups of layers, and the lists that they point to.
struct ReadGroups {
  explicit ReadGroups(nb::sequence groups) {
    for (const nb::handle group : groups) {
      layers.push_back(nb::cast<std::vector<uint32_t>>(group.attr("layers")));
      const auto number = [&](const char* name) { return nb::cast<uint32_t>(group.attr(name)); };
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

// The options of a cache, and all that they point to.
struct ReadOptions {
  explicit ReadOptions(nb::handle options)
      : model(std::make_shared<OpenedModel>(options.attr("model"))),
        rpc(nb::cast<std::string>(options.attr("rpc_socket"))),
        session(nb::cast<std::string>(options.attr("session_socket"))),
        name(nb::cast<std::string>(options.attr("name"))),
        groups(nb::borrow<nb::sequence>(options.attr("groups"))) {
    const auto number = [&](const char* field) { return nb::cast<uint32_t>(options.attr(field)); };
    open.rpc_socket = rpc.c_str();
    open.session_socket = session.c_str();
    open.name = name.c_str();
    open.timeout_ms = number("timeout_ms");
    open.model = model->description.model();
    open.memory.kind = static_cast<engine::MemoryKind>(nb::cast<int>(options.attr("memory_kind").attr("value")));
    open.memory.pages = number("pages");
    for (const nb::handle place : nb::borrow<nb::sequence>(options.attr("places"))) places.push_back(ReadPlace(place));
    if (!places.empty()) open.memory.places = places.data();
    open.memory.place_count = static_cast<uint32_t>(places.size());
    open.memory.bytes = nb::cast<uint64_t>(options.attr("memory_bytes"));
    open.memory.memfd = nb::cast<int32_t>(options.attr("memfd"));
    open.memory.gpu_descriptor = nb::cast<int32_t>(options.attr("gpu_descriptor"));
    open.memory.gpu_data = reinterpret_cast<uint8_t*>(nb::cast<uintptr_t>(options.attr("gpu_address")));
    ReadGpu(nb::cast<nb::bytes>(options.attr("gpu")), open.memory.gpu);
    open.memory.groups = groups.all.empty() ? nullptr : groups.all.data();
    open.memory.group_count = static_cast<uint32_t>(groups.all.size());
    open.memory.common_pages = nb::cast<bool>(options.attr("common_pages"));
    model->groups = open.memory.kind == engine::MemoryKind::kNone ? 0 : groups.all.size();
    open.capture_tokens = number("capture_tokens");
    open.epsilon = nb::cast<double>(options.attr("epsilon"));
    open.land_ms = number("land_ms");
    open.quiet_ms = number("quiet_ms");
    if (nb::cast<bool>(options.attr("compose_in_daemon"))) open.compose = engine::ComposeBy::kDaemon;
  }
  ReadOptions(const ReadOptions&) = delete;
  ReadOptions& operator=(const ReadOptions&) = delete;

  std::shared_ptr<OpenedModel> model;
  std::string rpc, session, name;
  ReadGroups groups;
  std::vector<engine::PagePlace> places;
  engine::OpenOptions open;
};

std::unique_ptr<PyCache> Open(nb::handle given) {
  const ReadOptions options(given);
  auto self = std::make_unique<PyCache>();
  self->model = options.model;
  Checked(self->cache.WithoutGil([&](engine::Cache& cache) { return engine::Cache::Open(options.open, &cache); }));
  return self;
}

// A cache that is open once its job is over, and the job.
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

// `type` is ashlar.Request, which the result is one of.
nb::object Begin(PyCache& self, nb::handle type, nb::handle tokens, const std::vector<uint64_t>& segments,
                 nb::handle page_table, bool fill, const nb::bytes& conversation, uint64_t needed_in_ms,
                 nb::sequence media, bool cold_parallel, bool store_only, const nb::bytes& salt, bool wait) {
  auto [object, request] = MakeObject<PyRequest>(type);
  request->model = self.model;
  const Integers given("tokens", tokens);
  request->tokens.assign(given.data(), given.data() + given.size());
  const std::vector<engine::Media> inputs = ReadMedia(media);
  engine::Prompt prompt{.tokens = request->tokens.data(),
                        .token_count = request->tokens.size(),
                        .segment_lengths = segments.data(),
                        .segment_count = segments.size(),
                        .needed_in_ms = needed_in_ms,
                        .fill = fill,
                        .media = inputs.data(),
                        .media_count = inputs.size(),
                        .cold_parallel = cold_parallel,
                        .store_only = store_only,
                        .salt = salt.c_str(),
                        .salt_bytes = salt.size()};
  const PageTables pages("page_table", page_table, self.model->groups);
  pages.Put(prompt);
  ReadConversation(conversation, prompt.conversation);
  engine::Request* const begun = &*request->request;  // nobody else has it yet
  Checked(self.cache.WithoutGil([&](engine::Cache& cache) {
    return wait ? cache.Begin(&prompt, 1, begun) : cache.StartBegin(&prompt, 1, begun);
  }));
  if (wait && !page_table.is_none()) PlanOf({request, object});  // while the daemon lands
  return object;
}

nb::object Land(PyCache& self, nb::handle type, const nb::bytes& plan, nb::handle page_table, uint64_t present_tokens,
                bool wait) {
  auto [object, request] = MakeObject<PyRequest>(type);
  request->model = self.model;
  const PageTables pages("page_table", page_table, self.model->groups);
  engine::PlanToLand landing{.plan = reinterpret_cast<const uint8_t*>(plan.c_str()),
                             .plan_bytes = plan.size(),
                             .present_tokens = present_tokens};
  pages.Put(landing);
  engine::Request* const landed = &*request->request;  // nobody else has it yet
  Checked(self.cache.WithoutGil([&](engine::Cache& cache) {
    return wait ? cache.Land(&landing, 1, landed) : cache.StartLand(&landing, 1, landed);
  }));
  return object;
}

// checkpoints: of (depth, linear tensors).
std::vector<std::string> Commit(PyCache& self, const PyRequest* request, nb::handle tokens,
                                std::optional<uint64_t> prompt_tokens, nb::sequence checkpoints, nb::handle page_table,
                                const nb::bytes& conversation, bool composed, nb::sequence media,
                                const nb::bytes& salt) {
  const Integers given("tokens", tokens);
  std::vector<std::unique_ptr<LinearTensorsView>> views;
  std::vector<engine::Checkpoint> offers;
  for (const nb::handle item : checkpoints) {
    const auto pair = nb::cast<nb::tuple>(item);
    const std::string name = "checkpoints[" + std::to_string(views.size()) + "].linear";
    views.push_back(std::make_unique<LinearTensorsView>(name, nb::cast<nb::sequence>(pair[1]), self.model->description,
                                                        /*transitions=*/false));
    offers.push_back({.depth = nb::cast<uint64_t>(pair[0]),
                      .linear = views.back()->tensors.data(),
                      .linear_count = static_cast<uint32_t>(views.back()->tensors.size())});
  }
  std::vector<uint8_t> outcomes(offers.size());
  const std::vector<engine::Media> inputs = ReadMedia(media);
  engine::Text text{.request = request == nullptr ? nullptr : &*request->request,
                    .tokens = given.data(),
                    .token_count = given.size(),
                    .prompt_tokens = prompt_tokens.value_or(given.size()),
                    .checkpoints = offers.data(),
                    .checkpoint_count = static_cast<uint32_t>(offers.size()),
                    .composed = composed,
                    .outcomes = outcomes.data(),
                    .media = inputs.data(),
                    .media_count = inputs.size(),
                    .salt = salt.c_str(),
                    .salt_bytes = salt.size()};
  const PageTables pages("page_table", page_table, self.model->groups);
  pages.Put(text);
  ReadConversation(conversation, text.conversation);
  std::shared_ptr<engine::Request> of_request = request == nullptr ? nullptr : request->request.shared();
  Checked(self.cache.WithoutGil([&](engine::Cache& cache) {
    const engine::Status status = cache.Commit(&text, 1);
    of_request.reset();
    return status;
  }));
  std::vector<std::string> names;
  for (const uint8_t outcome : outcomes) names.emplace_back(engine::CommitName(outcome));
  return names;
}

std::string HandOff(PyCache& self, nb::handle tokens, const std::string& node, const nb::bytes& conversation,
                    nb::sequence media, const nb::bytes& salt, uint32_t wait_ms) {
  const Integers given("tokens", tokens);
  const std::vector<engine::Media> inputs = ReadMedia(media);
  engine::Text text{.tokens = given.data(),
                    .token_count = given.size(),
                    .media = inputs.data(),
                    .media_count = inputs.size(),
                    .salt = salt.c_str(),
                    .salt_bytes = salt.size()};
  ReadConversation(conversation, text.conversation);
  uint8_t outcome = 0;
  engine::Job job;
  Checked(self.cache.WithoutGil([&](engine::Cache& cache) {
    const engine::Status status = cache.StartHandOff(text, node.c_str(), wait_ms, &outcome, &job);
    job.Wait();
    return status;
  }));
  return engine::HandOffName(outcome);
}

// None: there was nothing to compute, or no daemon, which a cache's loss is no error for.
nb::object ServePrefill(PyCache& self, nb::handle type, uint32_t wait_ms) {
  auto [object, work] = MakeObject<PyRequest>(type);
  work->model = self.model;
  engine::Request* const given = &*work->request;  // nobody else has it yet
  const engine::Status status =
      self.cache.WithoutGil([&](engine::Cache& cache) { return cache.ServePrefill(wait_ms, given); });
  if (status.code == engine::Code::kUnavailable || Checked(status) == engine::Code::kPending) return nb::none();
  return object;
}

// A request that has its work once its job is over, if there was any, and the job.
nb::tuple StartServePrefill(PyCache& self, nb::handle type, uint32_t wait_ms) {
  auto [object, work] = MakeObject<PyRequest>(type);
  work->model = self.model;
  auto job = std::make_unique<PyJob>();
  job->written = object;
  job->cache = self.cache.shared();
  job->request = work->request.shared();
  Checked(job->cache->StartServePrefill(wait_ms, job->request.get(), &job->job));
  return nb::make_tuple(object, nb::cast(std::move(job)));
}

std::vector<int32_t> TakeQuietPages(PyCache& self, uint64_t most, uint32_t timeout_ms, uint32_t group) {
  std::vector<int32_t> pages(most);
  pages.resize(self.cache.WithoutGil(
      [&](engine::Cache& cache) { return cache.TakeQuietPagesOf(group, pages.data(), most, timeout_ms); }));
  return pages;
}

void ComputeAlone(PyCache& self, const PyRequest& request, uint32_t missing, uint32_t layer, const Strided& state,
                  const std::optional<Floats>& q, const std::optional<Floats>& k, const std::optional<Floats>& v,
                  const std::optional<Floats>& g, const std::optional<Floats>& beta,
                  const std::optional<MutableFloats>& out, const std::optional<Strided>& transition,
                  const std::optional<Strided>& decay, float norm_epsilon, float q_scale) {
  uint32_t count = 0;
  const engine::Run* const runs = request.request->missing(&count);
  if (missing >= count) throw Refused("missing", "there are " + std::to_string(count));
  const LinearWidths& widths = self.model->description.Linear(layer);
  engine::AloneLayer alone{.layer = layer, .inputs = RowsFrom(q, k, v, g, beta, widths), .run = &runs[missing]};
  alone.inputs.norm_epsilon = norm_epsilon;
  alone.inputs.q_scale = q_scale;
  alone.state = StateOf("state", state, std::nullopt, widths);
  TakeOutput(out, alone.inputs, widths, &alone.out, &alone.out_stride);
  if (runs[missing].transition && !transition.has_value()) throw Refused("transition", "needed for this run");
  if (transition.has_value()) alone.transition = DataOf<float>("transition", *transition, widths.transition);
  if (decay.has_value()) alone.decay = DataOf<float>("decay", *decay, widths.decays);
  Checked(self.cache.WithoutGil([&](engine::Cache& cache) { return cache.ComputeAlone(alone); }));
}

nb::dict Stored(const PyCache& self) {
  engine::StoredSegments stored;
  self.cache->Stored(&stored);
  nb::dict out;
  out["segments"] = stored.segments;
  out["bytes"] = stored.bytes;
  out["own_bytes"] = stored.own_bytes;
  return out;
}

}  // namespace

void BindCache(nb::module_& module) {
  nb::class_<PyCache>(module, "Cache")
      .def("memory",
           [](nb::pointer_and_handle<PyCache> self) {
             const size_t shape[1] = {self.p->cache->bytes()};
             return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(self.p->cache->data(), 1, shape, self.h);
           })
      .def("places", &PlacesOf)
      .def("connected", [](const PyCache& self) { return self.cache->connected(); })
      .def("warning", [](const PyCache& self) { return self.cache->warning(); })
      .def("begin", &Begin, nb::arg("type"), nb::arg("tokens"), nb::arg("segments"), nb::arg("page_table").none(),
           nb::arg("fill"), nb::arg("conversation"), nb::arg("needed_in_ms"), nb::arg("media"),
           nb::arg("cold_parallel"), nb::arg("store_only"), nb::arg("salt"), nb::arg("wait"))
      .def("land", &Land)
      .def("commit", &Commit, nb::arg("request").none(), nb::arg("tokens"), nb::arg("prompt_tokens").none(),
           nb::arg("checkpoints"), nb::arg("page_table").none(), nb::arg("conversation"), nb::arg("composed"),
           nb::arg("media"), nb::arg("salt"))
      .def("compute_alone", &ComputeAlone, nb::arg("request"), nb::arg("missing"), nb::arg("layer"),
           nb::arg("state").noconvert(), nb::arg("q").none().noconvert(), nb::arg("k").none().noconvert(),
           nb::arg("v").none().noconvert(), nb::arg("g").none().noconvert(), nb::arg("beta").none().noconvert(),
           nb::arg("out").none().noconvert(), nb::arg("transition").none().noconvert(),
           nb::arg("decay").none().noconvert(), nb::arg("norm_epsilon"), nb::arg("q_scale"))
      .def("hand_off", &HandOff, nb::arg("tokens"), nb::arg("node"), nb::arg("conversation"), nb::arg("media"),
           nb::arg("salt"), nb::arg("wait_ms"))
      .def("serve_prefill", &ServePrefill, nb::arg("type"), nb::arg("wait_ms"))
      .def("start_serve_prefill", &StartServePrefill, nb::arg("type"), nb::arg("wait_ms"))
      .def("take_quiet_pages", &TakeQuietPages)
      .def("stored", &Stored)
      .def("close", [](PyCache& self) { self.cache.Close(std::make_shared<engine::Cache>()); });
  module.def("open", &Open);
  module.def("start_open", &StartOpen);
}

}  // namespace ashlar::python
