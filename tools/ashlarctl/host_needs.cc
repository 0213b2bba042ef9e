// SPDX-License-Identifier: Apache-2.0
// NeedsOf: what a daemon's configuration requires of its machine.
#include <yaml-cpp/yaml.h>

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "proto/byte_size.h"
#include "tools/ashlarctl/host.h"

namespace ashlar::ctl {
namespace {

// Expands ${NAME} in the whole text, like the daemon does from its environment. A variable that is not set here stays,
// as $NAME.
std::string Expanded(const std::string& text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = text.find("${", at), end = text.find('}', begin);
    if (end == std::string::npos) return out + text.substr(at);
    const std::string name = text.substr(begin + 2, end - begin - 2);
    const char* const value = std::getenv(name.c_str());
    absl::StrAppend(&out, text.substr(at, begin - at), value != nullptr ? value : absl::StrCat("$", name));
    at = end + 1;
  }
  return out;
}

// Empty if the file does not have it.
std::string Scalar(const YAML::Node& file, const char* section, const char* field) {
  const YAML::Node within = *section == '\0' ? file : file[section];
  if (!within || !within.IsMap()) return "";
  const YAML::Node value = within[field];
  return value && value.IsScalar() ? value.Scalar() : "";
}

absl::Status ReadCapacity(const YAML::Node& file, const char* section, uint64_t* bytes) {
  const std::string text = Scalar(file, section, "capacity_bytes");
  if (text.empty()) return absl::OkStatus();
  const absl::StatusOr<uint64_t> size = ParseByteSize(text);
  if (!size.ok())
    return absl::InvalidArgumentError(absl::StrCat(section, ".capacity_bytes: ", size.status().message()));
  *bytes = *size;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<HostNeeds> NeedsOf(const std::string& yaml) {
  HostNeeds needs;
  try {
    const YAML::Node file = YAML::Load(Expanded(yaml));
    if (!file.IsMap()) return absl::InvalidArgumentError("expected a configuration of the daemon");
    for (const absl::Status& status :
         {ReadCapacity(file, "dram", &needs.dram_bytes), ReadCapacity(file, "ssd", &needs.ssd_bytes)}) {
      if (!status.ok()) return status;
    }
    needs.ssd_folder = Scalar(file, "ssd", "folder");
    needs.locked = Scalar(file, "dram", "lock") == "true";
    needs.fabric = Scalar(file, "cluster", "expect_transport") == "rdma";
    needs.sandbox = Scalar(file, "", "sandbox") == "on";
  } catch (const YAML::Exception& error) {
    return absl::InvalidArgumentError(error.what());
  }
  return needs;
}

}  // namespace ashlar::ctl
