// SPDX-License-Identifier: Apache-2.0
#include "storage/testing/engine.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <variant>

#include "storage/objects/object_bytes.h"

namespace ashlar::storage {
namespace {

constexpr uint32_t kKvHeads = 2;
constexpr uint32_t kKeyDim = 48;
constexpr uint32_t kValueDim = 32;
constexpr uint32_t kRotaryDim = 16;
constexpr uint32_t kPageTokens = 16;
constexpr size_t kAttentionLayers = std::size(kTestAttentionLayers);
constexpr size_t kRowFloats = kKvHeads * (kKeyDim + kValueDim);
constexpr size_t kPageFloats = kPageTokens * kRowFloats * kAttentionLayers;

// Half-split pairs; angles of a fixed table.
const std::vector<double>& Frequencies() {
  static const auto* const frequencies = [] {
    auto* table = new std::vector<double>(kRotaryDim / 2);
    for (size_t i = 0; i < table->size(); ++i) (*table)[i] = std::pow(10000.0, -2.0 * i / kRotaryDim);
    return table;
  }();
  return *frequencies;
}

// A number in [−1, 1) that depends on every argument (splitmix64).
float Content(uint64_t text, uint32_t layer, PartForm form, uint64_t place) {
  uint64_t x = text * 0x9e3779b97f4a7c15 + (uint64_t{layer} << 56) + (static_cast<uint64_t>(form) << 48) + place;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  x ^= x >> 31;
  return static_cast<float>(static_cast<int64_t>(x >> 40)) / static_cast<float>(1 << 23) - 1.0f;
}

bool IsTensor(const Part& part) {
  return part.form != PartForm::kKeys && part.form != PartForm::kValues;
}

uint64_t RowPlace(uint64_t token, uint32_t head, uint32_t dim) {
  return (token * kKvHeads + head) * 1024 + dim;
}

// The larger one of `error` and the difference of two numbers; infinite for NaN.
double Worst(double error, float found, float expected) {
  const double difference = std::abs(found - expected);
  if (difference <= error) return error;
  return std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
}

// Turns keys by `delta` positions.
class Turn {
 public:
  explicit Turn(uint64_t delta) {
    for (uint32_t i = 0; i < kRotaryDim / 2; ++i) turns_[i] = std::polar(1.0, delta * Frequencies()[i]);
  }

  void operator()(std::array<float, kKeyDim>& key) const {
    for (uint32_t i = 0; i < kRotaryDim / 2; ++i) {
      const double a = key[i], b = key[i + kRotaryDim / 2];
      const double cos = turns_[i].real(), sin = turns_[i].imag();
      key[i] = static_cast<float>(a * cos - b * sin);
      key[i + kRotaryDim / 2] = static_cast<float>(a * sin + b * cos);
    }
  }

