// SPDX-License-Identifier: Apache-2.0
#include "daemon/runtime/log.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>
#include <spdlog/async.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "daemon/runtime/log_limiter.h"
#include "kernels/mutex.h"

namespace ashlar::daemon {
namespace {

// Queued lines for stderr, each of at most kMaxLineBytes.
constexpr size_t kQueueLines = 4096;
constexpr size_t kMaxLineBytes = 8192;

std::atomic<bool> json_lines{false};

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kTrace:
      return spdlog::level::trace;
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

constexpr char kTextPattern[] = "%Y-%m-%dT%H:%M:%S.%fZ %l %v";
constexpr char kJsonPattern[] = R"({"time":"%Y-%m-%dT%H:%M:%S.%fZ","level":"%l",%v})";
constexpr char kAuditTextPattern[] = "%Y-%m-%dT%H:%M:%S.%fZ audit %v";
constexpr char kAuditJsonPattern[] = R"({"time":"%Y-%m-%dT%H:%M:%S.%fZ","level":"info","logger":"audit",%v})";

// Writes each line to stderr with one system call. Not through stdio, whose lock would block all other users of stderr
// if nothing reads it.
class StderrSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  // Counts lines that were dropped before they reached this sink, for a line about them; null if none can be.
  explicit StderrSink(std::shared_ptr<spdlog::details::thread_pool> pool) : pool_(std::move(pool)) {}

  uint64_t flushes() const { return flushes_; }

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    Write(message);
    const size_t dropped = pool_ == nullptr ? 0 : pool_->overrun_counter();
    if (dropped == reported_) return;
    const std::string line =
        FormatLogLine(json_lines, "log lines dropped because stderr was not read", {{"lines", dropped - reported_}});
    reported_ = dropped;
    Write(spdlog::details::log_msg("", spdlog::level::warn, line));
  }
  void flush_() override { ++flushes_; }

 private:
  void Write(const spdlog::details::log_msg& message) {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    for (size_t at = 0; at < line.size();) {
      const ssize_t written = write(STDERR_FILENO, line.data() + at, line.size() - at);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) return;  // there is no way to report it
      at += static_cast<size_t>(written);
    }
  }

  const std::shared_ptr<spdlog::details::thread_pool> pool_;
  size_t reported_ = 0;
  std::atomic<uint64_t> flushes_{0};
};

// Never destroyed: the log's thread may still hang in a write to stderr when the process exits.
struct LogState {
  LogState() { Make(); }

  // Creates both loggers (again), over the pool if there is one.
  void Make() {
    sink = std::make_shared<StderrSink>(pool);
    logger = MakeOne("ashlard", sink, json_lines ? kJsonPattern : kTextPattern);
    audit = MakeOne("audit", std::make_shared<StderrSink>(nullptr), json_lines ? kAuditJsonPattern : kAuditTextPattern);
    logger->set_level(level);
  }
  std::shared_ptr<spdlog::logger> MakeOne(const char* name, std::shared_ptr<StderrSink> to, const char* pattern) const {
    std::shared_ptr<spdlog::logger> made;
    if (pool == nullptr) {
      made = std::make_shared<spdlog::logger>(name, std::move(to));
    } else {
      made = std::make_shared<spdlog::async_logger>(name, std::move(to), pool,
                                                    spdlog::async_overflow_policy::overrun_oldest);
    }
    made->set_pattern(pattern, spdlog::pattern_time_type::utc);
    return made;
  }

  spdlog::level::level_enum level = spdlog::level::info;
  std::shared_ptr<spdlog::details::thread_pool> pool;  // has the log's thread; null if callers write
  std::shared_ptr<StderrSink> sink;                    // owned by the logger
  std::shared_ptr<spdlog::logger> logger, audit;

  Mutex mutex;
  LogLimiter limiter ABSL_GUARDED_BY(mutex);
  std::atomic<uint64_t> suppressed{0};
};

LogState& State() {
  static auto* const state = new LogState;
  return *state;
}

void WriteLine(spdlog::logger& logger, spdlog::level::level_enum level, std::string line) {
  if (line.size() > kMaxLineBytes) {
    const size_t cut = line.size() - kMaxLineBytes;
    line.resize(kMaxLineBytes);
    // Truncated JSON would be invalid.
    line = json_lines ? FormatLogLine(true, "log line truncated", {{"begins", line}, {"cut_bytes", cut}})
                      : absl::StrCat(line, "… (", cut, " bytes cut)");
  }
  logger.log(level, "{}", line);
}

void LogSuppressed(const std::vector<LogLimiter::Summary>& summaries) {
  for (const LogLimiter::Summary& summary : summaries) {
    WriteLine(*State().logger, ToSpdlog(summary.level),
              FormatLogLine(json_lines, "log lines suppressed by the rate limit",
                            {{"of", summary.message}, {"tenant", summary.tenant}, {"lines", summary.lines}}));
  }
}

