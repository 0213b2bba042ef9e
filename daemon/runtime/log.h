// Log: the daemon's log, one line an event on stderr, as text or as JSON.
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <variant>

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

// `level` and `format` as in config.proto. Call it once, before other threads log.
void ConfigureLog(absl::string_view level, absl::string_view format);

// Thread-safe. Text that an engine sent may stand in fields: it is escaped, a line stays one line.
void Log(LogLevel level, absl::string_view message, std::initializer_list<LogField> fields = {});

// Another level from now on.
void SetLogLevel(absl::string_view level);

// An operator's action: the same line under "audit" in place of the level, whatever the level is.
void LogAudit(absl::string_view action, std::initializer_list<LogField> fields);

// The line behind time and level, for tests.
std::string FormatLogLine(bool json, absl::string_view message, std::initializer_list<LogField> fields);

}  // namespace ashlar::daemon
