#include "daemon/runtime/log.h"

#include <google/protobuf/stubs/logging.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace ashlar::daemon {
namespace {

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

std::shared_ptr<spdlog::logger> MakeLogger(const std::string& level, bool json) {
  auto logger = std::make_shared<spdlog::logger>("ashlard", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_level(spdlog::level::from_str(level));
  logger->set_pattern(json ? R"({"time":"%Y-%m-%dT%H:%M:%S.%fZ","level":"%l",%v})" : "%Y-%m-%dT%H:%M:%S.%fZ %l %v",
                      spdlog::pattern_time_type::utc);
  return logger;
}

// One line each, as the other logger's: both write to stderr at once.
std::shared_ptr<spdlog::logger> MakeAuditLogger(bool json) {
  auto logger = std::make_shared<spdlog::logger>("audit", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_pattern(json ? R"({"time":"%Y-%m-%dT%H:%M:%S.%fZ","level":"info","logger":"audit",%v})"
                           : "%Y-%m-%dT%H:%M:%S.%fZ audit %v",
                      spdlog::pattern_time_type::utc);
  return logger;
}

std::shared_ptr<spdlog::logger>& AuditLogger() {
  static std::shared_ptr<spdlog::logger> logger = MakeAuditLogger(/*json=*/false);
  return logger;
}

std::shared_ptr<spdlog::logger>& Logger() {
  static std::shared_ptr<spdlog::logger> logger = MakeLogger("info", /*json=*/false);
  return logger;
}

std::string Json(absl::string_view text) {
  return nlohmann::json(std::string(text)).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// Bare where that is unambiguous, else in quotes.
std::string Text(absl::string_view text) {
  const bool bare = !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return absl::ascii_isgraph(c) && c != '"' && c != '=' && c != '\\';
  });
  return bare ? std::string(text) : absl::StrCat("\"", absl::CHexEscape(text), "\"");
}

// Protobuf writes a line of its own to stderr for every text that is no UTF-8: as often as a sender likes, and in the
// midst of JSON.
void TakeProtobufsWords(google::protobuf::LogLevel level, const char*, int, const std::string& words) {
  Log(level == google::protobuf::LOGLEVEL_FATAL ? LogLevel::kError : LogLevel::kDebug, "protobuf", {{"says", words}});
}

}  // namespace

void ConfigureLog(absl::string_view level, absl::string_view format) {
  json_lines = format == "json";
  Logger() = MakeLogger(std::string(level), json_lines);
  AuditLogger() = MakeAuditLogger(json_lines);
  google::protobuf::SetLogHandler(TakeProtobufsWords);
}

void SetLogLevel(absl::string_view level) {
  Logger()->set_level(spdlog::level::from_str(std::string(level)));
}

void LogAudit(absl::string_view action, std::initializer_list<LogField> fields) {
  AuditLogger()->info("{}", FormatLogLine(json_lines, action, fields));
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
  spdlog::logger& logger = *Logger();
  if (!logger.should_log(ToSpdlog(level))) return;
  logger.log(ToSpdlog(level), "{}", FormatLogLine(json_lines, message, fields));
}

}  // namespace ashlar::daemon
