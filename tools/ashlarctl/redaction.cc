// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/redaction.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <span>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace ashlar::ctl {
namespace {

using nlohmann::json;

struct Naming {
  const char *field, *kind;
};

// Fields of answers that contain names, and the kind of alias for each of their values.
constexpr Naming kNaming[] = {
    {"tenant", "tenant"},
    {"model_id", "model_id"},
    {"weights_digest", "weights"},
    {"tokenizer_digest", "tokenizer"},  // for a tokenizer of a hub, it contains the repository
    {"lora", "lora"},
    {"client", "client"},
    {"uid", "uid"},
    {"node", "node"},
    {"control_address", "address"},
    {"transport_address", "address"},
};

// The same for the configuration, by the fields' paths. A tenant's own name is tenants[].name, and cluster.name is the
// cluster's.
constexpr Naming kNamingInYaml[] = {
    {"listen.metrics_address", "address"},
    {"events.zmq_address", "address"},
    {"events.zmq_replay_address", "address"},
    {"tenants[].name", "tenant"},
    {"tenants[].uids[]", "uid"},
    {"cluster.node", "node"},
    {"cluster.name", "cluster"},
    {"cluster.peers[].node", "node"},
    {"cluster.peers[].tenants[]", "tenant"},
    {"cluster.control_address", "address"},
    {"cluster.transport_address", "address"},
    {"cluster.listen_address", "address"},
    {"cluster.transport_allow[]", "address"},
    {"cluster.etcd.endpoints[]", "address"},
    {"cluster.etcd.user", "user"},
    {"cluster.tls.spiffe_prefix", "prefix"},
};

// Kinds whose names also occur in other texts. They consist of letters, digits, '.', '_' and '-' (config.proto).
constexpr const char* kWordKinds[] = {"node", "cluster", "tenant"};

// Null if the field contains no name.
const char* KindOf(std::span<const Naming> table, const std::string& field) {
  const auto found = std::ranges::find(table, field, &Naming::field);
  return found == table.end() ? nullptr : found->kind;
}

// Returns the kind of names in which two models differ (explanation_text.cc), such as model_id for the field
// identity.model_id. Null: `object` describes no such difference.
const char* KindOfDifference(const json& object) {
  const auto field = object.find("field");
  if (field == object.end() || !field->is_string()) return nullptr;
  const auto& path = field->get_ref<const std::string&>();
  return KindOf(kNaming, std::string(absl::StripPrefix(path, "identity.")));
}

}  // namespace

// Rewrites a configuration, name by name.
class Redaction::Writer {
 public:
  explicit Writer(Redaction& redaction) : redaction_(redaction) {}

  void Write(const YAML::Node& node, const std::string& path) {
    if (node.IsMap()) {
      out_ << YAML::BeginMap;
      for (const auto& field : node) {
        const std::string& name = field.first.Scalar();
        out_ << YAML::Key << name << YAML::Value;
        Write(field.second, path.empty() ? name : absl::StrCat(path, ".", name));
      }
      out_ << YAML::EndMap;
    } else if (node.IsSequence()) {
      out_ << YAML::BeginSeq;
      for (const YAML::Node& item : node) Write(item, path + "[]");
      out_ << YAML::EndSeq;
    } else {
      const char* const kind = KindOf(kNamingInYaml, path);
      if (!node.IsScalar()) {
        out_ << node;
        return;
      }
      const std::string& text = node.Scalar();
      const std::string replaced = kind != nullptr ? redaction_.Alias(kind, text) : redaction_.Words(text);
      out_ << (replaced == text ? node : YAML::Node(replaced));
    }
  }
  std::string text() const { return absl::StrCat(out_.c_str(), "\n"); }

 private:
  Redaction& redaction_;
  YAML::Emitter out_;
};

void Redaction::Apply(json& value) {
  // A name may occur in a text before the field that defines it.
  json first = value;
  Replace(first);
  Replace(value);
}

void Redaction::Replace(json& value) {
  if (value.is_object()) {
    const char* const difference = KindOfDifference(value);
    for (auto& [name, field] : value.items()) {
      if (name == "yaml" && field.is_string()) {
        field = Yaml(field.get<std::string>());
        continue;
      }
      const bool differs = difference != nullptr && (name == "requested_value" || name == "other_value");
      if (differs && field.is_string()) {
        const std::string quoted = field.get<std::string>();
        field = Alias(difference, absl::StripSuffix(absl::StripPrefix(quoted, "\""), "\""));
        continue;
      }
      const char* const kind = field.is_primitive() && !field.is_null() ? KindOf(kNaming, name) : nullptr;
      kind != nullptr ? void(field = Alias(kind, field.is_string() ? field.get<std::string>() : field.dump()))
                      : Replace(field);
    }
  } else if (value.is_array()) {
    for (json& item : value) Replace(item);
  } else if (value.is_string()) {
    value = Words(value.get<std::string>());
  }
}

std::string Redaction::Yaml(const std::string& yaml) {
  try {
    const YAML::Node root = YAML::Load(yaml);
    Writer(*this).Write(root, "");  // learns the names
    Writer writer(*this);
    writer.Write(root, "");
    std::string text = writer.text();
    for (const absl::string_view line : absl::StrSplit(yaml, '\n')) {
      if (!line.empty() && line[0] == '#') absl::StrAppend(&text, line, "\n");
    }
    return text;
  } catch (const YAML::Exception& error) {
    return absl::StrCat("# left out: ", error.what(), "\n");
  }
}

std::string Redaction::Alias(const std::string& kind, absl::string_view value) {
  if (value.empty()) return "";
  std::map<std::string, std::string>& known = aliases_[kind];
  return known.emplace(value, absl::StrCat(kind, "-", known.size() + 1)).first->second;
}

std::string Redaction::Words(absl::string_view text) const {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    absl::string_view longest;
    const std::string* alias = nullptr;
    const bool begins = at == 0 || !absl::ascii_isalnum(static_cast<unsigned char>(text[at - 1]));
    for (const char* const kind : kWordKinds) {
      const auto known = aliases_.find(kind);
      if (!begins || known == aliases_.end()) continue;
      for (const auto& [name, of_name] : known->second) {
        const size_t end = at + name.size();
        if (name == "default" || name.size() <= longest.size() || text.substr(at, name.size()) != name) continue;
        if (end < text.size() && absl::ascii_isalnum(static_cast<unsigned char>(text[end]))) continue;
        longest = name;
        alias = &of_name;
      }
    }
    if (alias == nullptr) {
      out += text[at++];
      continue;
    }
    out += *alias;
    at += longest.size();
  }
  return out;
}

}  // namespace ashlar::ctl
