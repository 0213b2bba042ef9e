#include "tools/load/engine_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "absl/strings/str_cat.h"

namespace ashlar::load {

absl::StatusOr<std::unique_ptr<EngineProcess>> EngineProcess::Start(const std::vector<std::string>& arguments) {
  int questions[2], answers[2];
  if (pipe2(questions, O_CLOEXEC) != 0) return absl::ErrnoToStatus(errno, "pipe");
  if (pipe2(answers, O_CLOEXEC) != 0) return absl::ErrnoToStatus(errno, "pipe");
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  std::unique_ptr<EngineProcess> engine(new EngineProcess());
  const pid_t parent = getpid();
  engine->pid_ = fork();
  if (engine->pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // a killed bench leaves no engine behind
    if (getppid() != parent) _exit(127);
    dup2(questions[0], STDIN_FILENO);
    dup2(answers[1], STDOUT_FILENO);
    execv("/proc/self/exe", argv.data());
    _exit(127);
  }
  close(questions[0]);
  close(answers[1]);
  engine->questions_ = questions[1];
  engine->answers_ = answers[0];
  if (engine->pid_ < 0) return absl::ErrnoToStatus(errno, "fork");
  const absl::StatusOr<std::string> ready = engine->ReadLine();
  if (!ready.ok()) return ready.status();
  return engine;
}

EngineProcess::~EngineProcess() {
  close(questions_);
  close(answers_);
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

absl::Status EngineProcess::Ask(uint64_t prompt) {
  const std::string line = absl::StrCat(prompt, "\n");
  if (write(questions_, line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
    return absl::UnavailableError("an engine has ended");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> EngineProcess::ReadLine() {
  for (size_t end; (end = read_.find('\n')) == std::string::npos;) {
    char bytes[256];
    const ssize_t count = read(answers_, bytes, sizeof bytes);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return absl::UnavailableError("an engine has ended");
    read_.append(bytes, static_cast<size_t>(count));
  }
  const size_t end = read_.find('\n');
  std::string line = read_.substr(0, end);
  read_.erase(0, end + 1);
  return line;
}

absl::StatusOr<EngineProcess::Answer> EngineProcess::Read() {
  const absl::StatusOr<std::string> line = ReadLine();
  if (!line.ok()) return line.status();
  Answer answer;
  unsigned long tokens, hits, misses;
  if (std::sscanf(line->c_str(), "%lu %lf %lu %lu", &tokens, &answer.service_ms, &hits, &misses) != 4) {
    return absl::InternalError(absl::StrCat("an engine answered ", *line));
  }
  answer.tokens = tokens;
  answer.hits = hits;
  answer.misses = misses;
  return answer;
}

}  // namespace ashlar::load
