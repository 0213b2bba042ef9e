// SPDX-License-Identifier: Apache-2.0
#include "daemon/config/yaml_message.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "proto/byte_size.h"

namespace ashlar::daemon {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

absl::Status Bad(const std::string& path, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(path.empty() ? "config" : path, ": ", what));
}

// yaml-cpp tags a plain scalar with "?", a quoted one with "!".
bool IsPlainScalar(const YAML::Node& node) {
  return node.IsScalar() && node.Tag() != "!";
}

// Writes the value. Returns an error text; empty if there is none.
std::string ParseUnsigned(absl::string_view text, bool in_bytes, uint64_t max, uint64_t* value) {
  uint64_t number = 0;
  if (in_bytes) {
    const absl::StatusOr<uint64_t> bytes = ParseByteSize(text);
    if (!bytes.ok()) return std::string(bytes.status().message());
    number = *bytes;
  } else {
    const absl::string_view digits = absl::StripPrefix(text, "-");
    if (digits.empty() || !std::ranges::all_of(digits, absl::ascii_isdigit)) return "expected a whole number";
    if (digits.size() != text.size() || !absl::SimpleAtoi(digits, &number)) return "out of range";
  }
  if (number > max) return "out of range";
  *value = number;
  return "";
}

// yaml-cpp changes other bytes, so the effective configuration would differ from the file.
bool IsUtf8(absl::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto first = static_cast<uint8_t>(text[i++]);
    const int more = first < 0x80 ? 0 : first < 0xc2 ? -1 : first < 0xe0 ? 1 : first < 0xf0 ? 2 : first < 0xf5 ? 3 : -1;
    if (more < 0) return false;
    uint32_t code = more == 0 ? first : first & (0x3fu >> more);
    for (int k = 0; k < more; ++k, ++i) {
      if (i == text.size() || (static_cast<uint8_t>(text[i]) & 0xc0) != 0x80) return false;
      code = code << 6 | (static_cast<uint8_t>(text[i]) & 0x3fu);
    }
    const bool surrogate = code >= 0xd800 && code < 0xe000;
    if (surrogate || code > 0x10ffff || (more == 2 && code < 0x800) || (more == 3 && code < 0x10000)) return false;
  }
  return true;
}

// For these fields 0 means none or off. Other numbers have a default if they are omitted, possibly a large one, so an
// explicit 0 would not mean what it says.
bool MayBeZero(const FieldDescriptor& field) {
  static const auto* const names =
      new std::set<std::string>{"bytes_per_second", "calls_per_second", "capacity_bytes", "device",
                                "dram_bytes",       "hbm_bytes",        "ssd_bytes",      "ttl_seconds"};
  return field.is_repeated() || names->contains(field.name());
}

absl::Status ReadMessage(const YAML::Node& node, const std::string& path, Message* message);

// Reads one value into a singular field, or appends it to a repeated one.
absl::Status ReadValue(const YAML::Node& node, const std::string& path, const FieldDescriptor* field,
                       Message* message) {
  const Reflection* reflection = message->GetReflection();
  const bool repeated = field->is_repeated();
  if (!node.IsDefined() || node.IsNull()) return Bad(path, "has no value; give one or remove the field");
  if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
    return ReadMessage(node, path,
                       repeated ? reflection->AddMessage(message, field) : reflection->MutableMessage(message, field));
  }
  if (!node.IsScalar()) return Bad(path, "expected a single value");
  const std::string& text = node.Scalar();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      if (!IsUtf8(text)) return Bad(path, "not valid UTF-8");
      repeated ? reflection->AddString(message, field, text) : reflection->SetString(message, field, text);
      return absl::OkStatus();
    case FieldDescriptor::CPPTYPE_BOOL: {
      if (!IsPlainScalar(node) || (text != "true" && text != "false")) return Bad(path, "expected true or false");
      const bool value = text == "true";
      repeated ? reflection->AddBool(message, field, value) : reflection->SetBool(message, field, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_UINT32:
    case FieldDescriptor::CPPTYPE_UINT64: {
      const bool wide = field->cpp_type() == FieldDescriptor::CPPTYPE_UINT64;
      const uint64_t max = wide ? std::numeric_limits<uint64_t>::max() : std::numeric_limits<uint32_t>::max();
      if (!IsPlainScalar(node)) return Bad(path, "expected a whole number, without quotes");
      uint64_t value = 0;
      const bool in_bytes = absl::EndsWith(field->name(), "_bytes") || absl::StartsWith(field->name(), "bytes_");
      const std::string wrong = ParseUnsigned(text, in_bytes, max, &value);
      if (!wrong.empty()) return Bad(path, wrong);
      if (value == 0 && !MayBeZero(*field))
        return Bad(path, "0 is not allowed; leave the field out to use the default");
      if (wide) {
        repeated ? reflection->AddUInt64(message, field, value) : reflection->SetUInt64(message, field, value);
      } else {
        const auto narrow = static_cast<uint32_t>(value);
        repeated ? reflection->AddUInt32(message, field, narrow) : reflection->SetUInt32(message, field, narrow);
      }
      return absl::OkStatus();
    }
    default:
      return Bad(path, "a field of this type cannot be set in YAML");
  }
}

