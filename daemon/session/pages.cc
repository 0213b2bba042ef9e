// SPDX-License-Identifier: Apache-2.0
#include "daemon/session/pages.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.pb.h"
#include "daemon/session/row_array.h"
#include "kernels/layer_shape.h"
#include "proto/invalid.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

absl::Status CheckShard(const v1::Shard& shard, size_t layers) {
  if (shard.first_layer() >= layers)
    return Invalid("shard.first_layer: out of range; the layout has ", layers, " layers");
  if (shard.layer_count() > layers - shard.first_layer())
    return Invalid("shard.layer_count: first_layer + layer_count exceeds the layout's ", layers, " layers");
  const uint32_t size = std::max(1u, shard.tensor_parallel_size());
  if (size > limits::kMaxTensorShards) {
    return Invalid("shard.tensor_parallel_size: too large; expected at most ", limits::kMaxTensorShards);
  }
  if (shard.tensor_parallel_rank() >= size)
    return Invalid("shard.tensor_parallel_rank: must be less than tensor_parallel_size");
  if (shard.first_layer() != 0)
    return absl::UnimplementedError("shard.first_layer: must be 0; pipeline shards are not supported");
  if (shard.layer_count() != 0 && shard.layer_count() != layers) {
    return absl::UnimplementedError("shard.layer_count: must be 0 or all layers; pipeline shards are not supported");
  }
  return absl::OkStatus();
}

absl::Status CheckCost(const v1::CostModel& cost) {
  const auto makes_sense = [](double value) { return std::isfinite(value) && value >= 0; };
  if (!makes_sense(cost.flops_per_token()))
    return Invalid("cost.flops_per_token: must be a finite number of at least 0");
  if (!makes_sense(cost.flops_per_token_squared()))
    return Invalid("cost.flops_per_token_squared: must be a finite number of at least 0");
  if (!makes_sense(cost.tokens_per_second()))
    return Invalid("cost.tokens_per_second: must be a finite number of at least 0");
  return absl::OkStatus();
}

// Rotation of keys on their way into pages; unrotated keys stay as they are.
kernels::Rotation RotationOf(const AttentionLayer& layer) {
  if (layer.stored == StoredKeys::kUnrotated) return {};
  return kernels::RotationOf(layer.rope);
}

// One layer's keys, values, or scales of either, as declared by the engine.
struct Plane {
  std::string field;  // field name of the layer
  uint32_t group;
  const char* offset;
  const char* head_stride;  // names of the fields with its strides
  uint32_t element_bytes;
  RowArray rows;
};

// Keys and values; with scales, also the scales of both.
absl::StatusOr<std::vector<Plane>> PlanesOf(const std::string& field, const v1::PagedLayer& paged,
                                            const AttentionLayer& layer, const Pages::Group& group) {
  const auto array = [&](uint64_t offset, uint64_t row_bytes, uint64_t page, uint64_t token, uint64_t head) {
    return RowArray{offset, row_bytes, {{{page, group.pages}, {token, group.page_tokens}, {head, layer.kv_heads}}}};
  };
  const auto rows = [&](uint64_t offset, uint64_t head_stride, uint64_t dim) {
    return array(offset, dim * ElementBytes(layer.dtype), paged.page_stride(), paged.token_stride(), head_stride);
  };
  const auto scales = [&](uint64_t offset) {
    return array(offset, sizeof(float), paged.scale_page_stride(), paged.scale_token_stride(),
                 paged.scale_head_stride());
  };
  const uint32_t element = ElementBytes(layer.dtype);
  if (paged.page_stride() % element != 0) return Invalid(field, ".page_stride: must be aligned to ", element, " bytes");
  if (paged.token_stride() % element != 0)
    return Invalid(field, ".token_stride: must be aligned to ", element, " bytes");
  const uint32_t of = paged.group();
  std::vector<Plane> planes = {{field, of, "key_offset", "key_head_stride", element,
                                rows(paged.key_offset(), paged.key_head_stride(), layer.key_dim)},
                               {field, of, "value_offset", "value_head_stride", element,
                                rows(paged.value_offset(), paged.value_head_stride(), layer.value_dim)}};
  if (!layer.scales) return planes;
  if (paged.scale_page_stride() % sizeof(float) != 0)
    return Invalid(field, ".scale_page_stride: must be aligned to 4 bytes");
  if (paged.scale_token_stride() % sizeof(float) != 0)
    return Invalid(field, ".scale_token_stride: must be aligned to 4 bytes");
  planes.push_back(
      {field, of, "key_scale_offset", "scale_head_stride", sizeof(float), scales(paged.key_scale_offset())});
  planes.push_back(
      {field, of, "value_scale_offset", "scale_head_stride", sizeof(float), scales(paged.value_scale_offset())});
  return planes;
}

