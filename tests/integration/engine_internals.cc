// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/engine_internals.h"

#include <memory>

#include "client/engine/describe.h"
#include "client/engine/handles.h"
#include "client/engine/status.h"

namespace ashlar::integration {

engine::Status OpenOn(Client& client, const Region& region, const engine::OpenOptions& options, engine::Cache* out) {
  const absl::StatusOr<engine::DescribedModel> model = engine::Describe(options.model);
  if (!model.ok()) return engine::ToStatus(model.status());
  auto opened = engine::CacheState::Open(std::shared_ptr<Client>(&client, [](Client*) {}), region, *model, options);
  if (!opened.ok()) return engine::ToStatus(opened.status());
  (*opened)->open = *opened;
  engine::Access::Put(opened->get(), *out);
  return {};
}

uint64_t DaemonAdvances(const engine::Cache& cache) {
  return engine::Access::Of(cache)->daemon_advances;
}

}  // namespace ashlar::integration
