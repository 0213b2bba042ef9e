// ashlarctl doctor: which settings of this machine, and of the daemon that runs, hurt it; each with its remedy.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <fstream>
#include <optional>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/ashlarctl/command.h"
#include "tools/ashlarctl/format.h"
#include "tools/ashlarctl/host.h"

namespace ashlar::ctl {
namespace {

using nlohmann::json;

const char* NameOf(Verdict verdict) {
  if (verdict == Verdict::kFine) return "fine";
  return verdict == Verdict::kNote ? "note" : "bad";
}

absl::Status ReadSize(const Arguments& arguments, const char* name, uint64_t* bytes) {
  if (!arguments.Has(name) || ParseBytes(arguments.Get(name), bytes)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", name, ": not a size like 64GiB"));
}

// The process that listens on the socket. Empty: none does. 0: one that is not visible from here, as in a container.
std::optional<pid_t> ListenerOf(const std::string& path) {
  sockaddr_un address{.sun_family = AF_UNIX};
  if (path.size() >= sizeof address.sun_path) return std::nullopt;
  path.copy(address.sun_path, path.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ucred peer{};
  socklen_t size = sizeof peer;
  const bool there = fd >= 0 && connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
                     getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0;
  if (fd >= 0) close(fd);
  if (!there) return std::nullopt;
  const std::string process = absl::StrCat("/proc/", peer.pid, "/limits");
  return access(process.c_str(), R_OK) == 0 ? peer.pid : 0;
}

struct Subject {
  std::optional<pid_t> daemon;
  std::string configuration;  // whose: a file's name, "the daemon's"; empty: none is known
  HostNeeds needs;
};

absl::StatusOr<HostNeeds> NeedsOfFile(const std::string& name) {
  std::ifstream file(name);
  std::ostringstream text;
  if (!file || !(text << file.rdbuf()))
    return absl::NotFoundError(absl::StrCat("--config: ", name, ": cannot be read"));
  absl::StatusOr<HostNeeds> needs = NeedsOf(text.str());
  if (!needs.ok()) return absl::InvalidArgumentError(absl::StrCat("--config: ", needs.status().message()));
  return needs;
}

absl::StatusOr<Subject> SubjectOf(const Arguments& arguments, AdminClient& client) {
  Subject subject{.daemon = ListenerOf(client.socket())};
  v1::GetConfigReply running;
  if (arguments.Has("config")) {
    absl::StatusOr<HostNeeds> needs = NeedsOfFile(arguments.Get("config"));
    if (!needs.ok()) return needs.status();
    subject.needs = *std::move(needs);
    subject.configuration = arguments.Get("config");
  } else if (subject.daemon && client.GetConfig(v1::GetConfigRequest(), &running).ok()) {
    absl::StatusOr<HostNeeds> needs = NeedsOf(running.yaml());
    if (!needs.ok()) return needs.status();
    subject.needs = *std::move(needs);
    subject.configuration = "the daemon's";
  }
  HostNeeds& needs = subject.needs;
  needs.locked |= arguments.Has("lock");
  needs.fabric |= arguments.Has("rdma");
  if (arguments.Has("folder")) needs.ssd_folder = arguments.Get("folder");
  for (const absl::Status& status :
       {ReadSize(arguments, "dram", &needs.dram_bytes), ReadSize(arguments, "ssd", &needs.ssd_bytes)}) {
    if (!status.ok()) return status;
  }
  if (needs.ssd_bytes > 0 && needs.ssd_folder.empty()) {
    return absl::InvalidArgumentError("--folder: needed with --ssd");
  }
  if (needs.ssd_folder.find('$') != std::string::npos) {
    return absl::InvalidArgumentError("--folder: needed: the environment has not what ssd.folder names");
  }
  return subject;
}

// Whose limits, and whose sizes.
std::string Heading(const Subject& subject, const std::string& socket) {
  std::string text;
  if (subject.daemon.value_or(0) > 0) {
    text = absl::StrCat("limits and control group: of the daemon, process ", *subject.daemon, "\n");
  } else {
    text = absl::StrCat("limits and control group: of ashlarctl itself; ",
                        subject.daemon ? "the daemon's process is not visible from here" : "no daemon listens on ",
                        subject.daemon ? "" : socket, "\n");
  }
  const std::string whose =
      subject.configuration.empty() ? "not known; --config FILE names them" : subject.configuration;
  return absl::StrCat(text, "sizes and folder: ", whose, "\n");
}

}  // namespace

absl::StatusOr<Answer> Doctor(const Arguments& arguments, AdminClient& client) {
  const absl::StatusOr<Subject> subject = SubjectOf(arguments, client);
  if (!subject.ok()) return subject.status();
  const pid_t daemon = subject->daemon.value_or(0);
  Answer answer{.json = {{"checks", json::array()}}, .text = Heading(*subject, client.socket())};
  answer.json["daemon_pid"] = daemon > 0 ? json(daemon) : json(nullptr);
  answer.json["configuration"] = subject->configuration.empty() ? json(nullptr) : json(subject->configuration);
  for (const Finding& finding : Judge(LookAtHost(subject->needs.ssd_folder, daemon), subject->needs)) {
    answer.failed |= finding.verdict == Verdict::kBad;
    answer.json["checks"].push_back({{"verdict", NameOf(finding.verdict)},
                                     {"check", finding.check},
                                     {"found", finding.found},
                                     {"remedy", finding.remedy}});
    absl::StrAppendFormat(&answer.text, "%-5s %-14s %s\n", NameOf(finding.verdict), finding.check, finding.found);
    if (!finding.remedy.empty()) absl::StrAppendFormat(&answer.text, "      %-14s %s\n", "", finding.remedy);
  }
  answer.json["ok"] = !answer.failed;
  return answer;
}

}  // namespace ashlar::ctl
