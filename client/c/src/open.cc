// SPDX-License-Identifier: Apache-2.0
// ashlar_open: opens a cache from C structs.
#include <cstring>
#include <memory>

#include "client/c/src/boundary.h"

namespace ashlar::c {
namespace {

engine::Layer LayerOf(const std::string& name, const ashlar_layer& layer) {
  engine::Layer out;
  out.kind = EnumOf<engine::LayerKind>(name + ".kind", layer.kind);
  if (layer.rope != nullptr) {
    const ashlar_rope rope = Read(name + ".rope", layer.rope);
    out.rope = {EnumOf<RopeStyle>(name + ".rope.style", rope.style), rope.rotary_dim,
                rope.scale == 0 ? 1.0 : rope.scale, rope.frequencies};
  }
  out.kv_heads = layer.kv_heads;
  out.key_dim = layer.key_dim;
  out.value_dim = layer.value_dim;
  out.dtype = EnumOf(name + ".dtype", layer.dtype, out.dtype);
  out.scales = layer.scales != 0;
  out.stored = EnumOf(name + ".stored", layer.stored, out.stored);
  out.family = EnumOf(name + ".family", layer.family, out.family);
  out.key_heads = layer.key_heads;
  out.value_heads = layer.value_heads;
  out.d_k = layer.d_k;
  out.d_v = layer.d_v;
  out.state_dtype = EnumOf(name + ".state_dtype", layer.state_dtype, out.state_dtype);
  out.order = EnumOf(name + ".order", layer.order, out.order);
  out.conv_channels = layer.conv_channels;
  out.conv_kernel = layer.conv_kernel;
  out.decay_table = layer.decay_table;
  out.conv_dtype = EnumOf<DType>(name + ".conv_dtype", layer.conv_dtype);
  out.conv_order = EnumOf(name + ".conv_order", layer.conv_order, out.conv_order);
  out.token_bytes = layer.token_bytes;
  out.state_bytes = layer.state_bytes;
  return out;
}

engine::Model ModelOf(const ashlar_model& model, std::vector<engine::Layer>& layers) {
  for (const ashlar_layer& layer : ReadAll("model.layers", model.layers, model.layer_count)) {
    layers.push_back(LayerOf("model.layers[" + std::to_string(layers.size()) + "]", layer));
  }
  return {.model_id = model.model_id,
          .weights_digest = model.weights_digest,
          .dtype = model.dtype,
          .quantization = model.quantization,
          .tokenizer_digest = model.tokenizer_digest,
          .lora = model.lora,
          .page_tokens = model.page_tokens,
          .head = model.head,
          .tail = model.tail,
          .layers = layers.data(),
          .layer_count = static_cast<uint32_t>(layers.size()),
          .tensor_parallel_rank = model.tensor_parallel_rank,
          .tensor_parallel_size = std::max(model.tensor_parallel_size, 1u),
          .flops_per_token = model.flops_per_token,
          .flops_per_token_squared = model.flops_per_token_squared,
          .tokens_per_second = model.tokens_per_second};
}

// The arrays that a memory points to.
struct OwnMemory {
  std::vector<engine::PagePlace> places;
  std::vector<engine::LayerGroup> groups;
};

engine::Memory MemoryOf(const ashlar_memory* given, OwnMemory& own) {
  if (given == nullptr) return {.kind = engine::MemoryKind::kNone};
  const ashlar_memory memory = Read("memory", given);
  for (const ashlar_page_place& place : ReadAll("memory.places", memory.places, memory.place_count)) {
    own.places.push_back({place.layer, place.key_offset, place.value_offset, place.page_stride, place.token_stride,
                          place.key_head_stride, place.value_head_stride, place.key_scale_offset,
                          place.value_scale_offset, place.scale_page_stride, place.scale_token_stride,
                          place.scale_head_stride});
  }
  for (const ashlar_layer_group& group : ReadAll("memory.groups", memory.groups, memory.group_count)) {
    own.groups.push_back({group.layers, group.layer_count, group.page_tokens, group.pages});
  }
  engine::Memory out = {.kind = EnumOf<engine::MemoryKind>("memory.kind", memory.kind),
                        .pages = memory.pages,
                        .places = own.places.empty() ? nullptr : own.places.data(),
                        .place_count = static_cast<uint32_t>(own.places.size()),
                        .bytes = memory.bytes,
                        .memfd = memory.memfd,
                        .groups = own.groups.empty() ? nullptr : own.groups.data(),
                        .group_count = static_cast<uint32_t>(own.groups.size()),
                        .common_pages = memory.common_pages != 0};
  out.gpu_descriptor = memory.gpu_descriptor;
  out.gpu_data = memory.gpu_data;
  std::memcpy(out.gpu, memory.gpu, sizeof out.gpu);
  out.share_in_place = memory.share_in_place != 0;
  return out;
}

// The options of a cache in C++, with the arrays that they point to.
struct OwnOptions {
  explicit OwnOptions(const ashlar_open_options* given) {
    const ashlar_open_options options = Read("options", given);
    open.rpc_socket = options.rpc_socket;
    open.session_socket = options.session_socket;
    open.name = options.name;
    if (options.timeout_ms > 0) open.timeout_ms = options.timeout_ms;
    if (options.share_with != nullptr) open.share_with = &options.share_with->cache;
    open.model = ModelOf(Read("model", options.model), layers);
    open.memory = MemoryOf(options.memory, memory);
    open.capture_tokens = options.capture_tokens;
    open.span_tokens = options.span_tokens;
    open.span_dtype = EnumOf("span_dtype", options.span_dtype, open.span_dtype);
    if (options.epsilon != 0) open.epsilon = std::max(options.epsilon, 0.0);
    open.compose = EnumOf("compose", options.compose, open.compose);
    if (options.land_ms > 0) open.land_ms = options.land_ms;
    if (options.quiet_ms > 0) open.quiet_ms = options.quiet_ms;
    if (options.workers == nullptr) return;
    const ashlar_workers workers = Read("workers", options.workers);
    open.workers = {workers.context, workers.threads, workers.run};
  }
  OwnOptions(const OwnOptions&) = delete;
  OwnOptions& operator=(const OwnOptions&) = delete;

