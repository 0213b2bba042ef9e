// Arguments and answers of ashlarctl's sub-commands.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"
#include "tools/ashlarctl/admin_client.h"

namespace ashlar::ctl {

struct Arguments {
  std::map<std::string, std::string> options;  // by name, without dashes; of a flag: "true"
  std::vector<std::string> files;

  bool Has(const std::string& name) const { return options.contains(name); }
  std::string Get(const std::string& name) const { return Has(name) ? options.at(name) : ""; }
};

// The answer as JSON, and as text for people.
struct Answer {
  nlohmann::json json;
  std::string text;
  bool failed = false;  // the request did not succeed; the text says why
};

struct Command {
  const char* name;
  const char* help;                  // its lines of the usage
  std::vector<std::string> options;  // with a value
  std::vector<std::string> flags;    // without
  bool files = false;                // takes files
  // INVALID_ARGUMENT begins with the option's or the field's name.
  absl::StatusOr<Answer> (*run)(const Arguments& arguments, AdminClient& client);
};

absl::StatusOr<Answer> Explain(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Models(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Stats(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Sessions(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Pin(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Unpin(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Evict(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Drain(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Undrain(const Arguments& arguments, AdminClient& client);
absl::StatusOr<Answer> Config(const Arguments& arguments, AdminClient& client);

}  // namespace ashlar::ctl
