#include "daemon/pages.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "absl/numeric/int128.h"
#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.pb.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

template <typename... Parts>
absl::Status Bad(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

absl::Status Unsupported(size_t layer, absl::string_view what) {
  return absl::UnimplementedError(absl::StrCat("layout.layers[", layer, "].", what));
}

absl::Status CheckSupported(size_t i, const LinearLayer& layer) {
  if (layer.family != LinearFamily::kGdn) return Unsupported(i, "family: only gdn");
  if (layer.transition != TransitionKind::kDense) return Unsupported(i, "transition: only dense");
  if (layer.state_dtype != DType::kF32) return Unsupported(i, "state_dtype: only f32");
  return absl::OkStatus();
}

absl::Status CheckSupported(size_t i, const AttentionLayer& layer) {
  if (layer.kind != AttentionKind::kGqa) return Unsupported(i, "kind: only gqa");
  if (layer.dtype != DType::kF32) return Unsupported(i, "dtype: only f32");
  if (layer.stored != StoredKeys::kZeroBased) return Unsupported(i, "stored: only zero-based keys");
  return absl::OkStatus();
}

absl::Status CheckShard(const v1::Shard& shard, size_t layers) {
  if (shard.first_layer() >= layers) return Bad("shard.first_layer: the layout has ", layers, " layers");
  if (shard.layer_count() > layers - shard.first_layer()) return Bad("shard.layer_count: beyond the layout's layers");
  const uint32_t size = std::max(1u, shard.tensor_parallel_size());
  if (shard.tensor_parallel_rank() >= size) return Bad("shard.tensor_parallel_rank: not below the size");
  if (size != 1) return absl::UnimplementedError("shard.tensor_parallel_size: only 1");
  if (shard.first_layer() != 0) return absl::UnimplementedError("shard.first_layer: only whole models");
  if (shard.layer_count() != 0 && shard.layer_count() != layers) {
    return absl::UnimplementedError("shard.layer_count: only whole models");
  }
  return absl::OkStatus();
}

absl::Status CheckCost(const v1::CostModel& cost) {
  const auto makes_sense = [](double value) { return std::isfinite(value) && value >= 0; };
  if (!makes_sense(cost.flops_per_token())) return Bad("cost.flops_per_token: not a finite number ≥ 0");
  if (!makes_sense(cost.flops_per_token_squared())) return Bad("cost.flops_per_token_squared: not a finite number ≥ 0");
  if (!makes_sense(cost.tokens_per_second())) return Bad("cost.tokens_per_second: not a finite number ≥ 0");
  return absl::OkStatus();
}

kernels::RopeStyle StyleOf(RopeKind kind) {
  switch (kind) {
    case RopeKind::kNone:
      return kernels::RopeStyle::kNone;
    case RopeKind::kHalfSplit:
      return kernels::RopeStyle::kHalfSplit;
    case RopeKind::kInterleaved:
      return kernels::RopeStyle::kInterleaved;
  }
  return kernels::RopeStyle::kNone;  // no layout that passed Validate
}

kernels::Rotation RotationOf(const Rope& rope) {
  return {StyleOf(rope.kind), static_cast<int32_t>(rope.rotary_dim), rope.frequencies.data()};
}

// One array of rows, for example all keys of one layer: every extent along a dimension with its stride, in bytes.
struct RowArray {
  struct Dimension {
    uint64_t stride;
    uint64_t count;
  };
  uint64_t offset;
  uint64_t row_bytes;
  std::array<Dimension, 3> dimensions;

  // One past the last byte. 128 bits hold any sum of three products of 64 × 32 bits.
  absl::uint128 End() const {
    absl::uint128 end = absl::uint128(offset) + row_bytes;
    for (const Dimension& d : dimensions) end += absl::uint128(d.stride) * (d.count - 1);
    return end;
  }

  // Whether rows are disjoint: nested from the smallest stride to the largest, each steps over all that is inside.
  bool Disjoint() const {
    std::array<Dimension, 3> nested = dimensions;
    std::sort(nested.begin(), nested.end(), [](const auto& a, const auto& b) { return a.stride < b.stride; });
    absl::uint128 inner = row_bytes;
    for (const Dimension& d : nested) {
      if (d.count == 1) continue;
      if (absl::uint128(d.stride) < inner) return false;
      inner += absl::uint128(d.stride) * (d.count - 1);
    }
    return true;
  }
};

// Checks the keys (or values) of one layer and says where they lie for the kernels, whose strides are in floats.
absl::StatusOr<kernels::PagedSlots> PlaceRows(const std::string& field, absl::string_view what, uint64_t head_stride,
                                              const RowArray& array, const Region& region, uint32_t page_tokens) {
  if (array.offset % sizeof(float) != 0) return Bad(field, ".", what, "_offset: not aligned to 4 bytes");
  if (head_stride % sizeof(float) != 0) return Bad(field, ".", what, "_head_stride: not aligned to 4 bytes");
  if (array.End() > region.size()) {
    return Bad(field, ".", what, "_offset: the last page ends outside the region of ", region.size(), " bytes");
  }
  if (!array.Disjoint()) return Bad(field, ".", what, "_head_stride: rows overlap");
  kernels::PagedSlots slots;
  slots.base = reinterpret_cast<float*>(region.data() + array.offset);
  slots.page_stride = static_cast<int64_t>(array.dimensions[0].stride / sizeof(float));
  slots.token_stride = static_cast<int64_t>(array.dimensions[1].stride / sizeof(float));
  slots.head_stride = static_cast<int64_t>(head_stride / sizeof(float));
  slots.page_tokens = static_cast<int32_t>(page_tokens);
  return slots;
}

absl::StatusOr<storage::PagedRows> PlaceLayer(const std::string& field, const v1::PagedLayer& paged,
                                              const AttentionLayer& layer, const Region& region,
                                              const v1::DeclarePagesRequest& request) {
  if (paged.page_stride() % sizeof(float) != 0) return Bad(field, ".page_stride: not aligned to 4 bytes");
  if (paged.token_stride() % sizeof(float) != 0) return Bad(field, ".token_stride: not aligned to 4 bytes");
  const auto array = [&](uint64_t offset, uint64_t head_stride, uint32_t dim) {
    return RowArray{offset,
                    dim * sizeof(float),
                    {{{paged.page_stride(), request.pages()},
                      {paged.token_stride(), request.page_tokens()},
                      {head_stride, layer.kv_heads}}}};
  };
  storage::PagedRows rows;
  rows.layer = paged.layer();
  rows.heads = static_cast<int32_t>(layer.kv_heads);
  rows.key_dim = static_cast<int32_t>(layer.key_dim);
  rows.value_dim = static_cast<int32_t>(layer.value_dim);
  rows.rotation = RotationOf(layer.rope);
  absl::StatusOr<kernels::PagedSlots> keys =
      PlaceRows(field, "key", paged.key_head_stride(),
                array(paged.key_offset(), paged.key_head_stride(), layer.key_dim), region, request.page_tokens());
  if (!keys.ok()) return keys.status();
  absl::StatusOr<kernels::PagedSlots> values =
      PlaceRows(field, "value", paged.value_head_stride(),
                array(paged.value_offset(), paged.value_head_stride(), layer.value_dim), region, request.page_tokens());
  if (!values.ok()) return values.status();
  rows.keys = *keys;
  rows.values = *values;
  return rows;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const Model>> Model::Open(absl::string_view tenant,
                                                         const v1::OpenModelRequest& request) {
  absl::StatusOr<Identity> identity = DecodeIdentity(request.identity());
  if (!identity.ok()) return Bad(identity.status().message());
  if (absl::Status status = Validate(*identity); !status.ok()) return status;
  absl::StatusOr<Layout> layout = DecodeLayout(request.layout());
  if (!layout.ok()) return Bad(layout.status().message());
  if (absl::Status status = Validate(*layout); !status.ok()) return status;
  if (absl::Status status = CheckShard(request.shard(), layout->layers.size()); !status.ok()) return status;
  if (absl::Status status = CheckCost(request.cost()); !status.ok()) return status;
  for (size_t i = 0; i < layout->layers.size(); ++i) {
    const absl::Status status =
        std::visit([i](const auto& layer) { return CheckSupported(i, layer); }, layout->layers[i]);
    if (!status.ok()) return status;
  }
  auto model = std::make_shared<Model>();
  model->ns = MakeNamespace(tenant, *identity, *layout);
  model->layout = *std::move(layout);
  return model;
}

absl::StatusOr<std::shared_ptr<const Pages>> Pages::Declare(std::shared_ptr<const Model> model,
                                                            std::shared_ptr<const Region> region,
                                                            const v1::DeclarePagesRequest& request) {
  if (request.page_tokens() == 0 || request.page_tokens() > limits::kMaxPageTokens) {
    return Bad("page_tokens: not in 1…", limits::kMaxPageTokens);
  }
  if (request.pages() == 0 || request.pages() > static_cast<uint32_t>(INT32_MAX)) return Bad("pages: out of range");
  std::shared_ptr<Pages> pages(new Pages(std::move(model), std::move(region)));
  pages->page_tokens_ = request.page_tokens();
  pages->pages_ = request.pages();
  const std::vector<Layer>& layers = pages->model_->layout.layers;
  int given = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto* attention = std::get_if<AttentionLayer>(&layers[i]);
    if (attention == nullptr) continue;
    const std::string field = absl::StrCat("layers[", given, "]");
    if (given == request.layers_size()) return Bad("layers: attention layer ", i, " is missing");
    const v1::PagedLayer& paged = request.layers(given++);
    if (paged.layer() != i) return Bad(field, ".layer: expected attention layer ", i, ", got ", paged.layer());
    absl::StatusOr<storage::PagedRows> rows = PlaceLayer(field, paged, *attention, *pages->region_, request);
    if (!rows.ok()) return rows.status();
    pages->rows_.push_back(*rows);
  }
  if (given != request.layers_size())
    return Bad("layers[", given, "]: the layout has only ", given, " attention layers");
  return pages;
}

absl::Status Pages::CheckPositions(std::span<const int32_t> page_table, uint64_t first, uint64_t count) const {
  if (count == 0) return absl::OkStatus();
  const uint64_t positions = uint64_t{page_tokens_} * page_table.size();
  if (first > positions || count > positions - first) {
    return Bad("page_table: ", page_table.size(), " entries are too few for ", count, " positions from ", first);
  }
  for (uint64_t i = first / page_tokens_; i <= (first + count - 1) / page_tokens_; ++i) {
    if (page_table[i] < 0 || static_cast<uint32_t>(page_table[i]) >= pages_) {
      return Bad("page_table[", i, "]: ", page_table[i], " is not one of ", pages_, " declared pages");
    }
  }
  return absl::OkStatus();
}

}  // namespace ashlar::daemon
