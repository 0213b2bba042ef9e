// SPDX-License-Identifier: Apache-2.0
// ashlarctl support-bundle: one file for diagnosis by others, without names of tenants, models and users, and without
// metrics and logs.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tools/ashlarctl/command.h"
#include "tools/ashlarctl/redaction.h"

namespace ashlar::ctl {
namespace {

using nlohmann::json;

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
  if (arguments.files.size() != 1)
    return absl::InvalidArgumentError("FILE: exactly one is required; - writes to standard output");
  struct Part {
    const char* name;
    absl::StatusOr<Answer> (*run)(const Arguments& arguments, AdminClient& client);
    Arguments arguments;
  };
  const Part parts[] = {{"status", Status, {}},
                        {"stats", Stats, {}},
                        {"sessions", Sessions, {}},
                        {"peers", Peers, {}},
                        {"models", Models, {}},
                        {"config", Config, {}},
                        {"last_misses", Explain, {.options = {{"last", "200"}}}},
                        {"doctor", Doctor, {}}};
  json bundle = {{"made_at", absl::FormatTime(absl::RFC3339_sec, absl::Now(), absl::UTCTimeZone())}};
  for (const Part& part : parts) {
    absl::StatusOr<Answer> answer = part.run(part.arguments, client);
    if (!answer.ok()) {  // partial data is useful
      bundle[part.name] = {{"error", std::string(answer.status().message())}};
      continue;
    }
    bundle[part.name] = std::move(answer->json);
  }
  Redaction().Apply(bundle);
  const std::string text = bundle.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
  if (arguments.files[0] == "-") return Answer{.json = std::move(bundle), .text = text, .verbatim = true};
  if (absl::Status saved = Save(arguments.files[0], text); !saved.ok()) return saved;
  return Answer{.json = {{"file", arguments.files[0]}, {"bytes", text.size()}},
                .text = absl::StrCat(arguments.files[0], ": ", text.size(),
                                     " bytes, mode 0600. Names of tenants, models, engines, users and nodes "
                                     "and addresses are replaced. Read the file before you share it.\n")};
}

}  // namespace ashlar::ctl
