// SPDX-License-Identifier: Apache-2.0
#include "tools/load/engine_process.h"

#include <cstdio>

#include "absl/strings/str_cat.h"

namespace ashlar::load {
namespace {

// Only a failing engine takes this long.
constexpr std::chrono::minutes kPatience{10};

}  // namespace

absl::StatusOr<std::unique_ptr<EngineProcess>> EngineProcess::Start(const std::vector<std::string>& arguments) {
  auto process = tools::ChildProcess::Start(arguments);
  if (!process.ok()) return process.status();
  const absl::StatusOr<std::string> ready = (*process)->ReadLine(kPatience);
  if (!ready.ok()) return ready.status();
  return std::unique_ptr<EngineProcess>(new EngineProcess(*std::move(process)));
}

absl::Status EngineProcess::Ask(uint64_t prompt) {
  return process_->WriteLine(absl::StrCat(prompt));
}

absl::StatusOr<EngineProcess::Answer> EngineProcess::Read() {
  const absl::StatusOr<std::string> line = process_->ReadLine(kPatience);
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
