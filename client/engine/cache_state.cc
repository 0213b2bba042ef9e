// SPDX-License-Identifier: Apache-2.0
#include "client/engine/cache_state.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "kernels/adaptive.h"

namespace ashlar::engine {
namespace {

PrefixUse PrefixesOf(const OpenOptions& options) {
  return {
      .capture_tokens = options.capture_tokens, .span_tokens = options.span_tokens, .span_dtype = options.span_dtype};
}

// The text of Cache::warning.
std::string WarningOf(const ashlar::Layout& layout, double epsilon) {
  if (epsilon == 0 || epsilon >= kernels::kHalfError) return "";
  for (size_t i = 0; i < layout.layers.size(); ++i) {
    const auto* const linear = std::get_if<LinearLayer>(&layout.layers[i]);
    if (linear == nullptr || linear->transition != TransitionForm::kDense || linear->state_dtype == DType::kF32)
      continue;
    return absl::StrCat("epsilon: ", epsilon, " is below ", kernels::kHalfError, ", by which the fp16 transitions of ",
                        "layers[", i, "] are wrong as they are stored: most will stay dense");
  }
  return "";
}

}  // namespace

absl::StatusOr<std::shared_ptr<CacheState>> CacheState::Open(std::shared_ptr<Client> client, Region region,
                                                             const DescribedModel& model, const OpenOptions& options) {
  if (options.compose != ComposeBy::kProcess && options.compose != ComposeBy::kDaemon) {
    return absl::InvalidArgumentError(absl::StrCat("compose: ", static_cast<int>(options.compose), " is unknown"));
  }
  if (options.workers.run != nullptr && options.workers.size < 1) {
    return absl::InvalidArgumentError("workers.size: out of range; expected at least 1");
  }
  if (!(options.epsilon >= 0)) return absl::InvalidArgumentError("epsilon: negative; expected 0 or more");
  std::shared_ptr<CacheState> cache(new CacheState(std::move(client)));
  cache->region = std::move(region);
  cache->prefixes = PrefixesOf(options);
  cache->epsilon = options.epsilon;
  cache->compose = options.compose;
  cache->land = Milliseconds(options.land_ms);
  cache->quiesce = Milliseconds(options.quiet_ms);
  cache->patience = Milliseconds(options.timeout_ms);
  if (options.workers.run != nullptr) cache->workers = std::make_unique<LentWorkers>(options.workers);
  if (absl::Status status = cache->OpenModel(model); !status.ok()) return status;
  cache->warning = WarningOf(cache->layout(), options.epsilon);
  if (absl::Status status = cache->TakeMemory(options.memory); !status.ok()) return status;
  return cache;
}

absl::Status CacheState::OpenModel(const DescribedModel& described) {
  absl::StatusOr<ashlar::Model> opened =
      client->OpenModel(described.identity, described.layout, described.shard, described.cost, prefixes);
  if (!opened.ok()) return NameModel(opened.status());
  model = *std::move(opened);
  page_tokens = described.layout.page_tokens;
  groups.all = {{.page_tokens = page_tokens}};
  tensor_parallel_size = described.shard.tensor_parallel_size;
  return absl::OkStatus();
}

absl::StatusOr<Region> CacheState::MakeRegion(const Memory& memory, uint64_t bytes) {
  switch (memory.kind) {
    case MemoryKind::kMemfd:
      return client->RegisterRegion(memory.memfd, bytes);
    case MemoryKind::kGpu: {
      kernels::GpuId gpu;
      std::memcpy(gpu.data(), memory.gpu, gpu.size());
      return client->RegisterGpuRegion(memory.gpu_descriptor, reinterpret_cast<std::byte*>(memory.gpu_data), bytes,
                                       gpu);
    }
    default:
      return client->HostRegion(bytes);
  }
}

// With pages on a GPU, states are staged in host memory, which a session on a GPU with a tier may not have.
absl::Status CacheState::CheckStaging() {
  if (region.memory() != kernels::MemoryKind::kDevice) return absl::OkStatus();
  const absl::StatusOr<Staging::Held> held = staging.Hold(1);
  if (held.ok()) return absl::OkStatus();
  const char* const refused = absl::IsFailedPrecondition(held.status())
                                  ? ", which this GPU's hbm tier excludes; remove the hbm tier or use host memory: "
                                  : ", which the daemon could not provide: ";
  return absl::Status(held.status().code(),
                      absl::StrCat("memory.gpu: states are staged in host memory", refused, held.status().message()));
}

absl::Status CacheState::CheckSharing(const Memory& memory) const {
  if (!memory.share_in_place) return absl::OkStatus();
  const char* const field = "memory.share_in_place: ";
  if (memory.kind != MemoryKind::kHosted) return absl::InvalidArgumentError(absl::StrCat(field, "needs hosted memory"));
  if (memory.group_count > 0) return absl::InvalidArgumentError(absl::StrCat(field, "needs one page table"));
  if (tensor_parallel_size > 1) return absl::InvalidArgumentError(absl::StrCat(field, "needs tensor_parallel_size 1"));
  return absl::OkStatus();
}

absl::Status CacheState::TakeMemory(const Memory& memory) {
  if (memory.kind == MemoryKind::kNone) return absl::OkStatus();
  if (absl::Status status = CheckSharing(memory); !status.ok()) return status;
  absl::StatusOr<std::vector<uint32_t>> group_of = GroupsOf(memory, layout());
  if (!group_of.ok()) return group_of.status();
  absl::StatusOr<PagedCache> pages = Describe(memory, page_tokens, *group_of);
  if (!pages.ok()) return pages.status();
  pages->allocate = shares_in_place = memory.share_in_place;
  uint64_t bytes = memory.bytes;
  if (memory.places == nullptr) {
    if (memory.kind == MemoryKind::kMemfd) return absl::InvalidArgumentError("memory.places: null");
    absl::StatusOr<uint64_t> placed = PlacePages(layout(), *group_of, *pages);
    if (!placed.ok()) return placed.status();
    if (memory.kind == MemoryKind::kGpu && memory.bytes < *placed) {
      return absl::InvalidArgumentError(absl::StrCat("memory.bytes: ", memory.bytes, "; the pages need ", *placed));
    }
    if (memory.kind != MemoryKind::kGpu) bytes = *placed;
  }
  if (pages->layers.empty() && bytes == 0) return absl::OkStatus();  // a model without attention has no pages
  if (region.size() == 0) {
    absl::StatusOr<Region> made = MakeRegion(memory, bytes);
    if (!made.ok()) return absl::Status(made.status().code(), absl::StrCat("memory: ", made.status().message()));
    region = *std::move(made);
  }
  if (absl::Status status = CheckStaging(); !status.ok()) return status;
  if (absl::Status status = model.DeclarePages(region, *pages); !status.ok()) {
    return absl::Status(status.code(), absl::StrCat("memory: ", status.message()));
  }
  std::ranges::transform(pages->layers, std::back_inserter(places), ToPlace);
  groups.named = !pages->groups.empty();
  groups.common_pages = pages->common_pages;
  groups.all = {{.page_tokens = pages->page_tokens, .pages = pages->pages}};
  if (groups.named) groups.all.clear();
  for (const PageGroup& group : pages->groups) {
    groups.all.push_back({.page_tokens = group.page_tokens, .pages = group.pages});
  }
  return absl::OkStatus();
}

absl::StatusOr<const LinearLayer*> CacheState::LinearAt(uint32_t layer) const {
  const auto* const linear =
      layer < layout().layers.size() ? std::get_if<LinearLayer>(&layout().layers[layer]) : nullptr;
  if (linear == nullptr) return absl::InvalidArgumentError(absl::StrCat("layer: ", layer, " is not a linear layer"));
  return linear;
}

absl::Status CacheState::CheckHasState(uint32_t layer) const {
  if (layer < layout().layers.size() && HasState(layout().layers[layer])) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("layer: ", layer, " has no state"));
}

uint32_t CacheState::SharedBlocks(const ashlar::Match& match) const {
  const PrefixResult& prefix = match.prefix();
  const bool shared = shares_in_place && !prefix.own && prefix.provenance == Provenance::kExact;
  return shared ? prefix.blocks : 0;
}

bool CacheState::has_attention() const {
  return std::ranges::any_of(layout().layers, HasRows);
}

}  // namespace ashlar::engine
