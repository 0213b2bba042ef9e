// SPDX-License-Identifier: Apache-2.0
// Log: the daemon's log, one line an event on stderr, as text or as JSON.
//
// Once LogInBackground has been called, no caller waits for stderr: lines go through a bounded queue to a thread that
// writes them. When nobody reads stderr, the oldest lines are dropped and counted; the log says how many when it can be
// written again. Of one message and tenant (the field `tenant`), a limited number of lines is written in a minute; the
// log says how many were suppressed.
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

// A fact of an event, in its own field: numbers stay numbers in JSON.
struct LogField {
  LogField(absl::string_view name, std::integral auto number) : name(name), value(static_cast<int64_t>(number)) {}
  LogField(absl::string_view name, absl::string_view text) : name(name), value(std::string(text)) {}
  LogField(absl::string_view name, const std::string& text) : name(name), value(text) {}
  LogField(absl::string_view name, const char* text) : name(name), value(std::string(text)) {}

  absl::string_view name;
  std::variant<int64_t, std::string> value;
};

// `level` and `format` as in config.proto. Lines are written by the callers of Log. Call it once, before other threads
// log.
void ConfigureLog(absl::string_view level, absl::string_view format);

// Starts the log's thread. Call it once, after ConfigureLog and before other threads log. RESOURCE_EXHAUSTED: there can
// be no more threads; callers still write lines themselves.
absl::Status LogInBackground();

// Waits until all lines so far are written, at most `patience`. The process may exit in either case.
void FlushLog(std::chrono::milliseconds patience);

// Logs what was suppressed, when its minute is over. Call it periodically.
void SummarizeSuppressedLines();

struct LogCounts {
  uint64_t dropped = 0;     // lines, since nobody read stderr
  uint64_t suppressed = 0;  // lines beyond the limit of their message and tenant
};
LogCounts CountLogLines();  // since the process started

// Thread-safe. Text that an engine sent may stand in fields: it is escaped, a line stays one line.
void Log(LogLevel level, absl::string_view message, std::initializer_list<LogField> fields = {});

// Another level from now on.
void SetLogLevel(absl::string_view level);

// An operator's action: the same line under "audit" in place of the level, whatever the level is, and never suppressed.
void LogAudit(absl::string_view action, std::initializer_list<LogField> fields);

// The line behind time and level, for tests.
std::string FormatLogLine(bool json, absl::string_view message, std::initializer_list<LogField> fields);

}  // namespace ashlar::daemon
