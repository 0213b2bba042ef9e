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
  // The names of tenants, models, engines, users and nodes, in place. Names of nodes, clusters and tenants also where
  // they are words of another text, as of a path. A field `yaml` is a configuration.
  void Apply(nlohmann::json& value);
  // A configuration: also addresses, and who the daemon is in etcd. Comments stay. A text that is no YAML is left out
  // whole.
  std::string Yaml(const std::string& yaml);

 private:
  class Writer;
  void Replace(nlohmann::json& value);
  std::string Alias(const std::string& kind, absl::string_view value);
  std::string Words(absl::string_view text) const;

  std::map<std::string, std::map<std::string, std::string>> aliases_;  // by kind
};

}  // namespace ashlar::ctl
