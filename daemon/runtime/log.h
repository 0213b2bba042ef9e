// SPDX-License-Identifier: Apache-2.0
// Log: the daemon's log, one line per event on stderr, as text or JSON.
//
// After LogInBackground, callers do not wait for stderr: lines go through a bounded queue to a thread that writes them.
// If stderr is not read, the oldest lines are dropped and counted; the log reports the count when it can be written
// again. The number of lines per minute is limited for each message and tenant (the field `tenant`); the log reports
// how many were suppressed.
#pragma once

#include <chrono>
#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ashlar::daemon {

enum class LogLevel : uint8_t { kTrace, kDebug, kInfo, kWarning, kError };

// A field of a log line. Numbers stay numbers in JSON.
struct LogField {
  LogField(absl::string_view its_name, std::integral auto number)
      : name(its_name), value(static_cast<int64_t>(number)) {}
  LogField(absl::string_view its_name, absl::string_view text) : name(its_name), value(std::string(text)) {}
  LogField(absl::string_view its_name, const std::string& text) : name(its_name), value(text) {}
  LogField(absl::string_view its_name, const char* text) : name(its_name), value(std::string(text)) {}

  absl::string_view name;
  std::variant<int64_t, std::string> value;
};

// `level` and `format` as in config.proto. Callers of Log write the lines. Call once, before other threads log.
void ConfigureLog(absl::string_view level, absl::string_view format);

// Starts the log's thread. Call once, after ConfigureLog and before other threads log. RESOURCE_EXHAUSTED if no thread
// can be started; callers then continue to write lines.
absl::Status LogInBackground();

// Waits until all lines so far are written, at most `patience`. The process may exit afterwards in either case.
void FlushLog(std::chrono::milliseconds patience);

// Logs a summary of suppressed lines at the end of their minute. Call it periodically.
void SummarizeSuppressedLines();

struct LogCounts {
  uint64_t dropped = 0;     // lines dropped because stderr was not read
  uint64_t suppressed = 0;  // lines beyond the limit of their message and tenant
};
LogCounts CountLogLines();  // since the process started

// Thread-safe. Fields may contain text from an engine: it is escaped, and a line stays one line.
void Log(LogLevel level, absl::string_view message, std::initializer_list<LogField> fields = {});

// Changes the level.
void SetLogLevel(absl::string_view level);

// Logs an operator's action with "audit" in place of the level. It is always written and never suppressed.
void LogAudit(absl::string_view action, std::initializer_list<LogField> fields);

// Returns the line without time and level, for tests.
std::string FormatLogLine(bool json, absl::string_view message, std::initializer_list<LogField> fields);

}  // namespace ashlar::daemon
