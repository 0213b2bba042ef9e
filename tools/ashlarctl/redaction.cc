#include "tools/ashlarctl/redaction.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ashlar::ctl {
namespace {

using nlohmann::json;

// Fields of answers whose values name somebody or something.
constexpr const char* kNaming[] = {"tenant", "model_id", "lora", "client", "uid", "node"};

// Fields of the configuration, by their last names, and the kind of alias that each value of them gets. A tenant's own
// name is tenants[].name, and cluster.name is the cluster's.
struct Naming {
  const char *field, *kind;
};
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

const char* KindOf(const std::string& path) {
  const auto* const found = std::ranges::find(kNamingInYaml, path, &Naming::field);
  return found == std::end(kNamingInYaml) ? nullptr : found->kind;
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
      const char* const kind = KindOf(path);
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
      const bool naming = std::ranges::count(kNaming, name) > 0 && field.is_primitive() && !field.is_null();
      naming ? void(field = Alias(name, field.is_string() ? field.get<std::string>() : field.dump())) : Apply(field);
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