Plane PlaneOf(const std::string& field, const v1::PagedLayer& paged, const OpaqueLayer& layer,
              const Pages::Group& group) {
  const RowArray rows{paged.key_offset(),
                      layer.token_bytes,
                      {{{paged.page_stride(), group.pages}, {paged.token_stride(), group.page_tokens}, {0, 1}}}};
  return {field, paged.group(), "key_offset", "token_stride", ElementBytes(kOpaqueType), rows};
}

// Checks one plane alone.
absl::Status CheckPlane(const Plane& plane, const Region& region) {
  const auto& [pages, tokens, heads] = plane.rows.dimensions;
  const auto& [field, group, offset, head_stride, element, rows] = plane;
  if (rows.offset % element != 0) return Invalid(field, ".", offset, ": must be aligned to ", element, " bytes");
  if (heads.stride % element != 0) return Invalid(field, ".", head_stride, ": must be aligned to ", element, " bytes");
  if (rows.End() > region.size()) {
    return Invalid(field, ".", offset, ": the last page exceeds the region of ", region.size(), " bytes");
  }
  if (!rows.Disjoint()) return Invalid(field, ".", head_stride, ": rows overlap");
  return absl::OkStatus();
}

// Returns checked planes in the kernels' form, with strides in elements. `scales` may be null.
kernels::PagedSlots SlotsOf(const Plane& plane, const Plane* scales, DType dtype, const Region& region) {
  const auto strides = [](const Plane& of) {
    std::array<int64_t, 3> in_elements;
    for (size_t i = 0; i < 3; ++i) {
      in_elements[i] = static_cast<int64_t>(of.rows.dimensions[i].stride / of.element_bytes);
    }
    return in_elements;
  };
  kernels::PagedSlots slots;
  slots.base = region.data() + plane.rows.offset;
  std::tie(slots.page_stride, slots.token_stride, slots.head_stride) = std::tuple_cat(strides(plane));
  slots.page_tokens = static_cast<int32_t>(plane.rows.dimensions[1].count);
  slots.dtype = dtype;
  if (scales == nullptr) return slots;
  slots.scales = reinterpret_cast<float*>(region.data() + scales->rows.offset);
  std::tie(slots.scale_page_stride, slots.scale_token_stride, slots.scale_head_stride) =
      std::tuple_cat(strides(*scales));
  return slots;
}

storage::PagedRows RowsOf(uint32_t index, const AttentionLayer& layer, const std::vector<Plane>& planes,
                          const Region& region) {
  storage::PagedRows rows;
  rows.layer = index;
  rows.heads = static_cast<int32_t>(layer.kv_heads);
  rows.key_dim = static_cast<int32_t>(layer.key_dim);
  rows.value_dim = static_cast<int32_t>(layer.value_dim);
  rows.gpu = region.gpu();
  rows.latent = layer.kind == AttentionKind::kMla;
  rows.rotation = RotationOf(layer);
  rows.keys = SlotsOf(planes[0], layer.scales ? &planes[2] : nullptr, layer.dtype, region);
  rows.values = SlotsOf(planes[1], layer.scales ? &planes[3] : nullptr, layer.dtype, region);
  return rows;
}

// Both halves of the kernels' form have the place of an opaque layer's rows.
storage::PagedRows RowsOf(uint32_t index, const OpaqueLayer& layer, const Plane& plane, const Region& region) {
  storage::PagedRows rows;
  rows.layer = index;
  rows.heads = 1;
  rows.key_dim = static_cast<int32_t>(layer.token_bytes);
  rows.gpu = region.gpu();
  rows.keys = rows.values = SlotsOf(plane, nullptr, kOpaqueType, region);
  return rows;
}

// Checks that no two planes of all layers share memory: a landing would overwrite one with the other. Each plane has
// been checked alone.
absl::Status CheckApart(std::span<const Plane> planes) {
  std::vector<RowArray> rows;
  for (const Plane& plane : planes) rows.push_back(plane.rows);
  const auto overlap = FindOverlap(rows);
  if (!overlap) return absl::OkStatus();
  const Plane &later = planes[std::max(overlap->first, overlap->second)],
              &earlier = planes[std::min(overlap->first, overlap->second)];
  return Invalid(later.field, ".", later.offset, ": rows overlap those of ", earlier.field, ".", earlier.offset);
}

// Bytes that the pages of several planes share: page p has [begin + p × stride, end + p × stride).
struct PageBytes {
  absl::uint128 begin, end;
  uint64_t stride, pages;
  size_t plane;  // last of these planes in declaration order
};

