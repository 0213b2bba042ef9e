// SPDX-License-Identifier: Apache-2.0
#include "client/session/opened_model.h"

#include <algorithm>
#include <utility>

#include "ashlar/v1/cache.pb.h"
#include "client/session/process_bound.h"
#include "proto/shard.h"

namespace ashlar::internal {

ModelHandle::~ModelHandle() {
  if (const std::shared_ptr<Connection> alive = connection()) alive->CloseModel(id_);
}

absl::StatusOr<std::shared_ptr<OpenedModel>> OpenedModel::Open(Declaration declaration,
                                                               const std::shared_ptr<Connection>& connection,
                                                               Deadline deadline) {
  const Shard& shard = declaration.shard;
  // The daemon divides the model in the same way, and reports which field of a shard is wrong.
  absl::StatusOr<Layout> layout =
      shard.tensor_parallel_rank < shard.tensor_parallel_size
          ? ShardLayout(declaration.layout, {.rank = shard.tensor_parallel_rank, .size = shard.tensor_parallel_size})
          : declaration.layout;
  if (!layout.ok()) return layout.status();
  auto model = MakeProcessBound<OpenedModel>(std::move(declaration), *std::move(layout));
  absl::StatusOr<std::shared_ptr<const ModelHandle>> handle = model->OpenOn(connection, model->ns_, deadline);
  if (!handle.ok()) return handle.status();
  MutexLock lock(model->mutex_);
  model->handles_.model = *std::move(handle);
  return model;
}

absl::StatusOr<ModelBinding> OpenedModel::binding() const {
  MutexLock lock(mutex_);
  ModelBinding binding{.connection = handles_.model->connection(), .model = handles_.model};
  if (binding.connection == nullptr || binding.connection->ended()) {
    return absl::UnavailableError("not connected to the daemon");
  }
  if (handles_.pages_declared) {
    binding.pages_id = handles_.pages_id;
    binding.pages = pages_->region;
    const PagedCache& cache = pages_->cache;
    binding.page_tokens = cache.groups.empty() ? cache.page_tokens : cache.groups.front().page_tokens;
  }
  binding.pages_missing = pages_.has_value() && !handles_.pages_declared;
  return binding;
}

absl::Status OpenedModel::DeclarePages(std::shared_ptr<RegionMemory> region, const PagedCache& cache,
                                       Deadline deadline) {
  MutexLock turn(declaring_);
  absl::StatusOr<ModelBinding> bound = binding();
  if (!bound.ok()) return bound.status();
  Pages pages{std::move(region), cache};
  absl::StatusOr<uint64_t> id = DeclareOn(*bound->connection, *bound->model, pages, deadline);
  if (!id.ok()) return id.status();
  MutexLock lock(mutex_);
  // A connection ends before the next one is restored from these fields.
  if (handles_.model != bound->model || bound->connection->ended()) {
    return absl::UnavailableError("the daemon exited or closed the session while the pages were declared");
  }
  handles_.pages_id = *id;
  handles_.pages_declared = true;
  pages_ = std::move(pages);
  return absl::OkStatus();
}

std::shared_ptr<const void> OpenedModel::CountRequest(uint64_t generation) {
  MutexLock lock(mutex_);
  std::shared_ptr<const Requests> requests = requests_.lock();
  if (requests == nullptr) {
    requests = std::make_shared<const Requests>(Requests{generation});
    requests_ = requests;
  }
  return requests->generation == generation ? requests : nullptr;
}

// Restores the model before its pages, so that the model is open even if the daemon has no space for the pages' region.
absl::Status OpenedModel::Restore(const std::shared_ptr<Connection>& connection, Deadline deadline) {
  MutexLock turn(declaring_);
  Handles known;
  std::optional<Pages> pages;
  {
    MutexLock lock(mutex_);
    known = handles_;
    pages = pages_;
  }
  if (known.model->connection() != connection) {
    NamespaceId ns;
    absl::StatusOr<std::shared_ptr<const ModelHandle>> handle = OpenOn(connection, ns, deadline);
    if (!handle.ok()) return handle.status();
    if (ns != ns_) return absl::FailedPreconditionError("the daemon returned a different namespace than before");
    known = {.model = *std::move(handle)};
    MutexLock lock(mutex_);
    handles_ = known;
  }
  if (!pages.has_value() || known.pages_declared) return absl::OkStatus();
  if (absl::Status status = pages->region->Restore(connection, deadline); !status.ok()) return status;
  absl::StatusOr<uint64_t> id = DeclareOn(*connection, *known.model, *pages, deadline);
  if (!id.ok()) return id.status();
  MutexLock lock(mutex_);
  handles_.pages_id = *id;
  handles_.pages_declared = true;
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const ModelHandle>> OpenedModel::OpenOn(const std::shared_ptr<Connection>& connection,
                                                                       NamespaceId& ns, Deadline deadline) const {
  connection->CloseModels(deadline);  // a session has a limit of models
  v1::OpenModelRequest request;
  request.set_session(connection->session());
  request.set_identity(EncodeIdentity(declaration_.identity));
  request.set_layout(EncodeLayout(declaration_.layout));
  request.mutable_shard()->set_first_layer(declaration_.shard.first_layer);
  request.mutable_shard()->set_layer_count(declaration_.shard.layer_count);
  request.mutable_shard()->set_tensor_parallel_rank(declaration_.shard.tensor_parallel_rank);
  request.mutable_shard()->set_tensor_parallel_size(declaration_.shard.tensor_parallel_size);
  request.mutable_cost()->set_flops_per_token(declaration_.cost.flops_per_token);
  request.mutable_cost()->set_flops_per_token_squared(declaration_.cost.flops_per_token_squared);
  request.mutable_cost()->set_tokens_per_second(declaration_.cost.tokens_per_second);
  if (const uint32_t capture = declaration_.prefixes.capture_tokens; capture > 0) {
    request.mutable_prefixes()->set_capture_tokens(capture);
    request.mutable_prefixes()->set_span_tokens(declaration_.prefixes.span_tokens);
    request.mutable_prefixes()->set_span_dtype(static_cast<uint32_t>(declaration_.prefixes.span_dtype));
  }
  v1::OpenModelReply reply;
  if (absl::Status status = connection->rpc().OpenModel(request, reply, deadline); !status.ok()) return status;
  auto handle = MakeProcessBound<const ModelHandle>(connection, reply.model());
  if (reply.ns().size() != ns.bytes.size()) return absl::InternalError("the daemon's answer lacks the namespace");
  std::copy(reply.ns().begin(), reply.ns().end(), ns.bytes.begin());
  return handle;
}

absl::StatusOr<uint64_t> OpenedModel::DeclareOn(Connection& connection, const ModelHandle& model, const Pages& pages,
                                                Deadline deadline) const {
  const std::optional<uint64_t> region = pages.region->IdOn(connection);
  if (!region.has_value()) return absl::FailedPreconditionError("region: not registered with this daemon");
  v1::DeclarePagesRequest request;
  request.set_session(connection.session());
  request.set_model(model.id());
  request.set_region(*region);
  if (pages.cache.groups.empty()) {
    request.set_page_tokens(pages.cache.page_tokens);
    request.set_pages(pages.cache.pages);
  }
  request.set_allocate(pages.cache.allocate);
  for (const PageGroup& group : pages.cache.groups) {
    v1::PageGroup* declared = request.add_groups();
    declared->set_page_tokens(group.page_tokens);
    declared->set_pages(group.pages);
  }
  request.set_common_pages(pages.cache.common_pages);
  for (const PagedLayer& layer : pages.cache.layers) {
    v1::PagedLayer* declared = request.add_layers();
    declared->set_layer(layer.layer);
    declared->set_key_offset(layer.key_offset);
    declared->set_value_offset(layer.value_offset);
    declared->set_page_stride(layer.page_stride);
    declared->set_token_stride(layer.token_stride);
    declared->set_key_head_stride(layer.key_head_stride);
    declared->set_value_head_stride(layer.value_head_stride);
    declared->set_key_scale_offset(layer.key_scale_offset);
    declared->set_value_scale_offset(layer.value_scale_offset);
    declared->set_scale_page_stride(layer.scale_page_stride);
    declared->set_scale_token_stride(layer.scale_token_stride);
    declared->set_scale_head_stride(layer.scale_head_stride);
    declared->set_group(layer.group);
  }
  v1::DeclarePagesReply reply;
  if (absl::Status status = connection.rpc().DeclarePages(request, reply, deadline); !status.ok()) return status;
  return reply.pages_id();
}

}  // namespace ashlar::internal