 private:
  std::array<std::complex<double>, kRotaryDim / 2> turns_;
};

}  // namespace

Layout TestLayout() {
  LinearLayer linear{.key_heads = 2, .value_heads = 4, .d_k = 64, .d_v = 96, .conv_channels = 40, .conv_kernel = 4};
  AttentionLayer attention{.kv_heads = kKvHeads, .key_dim = kKeyDim, .value_dim = kValueDim};
  attention.rope = {.kind = RopeStyle::kHalfSplit, .rotary_dim = kRotaryDim, .frequencies = Frequencies()};
  return {.page_tokens = kPageTokens,
          .head = 4,
          .tail = 4,
          .layers = {linear, attention, linear, linear, attention, linear}};
}

kernels::LinearShape TestShape() {
  const Layout layout = TestLayout();
  const auto& linear = std::get<LinearLayer>(layout.layers[kTestLinearLayers[0]]);
  return {.heads = static_cast<int32_t>(linear.value_heads),
          .key_heads = static_cast<int32_t>(linear.key_heads),
          .d_k = static_cast<int32_t>(linear.d_k),
          .d_v = static_cast<int32_t>(linear.d_v)};
}

ObjectHeader TestPlan(uint64_t text, uint64_t tokens, ObjectKind kind, TenantId tenant) {
  const Identity identity{.model_id = "test", .weights_digest = "w", .dtype = "f32", .tokenizer_digest = "t"};
  const Layout layout = TestLayout();
  const NamespaceId ns = MakeNamespace("tenant-" + std::to_string(tenant), identity, layout);
  const int32_t id[] = {static_cast<int32_t>(text), static_cast<int32_t>(tokens)};
  return *PlanObject(layout, ns, MakeKey(ns, kind, id), kind, tokens);
}

TestPages::TestPages(uint32_t pages)
    : page_table_(pages), memory_(std::make_shared<std::vector<float>>(pages * kPageFloats)) {
  std::iota(page_table_.rbegin(), page_table_.rend(), 0);
  for (size_t i = 0; i + 2 < page_table_.size(); i += 3) std::swap(page_table_[i], page_table_[i + 2]);
}

uint32_t TestPages::Holding(uint64_t positions) {
  return static_cast<uint32_t>((positions + kPageTokens - 1) / kPageTokens);
}

TestPages TestPages::Through(std::vector<int32_t> page_table) const {
  return TestPages(std::move(page_table), memory_);
}

std::vector<PagedRows> TestPages::Rows() const {
  std::vector<PagedRows> all;
  for (size_t i = 0; i < kAttentionLayers; ++i) {
    PagedRows rows{.layer = kTestAttentionLayers[i], .heads = kKvHeads, .key_dim = kKeyDim, .value_dim = kValueDim};
    float* base = memory_->data() + i * kPageTokens * kRowFloats;
    rows.keys = {.base = base,
                 .page_stride = kPageFloats,
                 .token_stride = kRowFloats,
                 .head_stride = kKeyDim,
                 .page_tokens = kPageTokens};
    rows.values = rows.keys;
    rows.values.base = base + kKvHeads * kKeyDim;
    rows.values.head_stride = kValueDim;
    rows.rotation = {RopeStyle::kHalfSplit, kRotaryDim, Frequencies().data()};
    all.push_back(rows);
  }
  return all;
}

float* TestPages::Page(size_t attention, uint64_t position) const {
  const auto page = static_cast<size_t>(page_table_.at(position / kPageTokens));
  return memory_->data() + page * kPageFloats + (attention * kPageTokens + position % kPageTokens) * kRowFloats;
}

float* TestPages::Key(size_t attention, uint64_t position, uint32_t head) const {
  return Page(attention, position) + head * kKeyDim;
}

float* TestPages::Value(size_t attention, uint64_t position, uint32_t head) const {
  return Page(attention, position) + kKvHeads * kKeyDim + head * kValueDim;
}

void WriteRows(const TestPages& pages, const ObjectHeader& header, uint64_t text, uint64_t first_position) {
  for (size_t a = 0; a < kAttentionLayers; ++a) {
    const uint32_t layer = kTestAttentionLayers[a];
    for (uint64_t token = header.first_token; token < header.first_token + header.stored_tokens; ++token) {
      for (uint32_t h = 0; h < kKvHeads; ++h) {
        float* key = pages.Key(a, first_position + token, h);
        float* value = pages.Value(a, first_position + token, h);
        for (uint32_t d = 0; d < kKeyDim; ++d) key[d] = Content(text, layer, PartForm::kKeys, RowPlace(token, h, d));
        for (uint32_t d = 0; d < kValueDim; ++d) {
          value[d] = Content(text, layer, PartForm::kValues, RowPlace(token, h, d));
        }
      }
    }
  }
}

PublishSource TestSource(const ObjectHeader& plan, uint64_t text) {
  struct Memory {
    explicit Memory(uint32_t count) : pages(count) {}
    TestPages pages;
    std::vector<std::vector<float>> tensors;
  };
  constexpr uint64_t kFirstPosition = 5;  // not a page boundary
  const uint64_t positions = kFirstPosition + plan.first_token + plan.stored_tokens;
  auto memory = std::make_shared<Memory>(TestPages::Holding(positions));
  PublishSource source{.first_position = kFirstPosition};
  memory->tensors.reserve(plan.parts.size());
  for (const Part& part : plan.parts) {
    if (!IsTensor(part)) continue;
    std::vector<float>& tensor = memory->tensors.emplace_back(part.Bytes() / sizeof(float));
    for (size_t i = 0; i < tensor.size(); ++i) tensor[i] = Content(text, part.layer, part.form, i);
    source.tensors.push_back({part.layer, part.form, reinterpret_cast<const std::byte*>(tensor.data())});
  }
  WriteRows(memory->pages, plan, text, kFirstPosition);
  source.rows = memory->pages.Rows();
  source.page_table = std::make_shared<std::vector<int32_t>>(memory->pages.page_table());
  source.keep = memory;
  return source;
}

LandTarget TestTarget(const TestPages& pages, std::vector<LandTarget::Segment> segments) {
  return {
      .rows = pages.Rows(), .segments = std::move(segments), .page_table = pages.page_table(), .keep = pages.keep()};
}

double LandingError(const TestPages& pages, const ObjectHeader& header, uint64_t text, uint64_t first_position) {
  const Turn turn(first_position);
  double error = 0;
  for (size_t a = 0; a < kAttentionLayers; ++a) {
    const uint32_t layer = kTestAttentionLayers[a];
    for (uint64_t token = header.first_token; token < header.first_token + header.stored_tokens; ++token) {
      for (uint32_t h = 0; h < kKvHeads; ++h) {
        std::array<float, kKeyDim> key;
        for (uint32_t d = 0; d < kKeyDim; ++d) key[d] = Content(text, layer, PartForm::kKeys, RowPlace(token, h, d));
        turn(key);
        const float* landed_key = pages.Key(a, first_position + token, h);
        const float* landed_value = pages.Value(a, first_position + token, h);
        for (uint32_t d = 0; d < kKeyDim; ++d) error = Worst(error, landed_key[d], key[d]);
        for (uint32_t d = 0; d < kValueDim; ++d) {
          error = Worst(error, landed_value[d], Content(text, layer, PartForm::kValues, RowPlace(token, h, d)));
        }
      }
    }
  }
  return error;
}

double TupleError(const Tier& tier, const Slot& slot, const ObjectHeader& header, uint64_t text) {
  const ObjectBytes bytes(tier, slot);
  double error = 0;
  for (const Part& part : header.parts) {
    if (!IsTensor(part)) continue;
    uint64_t place = 0;
    for (uint32_t unit = 0; unit < part.units; ++unit) {
      const auto* data = reinterpret_cast<const float*>(bytes.Unit(part, unit));
      for (uint32_t i = 0; i < part.UnitBytes(unit) / sizeof(float); ++i, ++place) {
        error = Worst(error, data[i], Content(text, part.layer, part.form, place));
      }
    }
  }
  return error;
}

}  // namespace ashlar::storage
