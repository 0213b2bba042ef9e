// SPDX-License-Identifier: Apache-2.0
// Identifiers of sessions, tenants, objects, reservations and leases.
#pragma once

#include <array>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace ashlar::storage {

using TenantId = uint32_t;
inline constexpr TenantId kNoTenant = UINT32_MAX;  // the cache's own work

using SessionId = uint64_t;               // an engine's connection; never reused
using LeaseId = std::array<uint8_t, 16>;  // random; a handle that processes of one engine may pass on
using ReservationId = uint64_t;
using LandingId = uint64_t;  // chosen by the client, unique within its session

// The use of a pool's bytes: segments shared by a namespace, or running states of conversations.
enum class PoolKind : uint8_t { kPublic = 0, kPrivate = 1 };
inline constexpr PoolKind kPools[] = {PoolKind::kPublic, PoolKind::kPrivate};
constexpr absl::string_view Name(PoolKind pool) {
  return pool == PoolKind::kPublic ? "public" : "private";
}

}  // namespace ashlar::storage