// These fields were singular once, so files may give one value without a list.
bool MayStandAlone(const FieldDescriptor& field) {
  return field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE && (field.name() == "gpu" || field.name() == "hbm");
}

// Returns the current name of a field of an earlier release; empty for any other name.
absl::string_view NewNameOf(const std::string& name) {
  static const auto* const names = new std::map<std::string, std::string>{
      {"least_patience_milliseconds", "min_patience_milliseconds"}, {"segments_of_a_node", "segments_per_node"}};
  const auto found = names->find(name);
  return found == names->end() ? absl::string_view() : absl::string_view(found->second);
}

absl::Status ReadMessage(const YAML::Node& node, const std::string& path, Message* message) {
  if (!node.IsMap()) return Bad(path, "expected a map of fields");
  std::set<std::string> seen;
  for (const auto& entry : node) {
    if (!entry.first.IsScalar()) return Bad(path, "expected a field name");
    const std::string& name = entry.first.Scalar();
    const std::string field_path = path.empty() ? name : absl::StrCat(path, ".", name);
    const FieldDescriptor* field = message->GetDescriptor()->FindFieldByName(name);
    if (field == nullptr) {
      const absl::string_view now = NewNameOf(name);
      return Bad(field_path, now.empty() ? "unknown field" : absl::StrCat("renamed; use ", now));
    }
    if (!seen.insert(name).second) return Bad(field_path, "given twice");
    if (!field->is_repeated()) {
      if (absl::Status status = ReadValue(entry.second, field_path, field, message); !status.ok()) return status;
      continue;
    }
    if (MayStandAlone(*field) && entry.second.IsMap()) {
      if (absl::Status status = ReadValue(entry.second, field_path, field, message); !status.ok()) return status;
      continue;
    }
    if (!entry.second.IsSequence()) return Bad(field_path, "expected a list");
    size_t index = 0;
    for (const YAML::Node& item : entry.second) {
      const std::string item_path = absl::StrCat(field_path, "[", index++, "]");
      if (absl::Status status = ReadValue(item, item_path, field, message); !status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

// Discards all events of a document.
class Deaf final : public YAML::EventHandler {
  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t, const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {}
  void OnMapEnd() override {}
};

// YAML::LoadAll does not return if a document starts with an invalid token, such as a comma: the parser reports empty
// documents forever.
bool IsOneDocument(const std::string& yaml) {
  std::istringstream in(yaml);
  YAML::Parser parser(in);
  Deaf deaf;
  return parser.HandleNextDocument(deaf) && !parser.HandleNextDocument(deaf);
}

void WriteMessage(const Message& message, YAML::Emitter& out);

// `index` is −1 for a singular field.
void WriteValue(const Message& message, const FieldDescriptor* field, int index, YAML::Emitter& out) {
  const Reflection* reflection = message.GetReflection();
  const bool single = index < 0;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_MESSAGE:
      WriteMessage(
          single ? reflection->GetMessage(message, field) : reflection->GetRepeatedMessage(message, field, index), out);
      return;
    case FieldDescriptor::CPPTYPE_STRING:
      out << YAML::DoubleQuoted
          << (single ? reflection->GetString(message, field) : reflection->GetRepeatedString(message, field, index));
      return;
    case FieldDescriptor::CPPTYPE_BOOL:
      out << (single ? reflection->GetBool(message, field) : reflection->GetRepeatedBool(message, field, index));
      return;
    case FieldDescriptor::CPPTYPE_UINT32:
      out << (single ? reflection->GetUInt32(message, field) : reflection->GetRepeatedUInt32(message, field, index));
      return;
    case FieldDescriptor::CPPTYPE_UINT64:
      out << (single ? reflection->GetUInt64(message, field) : reflection->GetRepeatedUInt64(message, field, index));
      return;
    default:
      out << YAML::Null;  // ReadValue refuses such fields, so none is set
  }
}

void WriteMessage(const Message& message, YAML::Emitter& out) {
  const Descriptor* descriptor = message.GetDescriptor();
  out << YAML::BeginMap;
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const FieldDescriptor* field = descriptor->field(i);
    // An absent part differs from an empty one: no GPU, no cluster.
    if (field->has_presence() && !message.GetReflection()->HasField(message, field)) continue;
    out << YAML::Key << field->name() << YAML::Value;
    if (!field->is_repeated()) {
      WriteValue(message, field, -1, out);
      continue;
    }
    out << YAML::BeginSeq;
    const int size = message.GetReflection()->FieldSize(message, field);
    for (int item = 0; item < size; ++item) WriteValue(message, field, item, out);
    out << YAML::EndSeq;
  }
  out << YAML::EndMap;
}

}  // namespace

absl::Status ParseYaml(const std::string& yaml, Message* message) {
  message->Clear();
  try {
    if (!IsOneDocument(yaml)) return Bad("", "expected exactly one YAML document");
    return ReadMessage(YAML::Load(yaml), "", message);
  } catch (const YAML::Exception& error) {
    return Bad("", absl::StrCat("not valid YAML: ", error.what()));
  }
}

std::string FormatYaml(const Message& message) {
  YAML::Emitter out;
  WriteMessage(message, out);
  return absl::StrCat(out.c_str(), "\n");
}

}  // namespace ashlar::daemon
