// SPDX-License-Identifier: Apache-2.0
#include "daemon/threads.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <system_error>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "ashlar/v1/config.pb.h"
#include "daemon/rpc/grpc_threads.h"
#include "storage/memory/control_groups.h"

namespace ashlar::daemon {
namespace {

// Main, reload, metadata, mappings, arenas, log, audit, listeners, sessions, HTTP, the region guard, events, three of
// RocksDB, and up to 16 for operators.
constexpr uint64_t kOwnThreads = 38;
// Transport and UCX, listener, directory, certificates.
constexpr uint64_t kClusterThreads = 8;
constexpr uint64_t kThreadsOfAGpu = 8;  // threads of its driver and lanes

struct Limit {
  std::string name;
  uint64_t most = 0, used = 0;
  uint64_t left() const { return most - std::min(used, most); }
};

// The fields of /proc/PID/status used here.
struct Status {
  uint64_t uid = 0, threads = 0, capabilities = 0;
};
std::optional<Status> ReadStatus(const std::string& process) {
  std::ifstream file(process + "/status");
  if (!file) return std::nullopt;
  Status status;
  for (std::string line; std::getline(file, line);) {
    absl::string_view rest = line;
    const auto number = [&rest](uint64_t* value) {
      const std::string text(rest);
      const std::vector<absl::string_view> words = absl::StrSplit(text, absl::ByAnyChar(" \t"), absl::SkipEmpty());
      return !words.empty() && absl::SimpleAtoi(words[0], value);
    };
    if (absl::ConsumePrefix(&rest, "Uid:")) {
      number(&status.uid);
    } else if (absl::ConsumePrefix(&rest, "Threads:")) {
      number(&status.threads);
    } else if (absl::ConsumePrefix(&rest, "CapEff:")) {
      status.capabilities = std::strtoull(std::string(absl::StripAsciiWhitespace(rest)).c_str(), nullptr, 16);
    }
  }
  return status;
}

// The kernel exempts user 0 and processes with CAP_SYS_ADMIN or CAP_SYS_RESOURCE.
std::optional<Limit> UserLimit(const std::string& root) {
  constexpr uint64_t kSysAdmin = uint64_t{1} << 21, kSysResource = uint64_t{1} << 24;
  rlimit limit;
  const std::optional<Status> self = ReadStatus(root + "/proc/self");
  if (getrlimit(RLIMIT_NPROC, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || !self) return std::nullopt;
  if (self->uid == 0 || (self->capabilities & (kSysAdmin | kSysResource)) != 0) return std::nullopt;
  uint64_t used = 0;
  std::error_code error;
  for (std::filesystem::directory_iterator it(root + "/proc", error), end; !error && it != end; it.increment(error)) {
    if (!std::isdigit(static_cast<unsigned char>(it->path().filename().string()[0]))) continue;
    const std::optional<Status> process = ReadStatus(it->path().string());
    if (process && process->uid == self->uid) used += process->threads;
  }
  return Limit{absl::StrCat("the limit of user ", self->uid, " (RLIMIT_NPROC)"), limit.rlim_cur, used};
}

std::vector<Limit> LimitsOf(const std::string& root) {
  std::vector<Limit> limits;
  for (const storage::ControlGroup& group : storage::ControlGroups("pids", root)) {
    const std::optional<uint64_t> most = storage::ReadNumber(group.folder + "/pids.max");
    const std::optional<uint64_t> used = storage::ReadNumber(group.folder + "/pids.current");
    if (most && used)
      limits.push_back({absl::StrCat("the limit of its cgroup (pids.max in ", group.folder, ")"), *most, *used});
  }
  if (std::optional<Limit> user = UserLimit(root)) limits.push_back(*std::move(user));
  // "0.01 0.02 0.05 2/345 6789": of 345 threads, 2 run.
  std::string load, tasks;
  std::ifstream file(root + "/proc/loadavg");
  uint64_t used = 0;
  if (!(file >> load >> load >> load >> tasks) || !absl::SimpleAtoi(tasks.substr(tasks.find('/') + 1), &used)) {
    return limits;
  }
  for (const char* name : {"threads-max", "pid_max"}) {
    const std::optional<uint64_t> most = storage::ReadNumber(absl::StrCat(root, "/proc/sys/kernel/", name));
    if (most) limits.push_back({absl::StrCat("the limit of the machine (kernel.", name, ")"), *most, used});
  }
  return limits;
}

}  // namespace

uint64_t ThreadsNeeded(const v1::Config& config) {
  const uint64_t tenants = config.tenants_size();  // one reader of long requests each
  const uint64_t spare = std::min<uint64_t>(tenants, kMostSpareThreads);
  return kOwnThreads + GrpcThreads() + kMovingThreads + spare + tenants + config.workers().threads() +
         config.ssd().threads() + (config.has_cluster() ? kClusterThreads : 0) + kThreadsOfAGpu * config.gpu_size();
}

absl::Status CheckThreads(const v1::Config& config, const std::string& root) {
  const uint64_t needed = ThreadsNeeded(config);
  for (const Limit& limit : LimitsOf(root)) {
    if (limit.left() >= needed) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "threads: the daemon starts up to ", needed, ", but ", limit.name, " is ", limit.most, ", of which ",
        limit.used, " are in use; raise the limit, or lower workers.threads or ssd.threads"));
  }
  return absl::OkStatus();
}

}  // namespace ashlar::daemon
