// SPDX-License-Identifier: Apache-2.0
// Children: the metrics of a family by tenant and further label values.
#pragma once

#include <prometheus/family.h>
#include <prometheus/labels.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "storage/tier/tier.h"

namespace ashlar::daemon {

// The metrics of a family by tenant and further label values. Each is created when first used.
template <typename Metric, typename... Values>
class Children {
 public:
  Children(prometheus::Family<Metric>& family, const std::vector<std::string>& tenants,
           std::array<const char*, sizeof...(Values)> labels)
      : family_(family), tenants_(tenants), labels_(labels) {}

  // `more` are the arguments after the labels with which the family creates a metric.
  template <typename... More>
  Metric& Get(storage::TenantId tenant, Values... values, const More&... more) {
    Metric*& child = children_[{tenant, values...}];
    if (child == nullptr) {
      prometheus::Labels labels = {{"tenant", tenants_.at(tenant)}};
      size_t next = 0;
      ((labels[labels_[next++]] = std::string(Name(values))), ...);
      child = &family_.Add(labels, more...);
    }
    return *child;
  }
  void Add(storage::TenantId tenant, Values... values, uint64_t amount) {
    Get(tenant, values...).Increment(static_cast<double>(amount));
  }

 private:
  prometheus::Family<Metric>& family_;
  const std::vector<std::string>& tenants_;
  const std::array<const char*, sizeof...(Values)> labels_;
  std::map<std::tuple<storage::TenantId, Values...>, Metric*> children_;
};

}  // namespace ashlar::daemon
