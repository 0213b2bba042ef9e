// SPDX-License-Identifier: Apache-2.0
// Warm: engines that offer prefill compute texts for an operator.
#include <future>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/admin.pb.h"
#include "daemon/admin/admin_service.h"
#include "proto/invalid.h"
#include "proto/limits.h"
#include "proto/prefill_limits.h"

namespace ashlar::daemon {

absl::Status AdminService::Warm(const v1::Texts& texts, v1::WarmReply* reply) const {
  if (static_cast<uint64_t>(texts.texts_size()) > limits::kMaxObjectsPerCall) {
    return Invalid("texts: too many; expected at most ", limits::kMaxObjectsPerCall);
  }
  const absl::StatusOr<ParsedTexts> asked = ReadTexts(texts);
  if (!asked.ok()) return asked.status();
  if (asked->model->shard.size > 1) {
    return absl::UnimplementedError(
        "ns: the model has several tensor-parallel shards; other engines cannot prefill for it");
  }
  std::vector<ColdSegment> cold;
  for (int i = 0; i < texts.texts_size(); ++i) {
    const storage::Query& query = asked->queries[i];
    if (!query.storable)
      return Invalid("texts[", i, "].tokens: too short; expected more tokens than the two seams have");
    if (query.tokens > limits::kMaxPrefillTokens) {
      return Invalid("texts[", i, "].tokens: too many; expected at most ", limits::kMaxPrefillTokens);
    }
    if (!texts.texts(i).media().empty())
      return Invalid("texts[", i, "].media: texts with media cannot be prefilled by other engines");
    if (!texts.texts(i).salt().empty())
      return Invalid("texts[", i, "].salt: texts with a salt cannot be prefilled by other engines");
    cold.push_back({.work = {.tenant = asked->tenant,
                             .ns = query.ns,
                             .key = query.key,
                             .kind = query.kind,
                             .tokens = query.tokens,
                             .packed = std::make_shared<const std::string>(texts.texts(i).tokens())}});
  }
  if (cold.empty()) return absl::OkStatus();
  // The reply comes later, when other nodes have reported their engines; the router keeps it only briefly.
  const auto states = std::make_shared<std::promise<absl::StatusOr<Router::States>>>();
  const absl::Status posted = OnLoop([&] {
    parts_.router.Warm(asked->tenant, std::move(cold),
                       [states](absl::StatusOr<Router::States> answer) { states->set_value(std::move(answer)); });
  });
  if (!posted.ok()) return posted;
  const absl::StatusOr<Router::States> answer = states->get_future().get();
  if (!answer.ok()) return answer.status();
  for (const PlannedSegmentState state : *answer) reply->add_states(static_cast<uint32_t>(state));
  return absl::OkStatus();
}

}  // namespace ashlar::daemon