// Checks that if rows of two planes share memory, page p of one overlaps only page p of the other.
absl::Status CheckPageByPage(std::span<const Plane> planes) {
  std::vector<PageBytes> all;
  for (size_t i = 0; i < planes.size(); ++i) {
    RowArray page = planes[i].rows;
    const auto [stride, count] = std::exchange(page.dimensions[0], {.stride = 0, .count = 1});
    all.push_back({page.offset, page.End(), stride, count, i});
  }
  std::ranges::sort(all, {}, &PageBytes::begin);
  const auto refuse = [&planes](size_t plane) {
    return Invalid(planes[plane].field, ".", planes[plane].offset,
                   ": rows of two groups overlap; groups may only share whole pages");
  };
  std::vector<PageBytes> joined;
  for (const PageBytes& page : all) {
    if (joined.empty() || joined.back().end <= page.begin) {
      joined.push_back(page);
      continue;
    }
    joined.back().plane = std::max(joined.back().plane, page.plane);
    if (joined.back().stride != page.stride) return refuse(joined.back().plane);
    joined.back().end = std::max(joined.back().end, page.end);
  }
  std::vector<RowArray> rows;
  for (const PageBytes& page : joined) {
    const auto bytes = static_cast<uint64_t>(page.end - page.begin);
    if (bytes > page.stride && page.pages > 1) return refuse(page.plane);
    rows.push_back({static_cast<uint64_t>(page.begin), bytes, {{{page.stride, page.pages}, {0, 1}, {0, 1}}}});
  }
  const auto overlap = FindOverlap(rows);
  return overlap ? refuse(std::max(joined[overlap->first].plane, joined[overlap->second].plane)) : absl::OkStatus();
}

// For layers whose groups share pages: rows of one group must not overlap.
absl::Status CheckCommonPages(std::span<const Plane> planes, size_t groups) {
  if (CheckApart(planes).ok()) return absl::OkStatus();
  for (uint32_t group = 0; group < groups; ++group) {
    std::vector<Plane> own;
    std::ranges::copy_if(planes, std::back_inserter(own), [group](const Plane& plane) { return plane.group == group; });
    if (absl::Status apart = CheckApart(own); !apart.ok()) return apart;
  }
  return CheckPageByPage(planes);
}

absl::Status InField(absl::string_view field, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(field, ": ", status.message()));
}

// Returns the shard's part of the request's layout, if it is not open yet.
absl::StatusOr<std::shared_ptr<const Layout>> ReadLayout(const NamespaceId& ns, const TensorShard& shard,
                                                         const v1::OpenModelRequest& request, OpenLayouts& layouts,
                                                         const std::shared_ptr<Budget>& budget) {
  // Charges the memory for reading, besides the request.
  const absl::StatusOr<Budget::Charge> reading = Budget::Take(budget, 2 * request.layout().size());
  if (!reading.ok()) return InField("layout", reading.status());
  absl::StatusOr<Layout> whole = DecodeLayout(request.layout());
  if (!whole.ok()) return Invalid(whole.status().message());
  if (absl::Status status = CheckShard(request.shard(), whole->layers.size()); !status.ok()) return status;
  absl::StatusOr<Layout> part = ShardLayout(*std::move(whole), shard);
  if (!part.ok()) return part.status();
  absl::StatusOr<Budget::Charge> charge = Budget::Take(budget, MemoryOf(*part));
  if (!charge.ok()) return InField("layout", charge.status());
  return layouts.Share(ns, shard, *std::move(part), *std::move(charge));
}

absl::StatusOr<std::shared_ptr<const storage::PrefixModel>> ReadPrefixes(const v1::OpenModelRequest& request,
                                                                         const Model& model) {
  const v1::PrefixUse& use = request.prefixes();
  if (use.span_tokens() > limits::kMaxSpanTokens)
    return Invalid("prefixes.span_tokens: too large; expected at most ", limits::kMaxSpanTokens);
  if (use.span_dtype() > static_cast<uint32_t>(DType::kBF16))
    return Invalid("prefixes.span_dtype: expected f32, f16 or bf16");
  const storage::SpanUse spans{use.span_tokens(), static_cast<DType>(std::max(1u, use.span_dtype()))};
  auto prefixes = storage::MakePrefixModel(model.ns, model.shard, model.shared_layout,
                                           std::max(1u, use.capture_tokens()), model.cost, spans);
  if (!prefixes.ok()) return Invalid("prefixes: ", prefixes.status().message());
  return prefixes;
}

}  // namespace

