// SPDX-License-Identifier: Apache-2.0
// Redaction: answers of a daemon without names. A name gets an alias that is the same wherever it occurs.
#pragma once

#include <map>
#include <string>

#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace ashlar::ctl {

class Redaction {
 public:
  // Replaces the names of tenants, models, their weights and tokenizers, engines, users and nodes, in place. Names of
  // nodes, clusters and tenants are also replaced inside other texts, such as paths. A field `yaml` is treated as a
  // configuration.
  void Apply(nlohmann::json& value);
  // Also replaces addresses and the daemon's etcd user in a configuration. Comments stay. A text that is not YAML is
  // removed completely.
  std::string Yaml(const std::string& yaml);

 private:
  class Writer;
  void Replace(nlohmann::json& value);
  std::string Alias(const std::string& kind, absl::string_view value);
  std::string Words(absl::string_view text) const;

  std::map<std::string, std::map<std::string, std::string>> aliases_;  // keyed by kind
};

}  // namespace ashlar::ctl
