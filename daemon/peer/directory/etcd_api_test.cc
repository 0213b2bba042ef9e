// SPDX-License-Identifier: Apache-2.0
// Checks the daemon's copy of etcd's API against etcd's own files, where Debian's golang-etcd-server-dev is installed.
#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <regex>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "etcd/v3/kv.pb.h"
#include "etcd/v3/rpc.pb.h"

namespace ashlar::daemon {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::EnumDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::FileDescriptor;

// "Message.field" to "type number" ("repeated type number"), "Enum.VALUE" to its number, "Service.Method" to its types;
// nested messages and enums by their own name, which is unique in etcd's files.
using Declared = std::map<std::string, std::string>;

Declared ReadDeclarations(const std::string& path) {
  std::ifstream file(path);
  Declared declared;
  std::vector<std::string> scopes;
  const std::regex opens(R"(^\s*(message|enum|service|oneof)\s+(\w+)\s*\{(\s*\})?.*)");
  const std::regex field(R"(^\s*(repeated\s+)?([\w.]+)\s+(\w+)\s*=\s*(\d+)\s*(\[[^\]]*\])?;.*)");
  const std::regex value(R"(^\s*(\w+)\s*=\s*(\d+)\s*;.*)");
  const std::regex method(R"(^\s*rpc\s+(\w+)\s*\((stream )?(\w+)\)\s*returns\s*\((stream )?(\w+)\).*)");
  std::smatch match;
  int depth_of_options = 0;  // depth inside a method
  for (std::string line; std::getline(file, line);) {
    line = line.substr(0, line.find("//"));
    if (std::regex_match(line, match, opens)) {
      if (!match[3].matched) scopes.push_back(match[1] == "oneof" ? scopes.back() : match[2].str());
    } else if (std::regex_match(line, match, method)) {
      declared[scopes.back() + "." + match[1].str()] =
          absl::StrCat(match[2].str(), match[3].str(), " ", match[4].str(), match[5].str());
      depth_of_options = line.find('{') != std::string::npos ? 1 : 0;
    } else if (depth_of_options > 0) {
      for (const char c : line) depth_of_options += c == '{' ? 1 : c == '}' ? -1 : 0;
    } else if (std::regex_match(line, match, field)) {
      declared[scopes.back() + "." + match[3].str()] =
          absl::StrCat(match[1].matched ? "repeated " : "", match[2].str(), " ", match[4].str());
    } else if (std::regex_match(line, match, value)) {
      declared[scopes.back() + "." + match[1].str()] = match[2];
    } else if (line.find('}') != std::string::npos && !scopes.empty()) {
      scopes.pop_back();
    }
  }
  return declared;
}

// In etcd's notation: names of other packages in full, all others short.
std::string TypeOf(const FieldDescriptor& field) {
  const auto name = [&](const std::string& full, const std::string& short_name, const std::string& package) {
    return package == field.file()->package() ? short_name : full;
  };
  if (const Descriptor* message = field.message_type()) {
    return name(message->full_name(), message->name(), message->file()->package());
  }
  if (const EnumDescriptor* type = field.enum_type()) {
    return name(type->full_name(), type->name(), type->file()->package());
  }
  return field.type_name();
}

void Collect(const EnumDescriptor& type, Declared* declared) {
  for (int i = 0; i < type.value_count(); ++i) {
    (*declared)[type.name() + "." + type.value(i)->name()] = absl::StrCat(type.value(i)->number());
  }
}

void Collect(const Descriptor& message, Declared* declared) {
  for (int i = 0; i < message.field_count(); ++i) {
    const FieldDescriptor& field = *message.field(i);
    (*declared)[message.name() + "." + field.name()] =
        absl::StrCat(field.is_repeated() ? "repeated " : "", TypeOf(field), " ", field.number());
  }
  for (int i = 0; i < message.enum_type_count(); ++i) Collect(*message.enum_type(i), declared);
}

Declared Ours(const FileDescriptor& file) {
  Declared declared;
  for (int i = 0; i < file.message_type_count(); ++i) Collect(*file.message_type(i), &declared);
  for (int i = 0; i < file.service_count(); ++i) {
    for (int j = 0; j < file.service(i)->method_count(); ++j) {
      const auto& method = *file.service(i)->method(j);
      declared[file.service(i)->name() + "." + method.name()] =
          absl::StrCat(method.client_streaming() ? "stream " : "", method.input_type()->name(), " ",
                       method.server_streaming() ? "stream " : "", method.output_type()->name());
    }
  }
  return declared;
}

class EtcdApi : public ::testing::TestWithParam<std::tuple<const char*, const char*, const FileDescriptor*>> {};

TEST_P(EtcdApi, MatchesEtcdApi) {
  const auto& [name, package, ours] = GetParam();
  const std::string path = absl::StrCat("/usr/share/gocode/src/go.etcd.io/etcd/", name);
  if (!std::ifstream(path).is_open()) GTEST_SKIP() << path << " is not installed (Debian's golang-etcd-server-dev)";
  EXPECT_EQ(ours->package(), package);
  const Declared theirs = ReadDeclarations(path);
  const Declared declared = Ours(*ours);
  EXPECT_GT(declared.size(), 9u);
  for (const auto& [what, how] : declared) {
    const auto found = theirs.find(what);
    EXPECT_EQ(found == theirs.end() ? "nothing" : found->second, how) << what;
  }
}

INSTANTIATE_TEST_SUITE_P(Files, EtcdApi,
                         ::testing::Values(std::tuple("etcdserver/etcdserverpb/rpc.proto", "etcdserverpb",
                                                      etcdserverpb::TxnRequest::descriptor()->file()),
                                           std::tuple("mvcc/mvccpb/kv.proto", "mvccpb",
                                                      mvccpb::KeyValue::descriptor()->file())),
                         [](const auto& instance) { return std::string(std::get<1>(instance.param)); });

}  // namespace
}  // namespace ashlar::daemon
