// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/erase/acknowledgements.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <set>
#include <utility>

#include "absl/strings/str_join.h"
#include "daemon/runtime/log.h"

namespace ashlar::daemon {
namespace {

constexpr size_t kMostNamed = 16;  // per log line

PendingErasures SumOf(const std::map<ClusterErasure::Id, storage::Nanos>& since, storage::Nanos now) {
  PendingErasures sum{.count = since.size()};
  for (const auto& [id, began] : since) {
    sum.oldest_seconds = std::max(sum.oldest_seconds, static_cast<double>(now - began) * 1e-9);
  }
  return sum;
}

}  // namespace

Acknowledgements::Waiting Acknowledgements::Look() {
  const storage::Nanos now = clock_.Now();
  const std::vector<std::shared_ptr<const Member>> members = directory_.Members();  // this node first
  Since here, elsewhere;
  std::set<std::string> late;
  const auto age_of = [now](const Since& before, Since& since, const ClusterErasure::Id& id) {
    const auto known = before.find(id);
    return now - (since[id] = known == before.end() ? now : known->second);
  };
  for (const ClusterErasure& one : directory_.Erasures()) {
    for (size_t i = 0; i < members.size(); ++i) {
      if (members[i]->erased >= one.revision) continue;
      const bool is_other = i > 0;
      const storage::Nanos age = is_other ? age_of(elsewhere_, elsewhere, one.id) : age_of(here_, here, one.id);
      if (is_other && age > kPatience) late.insert(members[i]->node);
    }
  }
  here_ = std::move(here);
  elsewhere_ = std::move(elsewhere);
  Waiting waiting{.here = SumOf(here_, now), .elsewhere = SumOf(elsewhere_, now), .nodes = {late.begin(), late.end()}};
  if (!waiting.nodes.empty() && waiting.nodes != named_) {
    const size_t named = std::min(waiting.nodes.size(), kMostNamed);
    Log(LogLevel::kWarning, "erasure pending: other nodes have not acknowledged it",
        {{"nodes", absl::StrJoin(waiting.nodes.begin(), waiting.nodes.begin() + static_cast<ptrdiff_t>(named), " ")},
         {"count", waiting.nodes.size()},
         {"seconds", static_cast<int64_t>(waiting.elsewhere.oldest_seconds)}});
  }
  named_ = waiting.nodes;
  return waiting;
}

}  // namespace ashlar::daemon
