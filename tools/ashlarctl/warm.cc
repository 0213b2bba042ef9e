// SPDX-License-Identifier: Apache-2.0
// ashlarctl warm: has texts computed before they are requested.
#include <algorithm>
#include <cstdint>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/invalid.h"
#include "tools/ashlarctl/command.h"
#include "tools/ashlarctl/texts.h"

namespace ashlar::ctl {
namespace {

using nlohmann::json;

constexpr uint32_t kPending = 1, kHere = 2;
constexpr absl::Duration kAskEvery = absl::Milliseconds(200);
constexpr double kDefaultSeconds = 600;

absl::string_view NameOf(uint32_t state) {
  return state == kHere ? "in the cache" : state == kPending ? "timed out" : "not computed by any engine";
}

}  // namespace

absl::StatusOr<Answer> Warm(const Arguments& arguments, AdminClient& client) {
  double seconds = kDefaultSeconds;
  if (arguments.Has("seconds") && (!absl::SimpleAtod(arguments.Get("seconds"), &seconds) || !(seconds > 0))) {
    return Invalid("--seconds: expected a positive number");
  }
  const absl::StatusOr<v1::Texts> texts = ReadTexts(arguments, client);
  if (!texts.ok()) return texts.status();
  const absl::Time deadline = absl::Now() + absl::Seconds(seconds);
  v1::WarmReply reply;
  for (;;) {
    reply.Clear();
    if (absl::Status status = client.Warm(*texts, &reply); !status.ok()) return status;
    if (std::ranges::count(reply.states(), kPending) == 0 || absl::Now() >= deadline) break;
    absl::SleepFor(kAskEvery);
  }
  Answer answer{.json = {{"texts", json::array()}}};
  bool all = true;
  for (int i = 0; i < reply.states_size(); ++i) {
    const std::string& file = arguments.files[i];
    const bool warm = reply.states(i) == kHere;
    all &= warm;
    answer.json["texts"].push_back({{"file", file}, {"warm", warm}});
    absl::StrAppend(&answer.text, file, ": ", NameOf(reply.states(i)), "\n");
  }
  answer.failed = !all;
  return answer;
}

}  // namespace ashlar::ctl