absl::string_view TenantIn(std::initializer_list<LogField> fields) {
  for (const LogField& field : fields) {
    const auto* text = std::get_if<std::string>(&field.value);
    if (field.name == "tenant" && text != nullptr) return *text;
  }
  return "";
}

std::string Json(absl::string_view text) {
  return nlohmann::json(std::string(text)).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// Without quotes if that is unambiguous, otherwise quoted.
std::string Text(absl::string_view text) {
  const bool bare = !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return absl::ascii_isgraph(c) && c != '"' && c != '=' && c != '\\';
  });
  if (bare) return std::string(text);
  return absl::StrCat("\"", absl::StrReplaceAll(absl::CHexEscape(text), {{"\\'", "'"}}), "\"");
}

// Protobuf writes its own line to stderr for every text that is not UTF-8, as often as a sender likes and between lines
// of JSON.
void TakeProtobufsWords(google::protobuf::LogLevel level, const char*, int, const std::string& words) {
  Log(level == google::protobuf::LOGLEVEL_FATAL ? LogLevel::kError : LogLevel::kDebug, "message from protobuf",
      {{"text", words}});
}

// gRPC would also write to stderr, and its threads would block there.
void TakeGrpcsWords(gpr_log_func_args* words) {
  const LogLevel level = words->severity == GPR_LOG_SEVERITY_ERROR  ? LogLevel::kWarning
                         : words->severity == GPR_LOG_SEVERITY_INFO ? LogLevel::kInfo
                                                                    : LogLevel::kDebug;
  Log(level, "message from gRPC", {{"text", words->message}, {"file", words->file}, {"line", words->line}});
}

}  // namespace

void ConfigureLog(absl::string_view level, absl::string_view format) {
  json_lines = format == "json";
  LogState& state = State();
  state.level = spdlog::level::from_str(std::string(level));
  state.Make();
  google::protobuf::SetLogHandler(TakeProtobufsWords);
  gpr_set_log_function(TakeGrpcsWords);
}

absl::Status LogInBackground() {
  LogState& state = State();
  try {
    const auto named = [] { pthread_setname_np(pthread_self(), "log"); };
    state.pool = std::make_shared<spdlog::details::thread_pool>(kQueueLines, /*threads_n=*/1, named);
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(absl::StrCat("threads: cannot start the log thread: ", error.what()));
  }
  state.Make();
  return absl::OkStatus();
}

void FlushLog(std::chrono::milliseconds patience) {
  LogState& state = State();
  {
    MutexLock lock(state.mutex);
    LogSuppressed(state.limiter.EndWindow(std::chrono::steady_clock::now(), /*early=*/true));
  }
  const uint64_t before = state.sink->flushes();
  state.logger->flush();
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (state.sink->flushes() == before && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void SummarizeSuppressedLines() {
  LogState& state = State();
  MutexLock lock(state.mutex);
  LogSuppressed(state.limiter.EndWindow(std::chrono::steady_clock::now()));
}

LogCounts CountLogLines() {
  const LogState& state = State();
  return {.dropped = state.pool == nullptr ? 0 : state.pool->overrun_counter(), .suppressed = state.suppressed};
}

void SetLogLevel(absl::string_view level) {
  State().logger->set_level(spdlog::level::from_str(std::string(level)));
}

void LogAudit(absl::string_view action, std::initializer_list<LogField> fields) {
  WriteLine(*State().audit, spdlog::level::info, FormatLogLine(json_lines, action, fields));
}

std::string FormatLogLine(bool json, absl::string_view message, std::initializer_list<LogField> fields) {
  std::string line = json ? absl::StrCat("\"message\":", Json(message)) : std::string(message);
  for (const LogField& field : fields) {
    const auto* number = std::get_if<int64_t>(&field.value);
    const auto* text = std::get_if<std::string>(&field.value);
    const std::string value = number != nullptr ? absl::StrCat(*number) : json ? Json(*text) : Text(*text);
    json ? absl::StrAppend(&line, ",", Json(field.name), ":", value)
         : absl::StrAppend(&line, " ", field.name, "=", value);
  }
  return line;
}

void Log(LogLevel level, absl::string_view message, std::initializer_list<LogField> fields) {
  LogState& state = State();
  if (!state.logger->should_log(ToSpdlog(level))) return;
  {
    MutexLock lock(state.mutex);
    LogSuppressed(state.limiter.EndWindow(std::chrono::steady_clock::now()));
    if (!state.limiter.Admit(level, message, TenantIn(fields))) {
      ++state.suppressed;
      return;
    }
  }
  WriteLine(*state.logger, ToSpdlog(level), FormatLogLine(json_lines, message, fields));
}

}  // namespace ashlar::daemon
