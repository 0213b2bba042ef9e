// SPDX-License-Identifier: Apache-2.0
// Reads a Hugging Face configuration field by field, and reports the fields that nothing has read.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace ashlar::ctl {

// A value of the file for a message, cut where it is long.
std::string ShownJson(const nlohmann::json& value);

// Reads fields of one object and remembers the first refusal, which names the field with the object's path before it.
class HfFields {
 public:
  HfFields(const nlohmann::json& object, std::string path) : object_(object), path_(std::move(path)) {}

  bool Has(const std::string& name) const { return object_.contains(name) && !object_[name].is_null(); }
  // A positive number of 32 bits. 1 after a refusal, so that it can be divided by.
  uint32_t Number(const std::string& name);
  uint32_t NumberOr(const std::string& name, uint32_t otherwise) { return Has(name) ? Number(name) : otherwise; }
  // The same, or 0.
  uint32_t NumberOrZero(const std::string& name);
  std::string Text(const std::string& name);  // empty: it is missing or no text
  std::vector<nlohmann::json> List(const std::string& name);
  bool IsTrue(const std::string& name);
  const nlohmann::json& Object(const std::string& name);  // an empty object if it is missing or null

  // The field is known and has no effect here.
  void Accept(const std::string& name) { read_.insert(name); }
  bool IsRead(const std::string& name) const { return read_.contains(name); }
  uint32_t Refuse(absl::string_view name, absl::string_view why);
  void Refuse(const absl::Status& status);

  const absl::Status& status() const { return status_; }
  const nlohmann::json& object() const { return object_; }

 private:
  const nlohmann::json& object_;
  const std::string path_;  // "text_config.", or empty
  std::set<std::string> read_;
  absl::Status status_;
};

// Refuses the first field that was not read, is not off (null, false, 0, or empty) and whose name suggests that it
// changes what a layer stores: windows, heads, states, layers of other kinds. Known harmless names pass. Without
// `recurrence_matters` (all layers are named, and none is a recurrence) fields of a recurrence also pass.
void RefuseUnread(HfFields& fields, bool recurrence_matters);

}  // namespace ashlar::ctl
