// SPDX-License-Identifier: Apache-2.0
// ashlarctl doctor: finds harmful settings of this machine and of the running daemon, or why an engine does not use the
// cache, with the remedy for each.
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/byte_size.h"
#include "proto/regular_file.h"
#include "tools/ashlarctl/command.h"
#include "tools/ashlarctl/engine_doctor.h"
#include "tools/ashlarctl/host.h"
#include "tools/ashlarctl/listener.h"

namespace ashlar::ctl {
namespace {

using nlohmann::json;

const char* NameOf(Verdict verdict) {
  if (verdict == Verdict::kFine) return "fine";
  return verdict == Verdict::kNote ? "note" : "bad";
}

absl::Status ReadSize(const Arguments& arguments, const char* name, uint64_t* bytes) {
  if (!arguments.Has(name)) return absl::OkStatus();
  const absl::StatusOr<uint64_t> size = ParseByteSize(arguments.Get(name));
  if (!size.ok()) return absl::InvalidArgumentError(absl::StrCat("--", name, ": ", size.status().message()));
  *bytes = *size;
  return absl::OkStatus();
}

struct Subject {
  absl::StatusOr<pid_t> daemon;  // 0: not visible from here; an error: why it is unknown
  std::string configuration;     // whose configuration: a file's name, or "the daemon's"; empty: none is known
  HostNeeds needs;
};

absl::StatusOr<HostNeeds> NeedsOfFile(const std::string& name) {
  const absl::StatusOr<std::string> text = ReadRegularFile("--config", name, kMaxConfigFileBytes);
  if (!text.ok()) return text.status();
  absl::StatusOr<HostNeeds> needs = NeedsOf(*text);
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
  } else if (subject.daemon.ok() && client.GetConfig(v1::GetConfigRequest(), &running).ok()) {
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
    return absl::InvalidArgumentError("--folder: required with --ssd");
  }
  if (needs.ssd_folder.find('$') != std::string::npos) {
    return absl::InvalidArgumentError("--folder: required, because an environment variable in ssd.folder is not set");
  }
  return subject;
}

// Why the limits of the daemon cannot be checked.
std::string DaemonError(const Subject& subject) {
  if (!subject.daemon.ok()) return std::string(subject.daemon.status().message());
  return "the daemon's process is not visible from this PID namespace";
}

// Names the process whose limits were checked, and the source of the sizes.
std::string Heading(const Subject& subject) {
  std::string text = "limits and control group of ";
  if (const pid_t daemon = subject.daemon.value_or(0); daemon > 0) {
    absl::StrAppend(&text, "the daemon, process ", daemon, "\n");
  } else {
    absl::StrAppend(&text, "ashlarctl itself; ", DaemonError(subject), "\n");
  }
  const std::string whose = subject.configuration.empty() ? "unknown; give --config FILE" : subject.configuration;
  return absl::StrCat(text, "sizes and folder: ", whose, "\n");
}

Answer AnswerOf(const std::vector<Finding>& findings, std::string heading) {
  Answer answer{.json = {{"checks", json::array()}}, .text = std::move(heading)};
  for (const char* field : {"daemon_pid", "daemon_error", "configuration", "engine"}) answer.json[field] = nullptr;
  for (const Finding& finding : findings) {
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

absl::StatusOr<Answer> DoctorOfEngine(const Arguments& arguments) {
  for (const char* other : {"config", "dram", "folder", "ssd", "lock", "rdma"}) {
    if (arguments.Has(other)) {
      return absl::InvalidArgumentError(absl::StrCat("--", other, ": not allowed with --engine; run doctor twice"));
    }
  }
  const std::string url = arguments.Get("engine");
  const absl::StatusOr<std::vector<Finding>> findings = ExamineEngine(url);
  if (!findings.ok()) return findings.status();
  Answer answer = AnswerOf(*findings, absl::StrCat("engine at ", url, "\n"));
  answer.json["engine"] = url;
  return answer;
}

}  // namespace

absl::StatusOr<Answer> Doctor(const Arguments& arguments, AdminClient& client) {
  if (arguments.Has("engine")) return DoctorOfEngine(arguments);
  const absl::StatusOr<Subject> subject = SubjectOf(arguments, client);
  if (!subject.ok()) return subject.status();
  const pid_t daemon = subject->daemon.value_or(0);
  Answer answer = AnswerOf(Judge(LookAtHost(subject->needs.ssd_folder, daemon), subject->needs), Heading(*subject));
  if (daemon > 0) {
    answer.json["daemon_pid"] = daemon;
  } else {
    answer.json["daemon_error"] = DaemonError(*subject);
  }
  if (!subject->configuration.empty()) answer.json["configuration"] = subject->configuration;
  return answer;
}

}  // namespace ashlar::ctl
