// SPDX-License-Identifier: Apache-2.0
#include "daemon/config/reload.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ashlar/v1/config.pb.h"

namespace ashlar::daemon {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

constexpr size_t kMostNamed = 8;  // fields named in one line

std::string Scalar(const Message& message, const FieldDescriptor& field, int index) {
  const auto& reflection = *message.GetReflection();
  const bool many = index >= 0;
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL:
      return (many ? reflection.GetRepeatedBool(message, &field, index) : reflection.GetBool(message, &field))
                 ? "true"
                 : "false";
    case FieldDescriptor::CPPTYPE_UINT32:
      return absl::StrCat(many ? reflection.GetRepeatedUInt32(message, &field, index)
                               : reflection.GetUInt32(message, &field));
    case FieldDescriptor::CPPTYPE_UINT64:
      return absl::StrCat(many ? reflection.GetRepeatedUInt64(message, &field, index)
                               : reflection.GetUInt64(message, &field));
    default:
      return many ? reflection.GetRepeatedString(message, &field, index) : reflection.GetString(message, &field);
  }
}

std::string Value(const Message& message, const FieldDescriptor& field) {
  if (!field.is_repeated()) return Scalar(message, field, -1);
  std::vector<std::string> values;
  for (int i = 0; i < message.GetReflection()->FieldSize(message, &field); ++i) {
    values.push_back(Scalar(message, field, i));
  }
  return absl::StrCat("[", absl::StrJoin(values, ", "), "]");
}

void Compare(const std::string& prefix, const Message& now, const Message& next, std::vector<ConfigChange>& changes) {
  const auto& reflection = *now.GetReflection();
  for (int i = 0; i < now.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor& field = *now.GetDescriptor()->field(i);
    const std::string name = absl::StrCat(prefix, field.name());
    if (field.cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) {
      std::string before = Value(now, field), after = Value(next, field);
      if (before != after) changes.push_back({name, std::move(before), std::move(after)});
    } else if (field.is_repeated()) {
      const int before = reflection.FieldSize(now, &field), after = reflection.FieldSize(next, &field);
      if (before != after) {
        changes.push_back({name, absl::StrCat(before, " entries"), absl::StrCat(after, " entries")});
        continue;
      }
      for (int k = 0; k < before; ++k) {
        Compare(absl::StrCat(name, "[", k, "]."), reflection.GetRepeatedMessage(now, &field, k),
                reflection.GetRepeatedMessage(next, &field, k), changes);
      }
    } else if (reflection.HasField(now, &field) != reflection.HasField(next, &field) && field.name() == "cluster") {
      // The presence itself is reported as a change.
      changes.push_back({name, reflection.HasField(now, &field) ? "there" : "none",
                         reflection.HasField(next, &field) ? "there" : "none"});
    } else {
      Compare(absl::StrCat(name, "."), reflection.GetMessage(now, &field), reflection.GetMessage(next, &field),
              changes);
    }
  }
}

// Returns the field path without list indices.
std::string Plain(const std::string& field) {
  std::string plain;
  bool index = false;
  for (const char c : field) {
    if (c == ']') index = false;
    if (!index) plain += c;
    if (c == '[') index = true;
  }
  return plain;
}

}  // namespace

const std::vector<std::string>& ReloadableFields() {
  static const auto* const fields = new std::vector<std::string>{
      "drain_seconds",
      "log.audit_file",
      "log.level",
      "scrub.bytes_per_second",
      "tenants[].bytes_per_second",
      "tenants[].calls_per_second",
      "tenants[].dram_bytes",
      "tenants[].hbm_bytes",
      "tenants[].landing_bytes",
      "tenants[].max_landings",
      "tenants[].max_leased_segments",
      "tenants[].max_leases",
      "tenants[].max_regions",
      "tenants[].model_bytes",
      "tenants[].prefix_bytes",
      "tenants[].private_floor.dram_bytes",
      "tenants[].private_floor.hbm_bytes",
      "tenants[].private_floor.ssd_bytes",
      "tenants[].public_floor.dram_bytes",
      "tenants[].public_floor.hbm_bytes",
      "tenants[].public_floor.ssd_bytes",
      "tenants[].region_bytes",
      "tenants[].ssd_bytes",
      "tenants[].ttl_seconds",
  };
  return *fields;
}

absl::StatusOr<std::vector<ConfigChange>> ChangesFor(const v1::Config& now, const v1::Config& next) {
  std::vector<ConfigChange> changes;
  Compare("", now, next, changes);
  std::vector<ConfigChange> refused;
  for (const ConfigChange& change : changes) {
    const std::vector<std::string>& able = ReloadableFields();
    if (std::ranges::count(able, Plain(change.field)) == 0) refused.push_back(change);
  }
  if (refused.empty()) return changes;
  return absl::FailedPreconditionError(
      absl::StrCat(FieldsOf(refused), ": needs a restart of the daemon; the configuration in effect is unchanged"));
}

std::string FieldsOf(const std::vector<ConfigChange>& changes) {
  std::vector<std::string> names;
  for (size_t i = 0; i < std::min(changes.size(), kMostNamed); ++i) names.push_back(changes[i].field);
  const size_t more = changes.size() - names.size();
  return absl::StrCat(absl::StrJoin(names, ", "), more > 0 ? absl::StrCat(" and ", more, " more") : "");
}

}  // namespace ashlar::daemon
