#include "daemon/pages.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.pb.h"
#include "daemon/row_array.h"
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

// Keys, then values, of one layer.
std::array<RowArray, 2> PlanesOf(const v1::PagedLayer& paged, const AttentionLayer& layer,
                                 const v1::DeclarePagesRequest& request) {
  const auto plane = [&](uint64_t offset, uint64_t head_stride, uint32_t dim) {
    return RowArray{offset,
                    dim * sizeof(float),
                    {{{paged.page_stride(), request.pages()},
                      {paged.token_stride(), request.page_tokens()},
                      {head_stride, layer.kv_heads}}}};
  };
  return {plane(paged.key_offset(), paged.key_head_stride(), layer.key_dim),
          plane(paged.value_offset(), paged.value_head_stride(), layer.value_dim)};
}

constexpr absl::string_view kPlaneNames[] = {"key", "value"};  // in the order of PlanesOf

// Checks one plane by itself and says where it lies for the kernels, whose strides are in floats.
absl::StatusOr<kernels::PagedSlots> PlaceRows(const std::string& field, absl::string_view what, const RowArray& plane,
                                              const Region& region) {
  const auto& [pages, tokens, heads] = plane.dimensions;
  if (plane.offset % sizeof(float) != 0) return Bad(field, ".", what, "_offset: not aligned to 4 bytes");
  if (heads.stride % sizeof(float) != 0) return Bad(field, ".", what, "_head_stride: not aligned to 4 bytes");
  if (plane.End() > region.size()) {
    return Bad(field, ".", what, "_offset: the last page ends outside the region of ", region.size(), " bytes");
  }
  if (!plane.Disjoint()) return Bad(field, ".", what, "_head_stride: rows overlap");
  kernels::PagedSlots slots;
  slots.base = reinterpret_cast<float*>(region.data() + plane.offset);
  slots.page_stride = static_cast<int64_t>(pages.stride / sizeof(float));
  slots.token_stride = static_cast<int64_t>(tokens.stride / sizeof(float));
  slots.head_stride = static_cast<int64_t>(heads.stride / sizeof(float));
  slots.page_tokens = static_cast<int32_t>(tokens.count);
  return slots;
}

absl::StatusOr<storage::PagedRows> PlaceLayer(const std::string& field, const v1::PagedLayer& paged,
                                              const AttentionLayer& layer, const std::array<RowArray, 2>& planes,
                                              const Region& region) {
  if (paged.page_stride() % sizeof(float) != 0) return Bad(field, ".page_stride: not aligned to 4 bytes");
  if (paged.token_stride() % sizeof(float) != 0) return Bad(field, ".token_stride: not aligned to 4 bytes");
  storage::PagedRows rows;
  rows.layer = paged.layer();
  rows.heads = static_cast<int32_t>(layer.kv_heads);
  rows.key_dim = static_cast<int32_t>(layer.key_dim);
  rows.value_dim = static_cast<int32_t>(layer.value_dim);
  rows.rotation = RotationOf(layer.rope);
  absl::StatusOr<kernels::PagedSlots> keys = PlaceRows(field, kPlaneNames[0], planes[0], region);
  if (!keys.ok()) return keys.status();
  absl::StatusOr<kernels::PagedSlots> values = PlaceRows(field, kPlaneNames[1], planes[1], region);
  if (!values.ok()) return values.status();
  rows.keys = *keys;
  rows.values = *values;
  return rows;
}

// Whether no two of all layers' planes share memory: a landing would write one over the other. Two a layer, each
// checked by itself before.
absl::Status CheckApart(std::span<const RowArray> planes) {
  const auto field = [](size_t plane) { return absl::StrCat("layers[", plane / 2, "].", kPlaneNames[plane % 2]); };
  for (size_t i = 0; i < planes.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (Overlap(planes[j], planes[i])) return Bad(field(i), "_offset: rows overlap those of ", field(j), "_offset");
    }
  }
  return absl::OkStatus();
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
  std::vector<RowArray> planes;
  int given = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto* attention = std::get_if<AttentionLayer>(&layers[i]);
    if (attention == nullptr) continue;
    const std::string field = absl::StrCat("layers[", given, "]");
    if (given == request.layers_size()) return Bad("layers: attention layer ", i, " is missing");
    const v1::PagedLayer& paged = request.layers(given++);
    if (paged.layer() != i) return Bad(field, ".layer: expected attention layer ", i, ", got ", paged.layer());
    const std::array<RowArray, 2> of_layer = PlanesOf(paged, *attention, request);
    absl::StatusOr<storage::PagedRows> rows = PlaceLayer(field, paged, *attention, of_layer, *pages->region_);
    if (!rows.ok()) return rows.status();
    planes.insert(planes.end(), of_layer.begin(), of_layer.end());
    pages->rows_.push_back(*rows);
  }
  if (given != request.layers_size())
    return Bad("layers[", given, "]: the layout has only ", given, " attention layers");
  if (absl::Status apart = CheckApart(planes); !apart.ok()) return apart;
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
