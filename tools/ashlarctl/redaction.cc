#include "tools/ashlarctl/redaction.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <span>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ashlar::ctl {
namespace {

using nlohmann::json;

struct Naming {
  const char *field, *kind;
};

// Fields of answers whose values name somebody or something, and the kind of alias that each value of them gets.
constexpr Naming kNaming[] = {
    {"tenant", "tenant"},
    {"model_id", "model_id"},
    {"lora", "lora"},
    {"client", "client"},
    {"uid", "uid"},
    {"node", "node"},
    {"control_address", "address"},
    {"transport_address", "address"},
};

// The same of the configuration, by the fields' paths. A tenant's own
// name is tenants[].name, and cluster.name is the cluster's.
constexpr Naming kNamingInYaml[] = {
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

// Null: it names nothing.
const char* KindOf(std::span<const Naming> table, const std::string& field) {
  const auto found = std::ranges::find(table, field, &Naming::field);
  return found == table.end() ? nullptr : found->kind;
}

}  // namespace

// Writes a configuration anew, name by name.
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
      out_ << (kind == nullptr || !node.IsScalar() ? node : YAML::Node(redaction_.Alias(kind, node.Scalar())));
    }
  }
  std::string text() const { return absl::StrCat(out_.c_str(), "\n"); }

 private:
  Redaction& redaction_;
  YAML::Emitter out_;
};

void Redaction::Apply(json& value) {
  if (value.is_object()) {
    for (auto& [name, field] : value.items()) {
      const char* const kind = field.is_primitive() && !field.is_null() ? KindOf(kNaming, name) : nullptr;
      kind != nullptr ? void(field = Alias(kind, field.is_string() ? field.get<std::string>() : field.dump()))
                      : Apply(field);
    }
  } else if (value.is_array()) {
    for (json& item : value) Apply(item);
  }
}

std::string Redaction::Yaml(const std::string& yaml) {
  try {
    Writer writer(*this);
    writer.Write(YAML::Load(yaml), "");
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

}  // namespace ashlar::ctl
