#include "client/python/src/model.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "proto/layout.h"
#include "proto/object.h"

namespace ashlar::python {
namespace {

uint32_t Number(nb::handle object, const char* name) {
  return nb::cast<uint32_t>(object.attr(name));
}

template <typename Enum>
Enum EnumOf(nb::handle object, const char* name) {
  return static_cast<Enum>(nb::cast<int>(object.attr(name).attr("value")));
}

LinearWidths WidthsOf(const engine::Layer& layer, uint32_t size) {
  const LinearLayer whole{.family = layer.family,
                          .key_heads = layer.key_heads / size,
                          .value_heads = layer.value_heads / size,
                          .d_k = layer.d_k,
                          .d_v = layer.d_v,
                          .state_dtype = layer.state_dtype,
                          .transition = NaturalForm(layer.family),
                          .conv_channels = layer.conv_channels / size,
                          .conv_kernel = layer.conv_kernel,
                          .conv_dtype = layer.conv_dtype == DType{} ? layer.state_dtype : layer.conv_dtype};
  const SpanRowBytes span = SpanRowBytesOf(whole, DType::kF32);
  LinearWidths widths{.heads = whole.value_heads,
                      .keys = uint64_t{whole.key_heads} * whole.d_k,
                      .values = uint64_t{whole.value_heads} * whole.d_v,
                      .gates = span.gates / sizeof(float),
                      .betas = span.betas / sizeof(float),
                      .state = uint64_t{whole.value_heads} * whole.d_k * whole.d_v,
                      .conv_tail_bytes = ConvTailBytes(whole),
                      .decays = uint64_t{whole.value_heads} * whole.d_k,
                      .state_dtype = whole.state_dtype,
                      .conv_dtype = whole.conv_dtype.value_or(whole.state_dtype)};
  if (widths.conv_tail_bytes > 0) {
    widths.conv_rows = layer.conv_order == TailOrder::kTokenFirst ? whole.conv_kernel - 1 : whole.conv_channels;
  }
  const uint64_t form = whole.transition == TransitionForm::kScalar        ? 1
                        : whole.transition == TransitionForm::kDiagonal    ? whole.d_k
                        : whole.transition == TransitionForm::kElementwise ? whole.d_v
                                                                           : uint64_t{whole.d_k} * whole.d_k;
  widths.transition = whole.value_heads * form;
  return widths;
}

}  // namespace

const char* ModelDescription::Keep(nb::handle text) {
  return texts_.emplace_back(nb::cast<std::string>(text)).c_str();
}

const double* ModelDescription::KeepDoubles(nb::handle numbers) {
  return doubles_.emplace_back(nb::cast<std::vector<double>>(numbers)).data();
}

const float* ModelDescription::KeepFloats(nb::handle numbers) {
  return floats_.emplace_back(nb::cast<std::vector<float>>(numbers)).data();
}

engine::Layer ModelDescription::ReadLayer(nb::handle layer, uint32_t index) {
  const std::string name = "model.layers[" + std::to_string(index) + "]";
  engine::Layer out;
  out.kind = EnumOf<engine::LayerKind>(layer, "kind");
  const nb::object rope = layer.attr("rope");
  if (!rope.is_none()) {
    out.rope.style = EnumOf<RopeStyle>(rope, "style");
    out.rope.scale = nb::cast<double>(rope.attr("scale"));
    out.rope.rotary_dim = static_cast<uint32_t>(2 * nb::len(nb::object(rope.attr("frequencies"))));
    out.rope.frequencies = KeepDoubles(rope.attr("frequencies"));
  }
  if (out.kind != engine::LayerKind::kLinear) {
    out.kv_heads = Number(layer, "kv_heads");
    out.key_dim = Number(layer, "key_dim");
    out.value_dim = Number(layer, "value_dim");
    out.dtype = EnumOf<DType>(layer, "dtype");
    out.scales = nb::cast<bool>(layer.attr("scales"));
    out.stored = EnumOf<StoredKeys>(layer, "stored");
    return out;
  }
  out.family = EnumOf<Family>(layer, "family");
  out.key_heads = Number(layer, "key_heads");
  out.value_heads = Number(layer, "value_heads");
  out.d_k = Number(layer, "d_k");
  out.d_v = Number(layer, "d_v");
  out.state_dtype = EnumOf<DType>(layer, "state_dtype");
  out.order = EnumOf<StateOrder>(layer, "order");
  out.conv_channels = Number(layer, "conv_channels");
  out.conv_kernel = Number(layer, "conv_kernel");
  if (!layer.attr("conv_dtype").is_none()) out.conv_dtype = EnumOf<DType>(layer, "conv_dtype");
  out.conv_order = EnumOf<TailOrder>(layer, "conv_order");
  const nb::object decays = layer.attr("decay_table");
  if (decays.is_none()) return out;
  out.decay_table = KeepFloats(decays);
  const uint64_t heads = out.value_heads;
  const uint64_t needed = out.family == Family::kMamba1 ? heads * out.d_k * out.d_v : heads;
  if (floats_.back().size() != needed) throw Refused(name + ".decay_table", std::to_string(needed) + " numbers needed");
  return out;
}

ModelDescription::ModelDescription(nb::handle model) {
  model_.model_id = Keep(model.attr("model_id"));
  model_.weights_digest = Keep(model.attr("weights_digest"));
  model_.dtype = Keep(model.attr("dtype"));
  model_.quantization = Keep(model.attr("quantization"));
  model_.tokenizer_digest = Keep(model.attr("tokenizer_digest"));
  model_.lora = Keep(model.attr("lora"));
  model_.page_tokens = Number(model, "page_tokens");
  model_.head = Number(model, "head");
  model_.tail = Number(model, "tail");
  model_.tensor_parallel_rank = Number(model, "tensor_parallel_rank");
  model_.tensor_parallel_size = Number(model, "tensor_parallel_size");
  if (model_.tensor_parallel_size == 0) throw Refused("model.tensor_parallel_size", "0");
  model_.flops_per_token = nb::cast<double>(model.attr("flops_per_token"));
  model_.flops_per_token_squared = nb::cast<double>(model.attr("flops_per_token_squared"));
  model_.tokens_per_second = nb::cast<double>(model.attr("tokens_per_second"));
  for (const nb::handle layer : nb::borrow<nb::sequence>(model.attr("layers"))) {
    layers_.push_back(ReadLayer(layer, static_cast<uint32_t>(layers_.size())));
    const bool linear = layers_.back().kind == engine::LayerKind::kLinear;
    widths_.push_back(linear ? WidthsOf(layers_.back(), model_.tensor_parallel_size) : LinearWidths{});
  }
  model_.layers = layers_.data();
  model_.layer_count = static_cast<uint32_t>(layers_.size());
}

const LinearWidths& ModelDescription::Linear(uint32_t layer) const {
  if (layer < widths_.size() && widths_[layer].heads > 0) return widths_[layer];
  throw Refused("layer", std::to_string(layer) + " is no linear layer of the model");
}

}  // namespace ashlar::python