  std::vector<engine::Layer> layers;
  OwnMemory memory;
  engine::OpenOptions open;
};

int32_t Open(const ashlar_open_options* given, ashlar_cache** out) {
  if (out == nullptr) throw Refused("out: null");
  *out = nullptr;
  const OwnOptions options(given);
  auto cache = std::make_unique<ashlar_cache>();
  const int32_t code = Report(engine::Cache::Open(options.open, &cache->cache));
  if (code == ASHLAR_OK) *out = cache.release();
  return code;
}

int32_t StartOpen(const ashlar_open_options* given, ashlar_cache** out, ashlar_job** job) {
  if (out == nullptr) throw Refused("out: null");
  *out = nullptr;
  auto options = std::make_shared<OwnOptions>(given);
  auto cache = std::make_unique<ashlar_cache>();
  const auto start = [&](engine::Job* started) {
    return Report(engine::Cache::StartOpen(options->open, &cache->cache, started));
  };
  const int32_t code = Start(job, start, options);
  if (code == ASHLAR_OK) *out = cache.release();
  return code;
}

}  // namespace
}  // namespace ashlar::c

using namespace ashlar::c;

int32_t ashlar_open(const ashlar_open_options* options, ashlar_cache** out) {
  return Guarded([&] { return Open(options, out); });
}

int32_t ashlar_start_open(const ashlar_open_options* options, ashlar_cache** out, ashlar_job** job) {
  return Guarded([&] { return StartOpen(options, out, job); });
}

void ashlar_close(ashlar_cache* cache) {
  delete cache;
}

uint8_t* ashlar_data(const ashlar_cache* cache) {
  return cache->cache.data();
}

uint64_t ashlar_bytes(const ashlar_cache* cache) {
  return cache->cache.bytes();
}

uint32_t ashlar_place_count(const ashlar_cache* cache) {
  uint32_t count = 0;
  cache->cache.places(&count);
  return count;
}

int32_t ashlar_place(const ashlar_cache* cache, uint32_t index, ashlar_page_place* out) {
  uint32_t count = 0;
  const ashlar::engine::PagePlace* const places = cache->cache.places(&count);
  if (index >= count) return OutOfRange("index", index, count, "places");
  const ashlar::engine::PagePlace& place = places[index];
  const ashlar_page_place own = {sizeof own,
                                 place.layer,
                                 place.key_offset,
                                 place.value_offset,
                                 place.page_stride,
                                 place.token_stride,
                                 place.key_head_stride,
                                 place.value_head_stride,
                                 place.key_scale_offset,
                                 place.value_scale_offset,
                                 place.scale_page_stride,
                                 place.scale_token_stride,
                                 place.scale_head_stride};
  return Write(own, out);
}

int32_t ashlar_connected(const ashlar_cache* cache) {
  return cache->cache.connected() ? 1 : 0;
}

const char* ashlar_warning(const ashlar_cache* cache) {
  return cache->cache.warning();
}
