// SPDX-License-Identifier: Apache-2.0
// ashlarctl warm: has texts computed before they are requested.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/invalid.h"
#include "tools/ashlarctl/command.h"
#include "tools/ashlarctl/texts.h"

namespace ashlar::ctl {
namespace {

using nlohmann::json;

constexpr uint32_t kPending = 1, kHere = 2, kRefused = 4;
constexpr absl::Duration kAskEvery = absl::Milliseconds(200), kLongestPause = absl::Seconds(5);
constexpr double kDefaultSeconds = 600;

// A text, and when the daemon is asked about it again.
struct Asked {
  uint32_t state = kPending;
  absl::Time next;
  absl::Duration pause = kAskEvery;  // after a failure; doubles with each one

  bool ended() const { return state == kHere || state == kRefused; }
};

// Why a text is not in the cache: by name, as in JSON, and in words.
struct Reason {
  const char* name;
  const char* words;
};

Reason ReasonOf(uint32_t state) {
  switch (state) {
    case kHere:
      return {"none", "in the cache"};
    case kPending:
      return {"timed_out", "timed out"};
    case kRefused:
      return {"refused", "refused by every engine that was asked; its log has the reason"};
    default:
      return {"not_computed", "not computed by any engine"};
  }
}

// Asks about the texts that are due.
absl::Status Ask(const v1::Texts& texts, AdminClient& client, std::vector<Asked>& asked) {
  v1::Texts due = texts;
  due.clear_texts();
  std::vector<Asked*> places;
  const absl::Time now = absl::Now();
  for (size_t i = 0; i < asked.size(); ++i) {
    if (asked[i].ended() || asked[i].next > now) continue;
    *due.add_texts() = texts.texts(static_cast<int>(i));
    places.push_back(&asked[i]);
  }
  if (places.empty()) return absl::OkStatus();
  v1::WarmReply reply;
  if (absl::Status status = client.Warm(due, &reply); !status.ok()) return status;
  if (static_cast<size_t>(reply.states_size()) != places.size()) {
    return absl::InternalError("the daemon's reply has another number of texts");
  }
  for (int i = 0; i < reply.states_size(); ++i) {
    Asked& one = *places[i];
    one.state = reply.states(i);
    const bool failed = !one.ended() && one.state != kPending;
    one.next = absl::Now() + (failed ? one.pause : kAskEvery);
    if (failed) one.pause = std::min(2 * one.pause, kLongestPause);
  }
  return absl::OkStatus();
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
  std::vector<Asked> asked(texts->texts_size());
  for (;;) {
    if (absl::Status status = Ask(*texts, client, asked); !status.ok()) return status;
    absl::Time next = absl::InfiniteFuture();
    for (const Asked& one : asked) {
      if (!one.ended()) next = std::min(next, one.next);
    }
    if (next == absl::InfiniteFuture() || absl::Now() >= deadline) break;
    absl::SleepFor(std::min(next, deadline) - absl::Now());
  }
  Answer answer{.json = {{"texts", json::array()}}};
  bool all = true;
  for (size_t i = 0; i < asked.size(); ++i) {
    const std::string& file = arguments.files[i];
    const bool warm = asked[i].state == kHere;
    const Reason reason = ReasonOf(asked[i].state);
    all &= warm;
    answer.json["texts"].push_back({{"file", file}, {"warm", warm}, {"reason", reason.name}});
    absl::StrAppend(&answer.text, file, ": ", reason.words, "\n");
  }
  answer.failed = !all;
  return answer;
}

}  // namespace ashlar::ctl