uint64_t Model::MemoryBytes() const {
  uint64_t bytes = kLeastHeapBytes + sizeof(Model) + (prefixes == nullptr ? 0 : kLeastHeapBytes + sizeof(*prefixes));
  for (const std::string* text : {&identity.model_id, &identity.weights_digest, &identity.dtype, &identity.quantization,
                                  &identity.tokenizer_digest, &identity.lora}) {
    bytes += kHeapOverhead + text->capacity();
  }
  return bytes;
}

absl::StatusOr<std::shared_ptr<const Model>> Model::Open(absl::string_view tenant, const v1::OpenModelRequest& request,
                                                         OpenLayouts& layouts, const std::shared_ptr<Budget>& budget) {
  absl::StatusOr<Identity> identity = DecodeIdentity(request.identity());
  if (!identity.ok()) return Invalid(identity.status().message());
  const v1::Shard& declared = request.shard();
  const TensorShard shard = {.rank = declared.tensor_parallel_rank(),
                             .size = std::max(1u, declared.tensor_parallel_size())};
  const NamespaceId ns = MakeNamespace(tenant, request.identity(), request.layout());
  std::shared_ptr<const Layout> layout = layouts.Find(ns, shard);
  if (layout == nullptr) {
    auto read = ReadLayout(ns, shard, request, layouts, budget);
    if (!read.ok()) return read.status();
    layout = *std::move(read);
  }
  if (absl::Status status = CheckShard(declared, layout->layers.size()); !status.ok()) return status;
  if (absl::Status status = CheckCost(request.cost()); !status.ok()) return status;
  auto model = std::make_shared<Model>(std::move(layout));
  model->ns = ns;
  model->identity = *std::move(identity);
  model->shard = shard;
  model->tokens_per_second = request.cost().tokens_per_second();
  model->cost = storage::CostOf({request.cost().flops_per_token(), request.cost().flops_per_token_squared()},
                                model->layout, shard);
  if (request.has_prefixes()) {
    auto prefixes = ReadPrefixes(request, *model);
    if (!prefixes.ok()) return prefixes.status();
    model->prefixes = *std::move(prefixes);
  }
  absl::StatusOr<Budget::Charge> charge = Budget::Take(budget, model->MemoryBytes());
  if (!charge.ok()) return InField("identity", charge.status());
  model->charge = *std::move(charge);
  return model;
}

