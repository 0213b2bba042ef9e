// SPDX-License-Identifier: Apache-2.0
#include "examples/testing/child_process.h"

#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"

namespace ashlar::tools {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// In the child, which may only make system calls: other threads of the tool may have held locks when it was forked.
bool Enter(const SpawnOptions& options) {
  for (const auto& [resource, value] : options.limits) {
    const rlimit limit = {.rlim_cur = value, .rlim_max = value};
    if (setrlimit(static_cast<__rlimit_resource>(resource), &limit) != 0) return false;
  }
  if (options.user.has_value()) {
    const auto [uid, gid] = *options.user;
    if (setgroups(0, nullptr) != 0 || setresgid(gid, gid, gid) != 0 || setresuid(uid, uid, uid) != 0) return false;
  }
  for (const auto& [from, to] : {std::pair(options.input, STDIN_FILENO), std::pair(options.output, STDOUT_FILENO),
                                 std::pair(options.errors, STDERR_FILENO)}) {
    if (from >= 0 && dup2(from, to) < 0) return false;
  }
  return prctl(PR_SET_PDEATHSIG, SIGKILL) == 0;  // last, because a change of user would undo it
}

}  // namespace

absl::StatusOr<pid_t> Spawn(const std::string& program, const std::vector<std::string>& arguments,
                            const SpawnOptions& options) {
  const int binary = open(program.c_str(), O_RDONLY | O_CLOEXEC);
  if (binary < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", program));
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) {
    if (!Enter(options) || getppid() != parent) _exit(127);
    fexecve(binary, argv.data(), environ);
    dprintf(STDERR_FILENO, "cannot start %s\n", program.c_str());
    _exit(127);
  }
  const int error = errno;
  close(binary);
  if (pid < 0) return absl::ErrnoToStatus(error, "fork");
  return pid;
}

absl::StatusOr<std::unique_ptr<ChildProcess>> ChildProcess::Start(const std::vector<std::string>& arguments,
                                                                  std::optional<ProcessUser> user) {
  int input[2], output[2];
  if (pipe2(input, O_CLOEXEC) != 0) return absl::ErrnoToStatus(errno, "pipe");
  if (pipe2(output, O_CLOEXEC) != 0) return absl::ErrnoToStatus(errno, "pipe");
  std::unique_ptr<ChildProcess> child(new ChildProcess());
  const auto pid = Spawn("/proc/self/exe", arguments, {.user = user, .input = input[0], .output = output[1]});
  close(input[0]);
  close(output[1]);
  child->input_ = input[1];
  child->output_ = output[0];
  if (!pid.ok()) return pid.status();
  child->pid_ = *pid;
  return child;
}

ChildProcess::~ChildProcess() {
  close(input_);
  close(output_);
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

absl::Status ChildProcess::WriteLine(std::string line) {
  line += '\n';
  if (write(input_, line.data(), line.size()) == static_cast<ssize_t>(line.size())) return absl::OkStatus();
  return absl::UnavailableError("a process of this tool has ended");
}

absl::StatusOr<std::string> ChildProcess::ReadLine(milliseconds patience) {
  const auto deadline = steady_clock::now() + patience;
  size_t end;
  while ((end = read_.find('\n')) == std::string::npos) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now()).count();
    pollfd readable = {.fd = output_, .events = POLLIN, .revents = 0};
    const int ready = left > 0 ? poll(&readable, 1, static_cast<int>(left)) : 0;
    if (ready == 0) return absl::DeadlineExceededError("a process of this tool does not answer");
    char bytes[256];
    const ssize_t count = ready < 0 ? ready : read(output_, bytes, sizeof bytes);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return absl::UnavailableError("a process of this tool has ended");
    read_.append(bytes, static_cast<size_t>(count));
  }
  std::string line = read_.substr(0, end);
  read_.erase(0, end + 1);
  return line;
}

}  // namespace ashlar::tools
