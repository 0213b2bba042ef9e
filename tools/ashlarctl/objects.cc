// SPDX-License-Identifier: Apache-2.0
// ashlarctl pin, unpin, evict: operations on single objects.
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tools/ashlarctl/command.h"
#include "tools/ashlarctl/texts.h"

namespace ashlar::ctl {
namespace {

using nlohmann::json;

// An object that is not in the cache is not a failure: the answer says so, and the other files are processed.
Answer Done(const Arguments& arguments, const v1::ObjectsReply& reply, absl::string_view done) {
  Answer answer{.json = {{"texts", json::array()}}};
  for (int i = 0; i < reply.found_size(); ++i) {
    const std::string& file = arguments.files[i];
    answer.json["texts"].push_back({{"file", file}, {"found", reply.found(i)}});
    absl::StrAppend(&answer.text, file, ": ", reply.found(i) ? done : "not in the cache", "\n");
  }
  return answer;
}

// 0: permanently.
absl::StatusOr<double> PinSeconds(const Arguments& arguments) {
  if (arguments.Has("hard") == arguments.Has("until")) {
    return absl::InvalidArgumentError("--until: --until or --hard is required");
  }
  if (arguments.Has("hard")) return 0;
  absl::Time until;
  std::string error;
  if (!absl::ParseTime(absl::RFC3339_full, arguments.Get("until"), &until, &error)) {
    return absl::InvalidArgumentError("--until: expected a time such as 2030-12-31T23:59:59Z");
  }
  const double seconds = absl::ToDoubleSeconds(until - absl::Now());
  if (seconds <= 0) return absl::InvalidArgumentError("--until: must be in the future");
  return seconds;
}

}  // namespace

absl::StatusOr<Answer> Pin(const Arguments& arguments, AdminClient& client) {
  const absl::StatusOr<double> seconds = PinSeconds(arguments);
  if (!seconds.ok()) return seconds.status();
  absl::StatusOr<v1::Texts> texts = ReadTexts(arguments, client);
  if (!texts.ok()) return texts.status();
  v1::PinRequest request;
  request.set_seconds(*seconds);
  *request.mutable_texts() = *std::move(texts);
  v1::ObjectsReply reply;
  if (absl::Status status = client.Pin(request, &reply); !status.ok()) return status;
  return Done(arguments, reply, "pinned");
}

absl::StatusOr<Answer> Unpin(const Arguments& arguments, AdminClient& client) {
  const absl::StatusOr<v1::Texts> texts = ReadTexts(arguments, client);
  if (!texts.ok()) return texts.status();
  v1::ObjectsReply reply;
  if (absl::Status status = client.Unpin(*texts, &reply); !status.ok()) return status;
  return Done(arguments, reply, "unpinned");
}

absl::StatusOr<Answer> Evict(const Arguments& arguments, AdminClient& client) {
  const absl::StatusOr<v1::Texts> texts = ReadTexts(arguments, client);
  if (!texts.ok()) return texts.status();
  v1::ObjectsReply reply;
  if (absl::Status status = client.Evict(*texts, &reply); !status.ok()) return status;
  return Done(arguments, reply, "evicted");
}

}  // namespace ashlar::ctl
