// SPDX-License-Identifier: Apache-2.0
#include "client/python/src/model.h"

#include <variant>

#include "absl/status/statusor.h"
#include "client/python/src/arguments.h"
#include "proto/layout.h"
#include "proto/object.h"
#include "proto/shard.h"

namespace ashlar::python {
namespace {

constexpr const char* kModule = "ashlar.model";

// Reads the fields of one of the package's dataclasses. Errors begin with its name.
class Fields {
 public:
  Fields(std::string name, nb::handle object, const char* type) : name_(std::move(name)), object_(object) {
    CheckClass(name_, object, kModule, type);
  }
  nb::object Get(const char* field) const { return object_.attr(field); }
  std::string NameOf(const char* field) const { return name_ + "." + field; }
  uint32_t Number(const char* field) const { return Whole<uint32_t>(NameOf(field), Get(field)); }
  double RealOf(const char* field) const { return Real(NameOf(field), Get(field)); }
  template <typename Enum>
  Enum EnumOf(const char* field, const char* type) const {
    return static_cast<Enum>(MemberOf(NameOf(field), Get(field), kModule, type));
  }

 private:
  const std::string name_;
  const nb::handle object_;
};

// Widths of a shard, if the model has `size` of them.
LinearWidths WidthsOf(const engine::Layer& layer, uint32_t size) {
  if (layer.kind == engine::LayerKind::kOpaque) {
    const uint64_t bytes = layer.state_bytes / size;
    return bytes == 0 ? LinearWidths{} : LinearWidths{.heads = 1, .state = bytes, .opaque = true};
  }
  if (layer.kind != engine::LayerKind::kLinear) return {};
  const LinearLayer whole{.family = layer.family,
                          .key_heads = layer.key_heads,
                          .value_heads = layer.value_heads,
                          .d_k = layer.d_k,
                          .d_v = layer.d_v,
                          .state_dtype = layer.state_dtype,
                          .transition = NaturalForm(layer.family),
                          .conv_channels = layer.conv_channels,
                          .conv_kernel = layer.conv_kernel,
                          .conv_dtype = layer.conv_dtype == DType{} ? layer.state_dtype : layer.conv_dtype};
  const absl::StatusOr<Layout> shard = ShardLayout({.layers = {whole}}, {.size = size});
  if (!shard.ok()) return {};  // Open refuses the model
  const auto& part = std::get<LinearLayer>(shard->layers[0]);
  const SpanRowBytes span = SpanRowBytesOf(part, DType::kF32);
  LinearWidths widths{.heads = part.value_heads,
                      .keys = uint64_t{part.key_heads} * part.d_k,
                      .values = uint64_t{part.value_heads} * part.d_v,
                      .gates = span.gates / sizeof(float),
                      .betas = span.betas / sizeof(float),
                      .state = uint64_t{part.value_heads} * part.d_k * part.d_v,
                      .conv_tail_bytes = ConvTailBytes(part),
                      .decays = uint64_t{part.value_heads} * part.d_k,
                      .conv_channels = part.conv_channels,
                      .state_dtype = part.state_dtype,
                      .conv_dtype = part.conv_dtype.value_or(part.state_dtype)};
  if (widths.conv_tail_bytes > 0) {
    widths.conv_rows = layer.conv_order == TailOrder::kTokenFirst ? part.conv_kernel - 1 : part.conv_channels;
  }
  const uint64_t form = part.transition == TransitionForm::kScalar        ? 1
                        : part.transition == TransitionForm::kDiagonal    ? part.d_k
                        : part.transition == TransitionForm::kElementwise ? part.d_v
                                                                          : uint64_t{part.d_k} * part.d_k;
  widths.transition = part.value_heads * form;
  return widths;
}

}  // namespace

const char* ModelDescription::Keep(const std::string& name, nb::handle text) {
  return texts_.emplace_back(Text(name, text)).c_str();
}

const double* ModelDescription::KeepDoubles(const std::string& name, nb::handle numbers) {
  return doubles_.emplace_back(RealNumbers<double>(name, numbers)).data();
}

const float* ModelDescription::KeepFloats(const std::string& name, nb::handle numbers) {
  return floats_.emplace_back(RealNumbers<float>(name, numbers)).data();
}

engine::Rope ModelDescription::ReadRope(const std::string& name, nb::handle given) {
  engine::Rope out;
  if (given.is_none()) return out;
  const Fields rope(name, given, "Rope");
  out.style = rope.EnumOf<RopeStyle>("style", "RopeStyle");
  out.scale = rope.RealOf("scale");
  out.frequencies = KeepDoubles(rope.NameOf("frequencies"), rope.Get("frequencies"));
  out.rotary_dim = static_cast<uint32_t>(2 * doubles_.back().size());
  return out;
}

engine::Layer ModelDescription::ReadLayer(nb::handle given, uint32_t index) {
  const std::string name = At("model.layers", index);
  const auto is = [&](const char* type) { return nb::isinstance(given, nb::module_::import_(kModule).attr(type)); };
  if (is("Opaque")) {
    const Fields opaque(name, given, "Opaque");
    return {.kind = engine::LayerKind::kOpaque,
            .token_bytes = opaque.Number("token_bytes"),
            .state_bytes = Whole<uint64_t>(opaque.NameOf("state_bytes"), opaque.Get("state_bytes"))};
  }
  const bool attends = is("Attention");
  if (!attends && !is("Linear")) throw WrongType(name, given, "ashlar.Attention, ashlar.Linear or ashlar.Opaque");
  const Fields layer(name, given, attends ? "Attention" : "Linear");
  engine::Layer out;
  out.kind = layer.EnumOf<engine::LayerKind>("kind", "LayerKind");
  out.rope = ReadRope(layer.NameOf("rope"), layer.Get("rope"));
  if (attends) {
    out.kv_heads = layer.Number("kv_heads");
    out.key_dim = layer.Number("key_dim");
    out.value_dim = layer.Number("value_dim");
    out.dtype = layer.EnumOf<DType>("dtype", "DType");
    out.scales = Flag(layer.NameOf("scales"), layer.Get("scales"));
    out.stored = layer.EnumOf<StoredKeys>("stored", "StoredKeys");
    if (out.kind == engine::LayerKind::kLinear) throw Refused(layer.NameOf("kind"), "LINEAR requires ashlar.Linear");
    if (out.kind == engine::LayerKind::kOpaque) throw Refused(layer.NameOf("kind"), "OPAQUE requires ashlar.Opaque");
    return out;
  }
  out.family = layer.EnumOf<Family>("family", "Family");
  out.key_heads = layer.Number("key_heads");
  out.value_heads = layer.Number("value_heads");
  out.d_k = layer.Number("d_k");
  out.d_v = layer.Number("d_v");
  out.state_dtype = layer.EnumOf<DType>("state_dtype", "DType");
  out.order = layer.EnumOf<StateOrder>("order", "StateOrder");
  out.conv_channels = layer.Number("conv_channels");
  out.conv_kernel = layer.Number("conv_kernel");
  if (!layer.Get("conv_dtype").is_none()) out.conv_dtype = layer.EnumOf<DType>("conv_dtype", "DType");
  out.conv_order = layer.EnumOf<TailOrder>("conv_order", "TailOrder");
  const nb::object decays = layer.Get("decay_table");
  if (decays.is_none()) return out;
  out.decay_table = KeepFloats(layer.NameOf("decay_table"), decays);
  const uint64_t heads = out.value_heads;
  const uint64_t needed = out.family == Family::kMamba1 ? heads * out.d_k * out.d_v : heads;
  if (floats_.back().size() != needed) {
    throw Refused(layer.NameOf("decay_table"),
                  std::to_string(floats_.back().size()) + " numbers; expected " + std::to_string(needed));
  }
  return out;
}

ModelDescription::ModelDescription(nb::handle given) {
  const Fields model("model", given, "Model");
  const auto text = [&](const char* field) { return Keep(model.NameOf(field), model.Get(field)); };
  model_.model_id = text("model_id");
  model_.weights_digest = text("weights_digest");
  model_.dtype = text("dtype");
  model_.quantization = text("quantization");
  model_.tokenizer_digest = text("tokenizer_digest");
  model_.lora = text("lora");
  model_.page_tokens = model.Number("page_tokens");
  model_.head = model.Number("head");
  model_.tail = model.Number("tail");
  model_.tensor_parallel_rank = model.Number("tensor_parallel_rank");
  model_.tensor_parallel_size = model.Number("tensor_parallel_size");
  if (model_.tensor_parallel_size == 0) throw Refused("model.tensor_parallel_size", "0; expected at least 1");
  model_.flops_per_token = model.RealOf("flops_per_token");
  model_.flops_per_token_squared = model.RealOf("flops_per_token_squared");
  model_.tokens_per_second = model.RealOf("tokens_per_second");
  for (const nb::handle layer : Elements("model.layers", model.Get("layers"), "a sequence of layers")) {
    layers_.push_back(ReadLayer(layer, static_cast<uint32_t>(layers_.size())));
    widths_.push_back(WidthsOf(layers_.back(), model_.tensor_parallel_size));
  }
  if (layers_.empty()) throw Refused("model.layers", "none; expected at least one layer with cached state");
  model_.layers = layers_.data();
  model_.layer_count = static_cast<uint32_t>(layers_.size());
}

const LinearWidths& ModelDescription::Linear(uint32_t layer, const std::string& name) const {
  if (layer < widths_.size() && widths_[layer].heads > 0) return widths_[layer];
  throw Refused(name, std::to_string(layer) + " is not a linear layer of the model");
}

}  // namespace ashlar::python