absl::Status Pages::ReadGroups(const v1::DeclarePagesRequest& request) {
  const auto read = [this](const std::string& field, uint32_t page_tokens, uint32_t pages) {
    if (page_tokens == 0 || page_tokens > limits::kMaxPageTokens) {
      return Invalid(field, "page_tokens: out of range; expected 1 to ", limits::kMaxPageTokens);
    }
    if (pages == 0 || pages > static_cast<uint32_t>(INT32_MAX))
      return Invalid(field, "pages: out of range; expected 1 to ", INT32_MAX);
    groups_.push_back({page_tokens, pages});
    return absl::OkStatus();
  };
  declared_groups_ = !request.groups().empty();
  common_pages_ = request.common_pages();
  if (!declared_groups_) {
    if (common_pages_) return Invalid("common_pages: requires groups");
    return read("", request.page_tokens(), request.pages());
  }
  if (request.page_tokens() != 0) return Invalid("page_tokens: must be 0 with groups, which set it per group");
  if (request.pages() != 0) return Invalid("pages: must be 0 with groups, which set it per group");
  if (request.allocate()) return Invalid("allocate: cannot be set together with groups");
  if (static_cast<uint32_t>(request.groups_size()) > limits::kMaxLayers)
    return Invalid("groups: too many; expected at most ", limits::kMaxLayers);
  for (const v1::PageGroup& group : request.groups()) {
    const std::string field = absl::StrCat("groups[", groups_.size(), "]");
    if (absl::Status status = read(field + ".", group.page_tokens(), group.pages()); !status.ok()) return status;
    if (common_pages_ && group.pages() != groups_.front().pages)
      return Invalid(field, ".pages: must be equal in all groups with common_pages");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Pages>> Pages::Declare(std::shared_ptr<const Model> model,
                                                      std::shared_ptr<const Region> region,
                                                      const v1::DeclarePagesRequest& request) {
  if (request.allocate() && request.pages() > limits::kMaxAllocatedPages) {
    return Invalid("pages: too many; expected at most ", limits::kMaxAllocatedPages, " to be allocated");
  }
  // Not in memory that the engine created, because only memory that the daemon created stays while a process holds its
  // pages.
  if (request.allocate() && region->block() == 0) return Invalid("allocate: requires a hosted region");
  std::shared_ptr<Pages> pages(new Pages(std::move(model), std::move(region)));
  if (absl::Status status = pages->ReadGroups(request); !status.ok()) return status;
  const std::vector<Layer>& layers = pages->model_->layout.layers;
  std::vector<Plane> planes;
  int given = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    if (!HasRows(layers[i])) continue;
    const std::string field = absl::StrCat("layers[", given, "]");
    if (given == request.layers_size()) return Invalid("layers: attention layer ", i, " is missing");
    const v1::PagedLayer& paged = request.layers(given++);
    if (paged.layer() != i) return Invalid(field, ".layer: ", paged.layer(), "; expected attention layer ", i);
    if (paged.group() >= pages->groups_.size())
      return Invalid(field, ".group: ", paged.group(), "; expected less than ", pages->groups_.size(),
                     ", the number of groups");
    const auto* opaque = std::get_if<OpaqueLayer>(&layers[i]);
    absl::StatusOr<std::vector<Plane>> of_layer;
    if (opaque != nullptr) {
      of_layer = std::vector{PlaneOf(field, paged, *opaque, pages->groups_[paged.group()])};
    } else {
      of_layer = PlanesOf(field, paged, std::get<AttentionLayer>(layers[i]), pages->groups_[paged.group()]);
    }
    if (!of_layer.ok()) return of_layer.status();
    for (const Plane& plane : *of_layer) {
      if (absl::Status status = CheckPlane(plane, *pages->region_); !status.ok()) return status;
    }
    pages->rows_.push_back(
        opaque != nullptr ? RowsOf(paged.layer(), *opaque, of_layer->front(), *pages->region_)
                          : RowsOf(paged.layer(), std::get<AttentionLayer>(layers[i]), *of_layer, *pages->region_));
    pages->group_of_.push_back(paged.group());
    planes.insert(planes.end(), of_layer->begin(), of_layer->end());
  }
  if (given != request.layers_size())
    return Invalid("layers[", given, "]: the layout has only ", given, " attention layers");
  absl::Status apart = pages->common_pages_ ? CheckCommonPages(planes, pages->groups_.size()) : CheckApart(planes);
  if (!apart.ok()) return apart;
  return pages;
}

absl::StatusOr<std::vector<size_t>> Pages::Divide(size_t entries, std::span<const uint32_t> group_pages) const {
  if (!declared_groups_) {
    if (!group_pages.empty()) return Invalid("group_pages: the pages were declared without groups");
    return std::vector<size_t>{0, entries};
  }
  std::vector<size_t> tables(groups_.size() + 1);
  if (group_pages.empty() && entries == 0) return tables;  // nothing to write
  if (group_pages.size() != groups_.size()) {
    return Invalid("group_pages: ", group_pages.size(), " tables for ", groups_.size(), " groups");
  }
  for (size_t i = 0; i < groups_.size(); ++i) tables[i + 1] = tables[i] + group_pages[i];
  if (tables.back() != entries) {
    return Invalid("group_pages: ", tables.back(), " entries in total, but page_table has ", entries);
  }
  return tables;
}

std::vector<storage::PagedRows> Pages::RowsIn(const std::vector<int32_t>& page_table,
                                              std::span<const size_t> tables) const {
  std::vector<storage::PagedRows> rows = rows_;
  if (!declared_groups_) return rows;  // all rows
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i].keys.page_table = rows[i].values.page_table = page_table.data() + tables[group_of_[i]];
  }
  return rows;
}

bool Pages::position_free() const {
  return std::ranges::all_of(rows_,
                             [](const storage::PagedRows& rows) { return rows.rotation.style == RopeStyle::kNone; });
}

absl::Status Pages::CheckPositions(std::span<const int32_t> page_table, std::span<const size_t> tables, uint64_t first,
                                   uint64_t count) const {
  if (count == 0) return absl::OkStatus();
  for (size_t g = 0; g < groups_.size(); ++g) {
    const auto& [page_tokens, pages] = groups_[g];
    const uint64_t entries = tables[g + 1] - tables[g], positions = page_tokens * entries;
    if (first > positions || count > positions - first) {
      return Invalid("page_table: ", entries, " entries are too few for ", count, " positions from ", first,
                     declared_groups_ ? absl::StrCat(" (group ", g, ")") : "");
    }
    for (uint64_t i = first / page_tokens; i <= (first + count - 1) / page_tokens; ++i) {
      const int32_t page = page_table[tables[g] + i];
      if (page < 0 || static_cast<uint32_t>(page) >= pages) {
        return Invalid("page_table[", tables[g] + i, "]: page ", page, " is out of range; ", pages,
                       " pages are declared");
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace ashlar::daemon
