// ashlarctl doctor: which settings of this machine will hurt a daemon, each with its remedy.
#include <algorithm>

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

}  // namespace

absl::StatusOr<Answer> Doctor(const Arguments& arguments, AdminClient&) {
  HostNeeds needs{.locked = arguments.Has("lock"), .fabric = arguments.Has("rdma")};
  for (const absl::Status& status :
       {ReadSize(arguments, "dram", &needs.dram_bytes), ReadSize(arguments, "ssd", &needs.ssd_bytes)}) {
    if (!status.ok()) return status;
  }
  if (needs.ssd_bytes > 0 && !arguments.Has("folder")) return absl::InvalidArgumentError("--folder: needed with --ssd");
  Answer answer{.json = {{"checks", json::array()}}};
  for (const Finding& finding : Judge(LookAtHost(arguments.Get("folder")), needs)) {
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
