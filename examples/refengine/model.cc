// SPDX-License-Identifier: Apache-2.0
#include "examples/refengine/model.h"

#include <openssl/evp.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "examples/refengine/tokenizer.h"

namespace ashlar::refengine {
namespace {

void Require(bool holds, const char* field) {
  if (holds) return;
  std::fprintf(stderr, "refengine: model configuration makes no sense: %s\n", field);
  std::abort();
}

const ModelConfig& Checked(const ModelConfig& config) {
  const LinearConfig& linear = config.linear;
  const AttentionConfig& attention = config.attention;
  Require(config.d_model > 0, "d_model");
  Require(config.blocks > 0, "blocks");
  Require(config.mlp_dim > 0, "mlp_dim");
  Require(linear.key_heads > 0, "linear.key_heads");
  Require(linear.value_heads > 0 && linear.value_heads % linear.key_heads == 0, "linear.value_heads");
  Require(linear.d_k > 0 && linear.d_k <= kernels::kMaxHeadDim, "linear.d_k");
  Require(linear.d_v > 0 && linear.d_v <= kernels::kMaxHeadDim, "linear.d_v");
  Require(linear.conv_kernel > 1, "linear.conv_kernel");
  Require(linear.family == Family::kGdn || linear.family == Family::kLightning, "linear.family");
  const int32_t most = linear.family == Family::kLightning ? linear.d_k : 0;
  Require(linear.rotary_dim >= 0 && linear.rotary_dim % 2 == 0 && linear.rotary_dim <= most, "linear.rotary_dim");
  Require(attention.kv_heads > 0, "attention.kv_heads");
  Require(attention.query_heads > 0 && attention.query_heads % attention.kv_heads == 0, "attention.query_heads");
  Require(attention.head_dim > 0, "attention.head_dim");
  Require(attention.rotary_dim >= 0 && attention.rotary_dim % 2 == 0 && attention.rotary_dim <= attention.head_dim,
          "attention.rotary_dim");
  return config;
}

std::vector<double> FrequenciesOf(double base, int32_t rotary_dim) {
  std::vector<double> frequencies;
  for (int32_t pair = 0; pair < rotary_dim / 2; ++pair) frequencies.push_back(std::pow(base, -2.0 * pair / rotary_dim));
  return frequencies;
}

// SHA-256 over tensors, each with its length in front.
class TensorDigest {
 public:
  TensorDigest() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
    EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr);
  }
  void Add(const std::vector<float>& tensor) {
    const uint64_t count = tensor.size();
    EVP_DigestUpdate(context_.get(), &count, sizeof count);
    EVP_DigestUpdate(context_.get(), tensor.data(), count * sizeof(float));
  }
  std::string Hex() {
    unsigned char bytes[EVP_MAX_MD_SIZE];
    unsigned int length = 0;
    EVP_DigestFinal_ex(context_.get(), bytes, &length);
    std::string hex;
    for (unsigned int i = 0; i < length; ++i) {
      hex.push_back("0123456789abcdef"[bytes[i] >> 4]);
      hex.push_back("0123456789abcdef"[bytes[i] & 15]);
    }
    return hex;
  }

 private:
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_;
};

std::string DigestOf(const Weights& weights) {
  TensorDigest digest;
  digest.Add(weights.embedding);
  for (const LayerWeights& layer : weights.layers) {
    for (const std::vector<float>* tensor :
         {&layer.mixer_norm, &layer.linear.input, &layer.linear.conv, &layer.linear.a_log, &layer.linear.dt_bias,
          &layer.linear.log_decay, &layer.linear.out_norm, &layer.linear.output, &layer.attention.input,
          &layer.attention.q_norm, &layer.attention.k_norm, &layer.attention.output, &layer.mlp_norm, &layer.gate_up,
          &layer.down}) {
      digest.Add(*tensor);
    }
  }
  digest.Add(weights.final_norm);
  digest.Add(weights.head);
  return digest.Hex();
}

}  // namespace

Model::Model(const ModelConfig& config)
    : config_(Checked(config)),
      weights_(DrawWeights(config)),
      frequencies_(FrequenciesOf(config.attention.rope_base, config.attention.rotary_dim)),
      linear_frequencies_(FrequenciesOf(config.linear.rope_base, config.linear.rotary_dim)) {}

Identity Model::identity() const {
  Identity identity;
  identity.model_id = "ashlar-refengine-" + std::to_string(config_.d_model) + "x" + std::to_string(config_.layers());
  identity.weights_digest = DigestOf(weights_);
  identity.dtype = "fp32";
  identity.tokenizer_digest = "utf8-bytes-" + std::to_string(kVocabulary);
  return identity;
}

Layout Model::layout(uint32_t head, uint32_t tail, uint32_t page_tokens) const {
  AttentionLayer attention;
  attention.kv_heads = config_.attention.kv_heads;
  attention.key_dim = attention.value_dim = config_.attention.head_dim;
  if (config_.attention.rotary_dim > 0) {
    attention.rope.kind = RopeStyle::kHalfSplit;
    attention.rope.rotary_dim = config_.attention.rotary_dim;
    attention.rope.frequencies = frequencies_;
  }
  LinearLayer linear;
  linear.family = config_.linear.family;
  linear.transition = config_.linear.form();
  if (config_.linear.rotary_dim > 0) {
    linear.rope.kind = RopeStyle::kHalfSplit;
    linear.rope.rotary_dim = config_.linear.rotary_dim;
    linear.rope.frequencies = linear_frequencies_;
  }
  linear.key_heads = config_.linear.key_heads;
  linear.value_heads = config_.linear.value_heads;
  linear.d_k = config_.linear.d_k;
  linear.d_v = config_.linear.d_v;
  linear.conv_channels = config_.linear.conv_channels();
  linear.conv_kernel = config_.linear.conv_kernel;

  Layout layout;
  layout.page_tokens = page_tokens;
  layout.head = head;
  layout.tail = tail;
  for (int32_t layer = 0; layer < config_.layers(); ++layer) {
    if (config_.is_attention(layer)) {
      layout.layers.emplace_back(attention);
    } else {
      linear.decay_table = weights_.layers[layer].linear.log_decay;
      layout.layers.emplace_back(linear);
    }
  }
  return layout;
}

kernels::LinearShape Model::linear_shape(int32_t layer) const {
  const LinearConfig& linear = config_.linear;
  const std::vector<float>& decay = weights_.layers[layer].linear.log_decay;
  kernels::LinearShape shape = {.family = linear.family,
                                .heads = linear.value_heads,
                                .key_heads = linear.key_heads,
                                .d_k = linear.d_k,
                                .d_v = linear.d_v,
                                .decay_table = decay.empty() ? nullptr : decay.data()};
  if (linear.rotary_dim > 0) {
    shape.rotation = {RopeStyle::kHalfSplit, linear.rotary_dim, linear_frequencies_.data()};
  }
  return shape;
}

kernels::Rotation Model::rotation() const {
  if (frequencies_.empty()) return {};
  return {RopeStyle::kHalfSplit, config_.attention.rotary_dim, frequencies_.data()};
}

}  // namespace ashlar::refengine
