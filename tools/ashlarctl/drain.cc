// SPDX-License-Identifier: Apache-2.0
// ashlarctl drain, undrain: prepare a daemon's stop.
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <string>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "tools/ashlarctl/command.h"
#include "tools/ashlarctl/format.h"

namespace ashlar::ctl {
namespace {

constexpr std::chrono::milliseconds kPoll{100};
constexpr double kMaxSeconds = 366.0 * 24 * 3600;

// Returns how long to wait; by default the daemon's own patience.
absl::StatusOr<double> Patience(const Arguments& arguments, double own) {
  if (!arguments.Has("seconds")) return own;
  double seconds = 0;
  const bool number = absl::SimpleAtod(arguments.Get("seconds"), &seconds) && std::isfinite(seconds);
  if (!number || seconds < 0 || seconds > kMaxSeconds) {
    return absl::InvalidArgumentError("--seconds: expected a number of seconds, at most a year");
  }
  return seconds;
}

std::string Left(const v1::DrainReply& reply) {
  return absl::StrCat("leases ", reply.leases(), ", requests ", reply.requests(), ", reservations ",
                      reply.reservations(), ", landings ", reply.landings(), ", compositions ", reply.compositions(),
                      reply.writing() ? "; being written: " : "; not on the disk: ", Bytes(reply.memory_only_bytes()),
                      " in ", reply.memory_only_objects(), " objects");
}

Answer Described(const v1::DrainReply& reply) {
  Answer answer;
  answer.json = {{"draining", reply.draining()},
                 {"done", reply.done()},
                 {"leases", reply.leases()},
                 {"requests", reply.requests()},
                 {"reservations", reply.reservations()},
                 {"landings", reply.landings()},
                 {"compositions", reply.compositions()},
                 {"writing", reply.writing()},
                 {"memory_only_objects", reply.memory_only_objects()},
                 {"memory_only_bytes", reply.memory_only_bytes()}};
  return answer;
}

}  // namespace

absl::StatusOr<Answer> Drain(const Arguments& arguments, AdminClient& client) {
  // An invalid argument is refused before anything begins.
  if (const auto sound = Patience(arguments, 0); !sound.ok()) return sound.status();
  v1::DrainReply reply;
  if (absl::Status status = client.Drain(v1::DrainRequest(), &reply); !status.ok()) return status;
  const std::chrono::duration<double> patience(*Patience(arguments, reply.grace_seconds()));
  const auto begin = std::chrono::steady_clock::now();
  const bool terminal = isatty(STDERR_FILENO) == 1;
  while (reply.draining() && !reply.done() && std::chrono::steady_clock::now() - begin < patience) {
    if (terminal) std::fprintf(stderr, "\r\033[K%s", Left(reply).c_str());
    std::this_thread::sleep_for(kPoll);
    v1::DrainReply next;
    if (absl::Status status = client.GetDrain(v1::GetDrainRequest(), &next); !status.ok()) return status;
    reply = std::move(next);
  }
  if (terminal) std::fputs("\r\033[K", stderr);
  Answer answer = Described(reply);
  answer.failed = !reply.draining() || !reply.done();
  if (!reply.draining()) {
    answer.text = "the drain was cancelled: the daemon accepts requests again\n";
  } else if (!reply.done()) {
    answer.text = absl::StrCat("not drained: ", Left(reply), "\n");
  } else if (reply.memory_only_objects() > 0) {
    answer.text = absl::StrCat("drained, but disk and peers have no space for everything: a stop loses ",
                               reply.memory_only_objects(), " objects, ", Bytes(reply.memory_only_bytes()), "\n");
  } else {
    answer.text = "drained: nothing is lost when the daemon stops\n";
  }
  return answer;
}

absl::StatusOr<Answer> Undrain(const Arguments&, AdminClient& client) {
  v1::DrainReply reply;
  if (absl::Status status = client.Undrain(v1::UndrainRequest(), &reply); !status.ok()) return status;
  Answer answer = Described(reply);
  answer.text = "the daemon accepts requests\n";
  return answer;
}

}  // namespace ashlar::ctl
