// ashlarctl support-bundle: what somebody else needs to understand a daemon, in one file, without names of tenants,
// models and users.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tools/ashlarctl/command.h"

namespace ashlar::ctl {
namespace {

using nlohmann::json;

// Fields whose values name somebody or something: each value gets an alias that is the same wherever it occurs.
constexpr const char* kNaming[] = {"tenant", "model_id", "lora", "client", "uid", "node"};

class Redaction {
 public:
  void Apply(json& value) {
    if (value.is_object()) {
      for (auto& [name, field] : value.items()) {
        const bool naming = std::ranges::count(kNaming, name) > 0 && field.is_primitive() && !field.is_null();
        naming ? void(field = Alias(name, field.is_string() ? field.get<std::string>() : field.dump())) : Apply(field);
      }
    } else if (value.is_array()) {
      for (json& item : value) Apply(item);
    }
  }
  // The configuration: names of tenants, and the users that belong to them.
  std::string Yaml(const std::string& yaml) {
    std::string text;
    for (size_t at = 0; at < yaml.size();) {
      const size_t end = std::min(yaml.find('\n', at), yaml.size());
      const std::string line = yaml.substr(at, end - at);
      const size_t colon = line.find(": ");
      const size_t begin = line.find_first_not_of(" -");
      const std::string name = colon == std::string::npos ? "" : line.substr(begin, colon - begin);
      const bool naming = name == "name" || name == "uids" || name == "node";
      const std::string what = name == "name" ? "tenant" : name;
      absl::StrAppend(
          &text, naming ? absl::StrCat(line.substr(0, colon + 2), Alias(what, line.substr(colon + 2))) : line, "\n");
      at = end + 1;
    }
    return text;
  }

 private:
  std::string Alias(const std::string& name, const std::string& value) {
    if (value.empty()) return "";
    std::map<std::string, std::string>& known = aliases_[name];
    const std::string plain = absl::StrReplaceAll(value, {{"\"", ""}});
    return known.emplace(plain, absl::StrCat(name, "-", known.size() + 1)).first->second;
  }

  std::map<std::string, std::map<std::string, std::string>> aliases_;
};

absl::Status Save(const std::string& path, const std::string& text) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("FILE: ", path));
  size_t written = 0;
  while (written < text.size()) {
    const ssize_t bytes = write(fd, text.data() + written, text.size() - written);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes <= 0) break;
    written += static_cast<size_t>(bytes);
  }
  const int error = errno;
  if (close(fd) == 0 && written == text.size()) return absl::OkStatus();
  unlink(path.c_str());
  return absl::ErrnoToStatus(error, absl::StrCat("FILE: ", path));
}

}  // namespace

absl::StatusOr<Answer> SupportBundle(const Arguments& arguments, AdminClient& client) {
  if (arguments.files.size() != 1) return absl::InvalidArgumentError("FILE: exactly one is required");
  struct Part {
    const char* name;
    absl::StatusOr<Answer> (*run)(const Arguments& arguments, AdminClient& client);
    Arguments arguments;
  };
  const Part parts[] = {{"status", Status, {}},     {"stats", Stats, {}},
                        {"sessions", Sessions, {}}, {"models", Models, {}},
                        {"config", Config, {}},     {"last_misses", Explain, {.options = {{"last", "200"}}}},
                        {"doctor", Doctor, {}}};
  Redaction redaction;
  json bundle = {{"made_at", absl::FormatTime(absl::RFC3339_sec, absl::Now(), absl::UTCTimeZone())}};
  for (const Part& part : parts) {
    absl::StatusOr<Answer> answer = part.run(part.arguments, client);
    if (!answer.ok()) {  // what can be had is worth having
      bundle[part.name] = {{"error", std::string(answer.status().message())}};
      continue;
    }
    if (answer->json.contains("yaml")) answer->json["yaml"] = redaction.Yaml(answer->json["yaml"]);
    redaction.Apply(answer->json);
    bundle[part.name] = std::move(answer->json);
  }
  const std::string text = bundle.dump(2) + "\n";
  if (absl::Status saved = Save(arguments.files[0], text); !saved.ok()) return saved;
  return Answer{.json = {{"file", arguments.files[0]}, {"bytes", text.size()}},
                .text = absl::StrCat(arguments.files[0], ": ", text.size(),
                                     " bytes, for its owner alone. Names of tenants, models, engines, users and nodes "
                                     "are replaced. Read it before you pass it on.\n")};
}

}  // namespace ashlar::ctl
