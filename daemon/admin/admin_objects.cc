// SPDX-License-Identifier: Apache-2.0
// Operators' calls on single objects: Pin, Unpin, Evict.
#include <cmath>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/admin.pb.h"
#include "daemon/admin/admin_service.h"

namespace ashlar::daemon {
namespace {

constexpr double kMaxPinSeconds = 100.0 * 366 * 24 * 3600;  // far from overflow

}  // namespace

absl::Status AdminService::WithEach(const v1::Texts& texts, v1::ObjectsReply* reply,
                                    const std::function<bool(storage::TenantId, const Key&)>& act) const {
  const absl::StatusOr<ParsedTexts> asked = ReadTexts(texts);
  if (!asked.ok()) return asked.status();
  return OnLoop([&] {
    for (const storage::Query& query : asked->queries) {
      reply->add_found(query.storable && act(asked->tenant, query.key));
    }
  });
}

absl::Status AdminService::Pin(const v1::PinRequest& request, v1::ObjectsReply* reply) const {
  const double seconds = request.seconds();
  if (!std::isfinite(seconds) || seconds < 0 || seconds > kMaxPinSeconds) {
    return absl::InvalidArgumentError(absl::StrCat("seconds: out of range; expected 0 to ", kMaxPinSeconds));
  }
  return WithEach(request.texts(), reply, [&](storage::TenantId tenant, const Key& key) {
    const auto until = parts_.clock.Now() + static_cast<storage::Nanos>(seconds * 1e9);
    return parts_.cache.retention().Pin(tenant, key, seconds == 0 ? 0 : until);
  });
}

absl::Status AdminService::Unpin(const v1::Texts& texts, v1::ObjectsReply* reply) const {
  return WithEach(texts, reply, [&](storage::TenantId tenant, const Key& key) {
    return parts_.cache.retention().Unpin(tenant, key);
  });
}

absl::Status AdminService::Evict(const v1::Texts& texts, v1::ObjectsReply* reply) const {
  return WithEach(texts, reply, [&](storage::TenantId tenant, const Key& key) {
    return parts_.cache.retention().Evict(tenant, key);
  });
}

}  // namespace ashlar::daemon
