// SPDX-License-Identifier: Apache-2.0
// ashlarctl top: a live view, until interrupted.
#include <sys/ioctl.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <thread>

#include "absl/strings/numbers.h"
#include "tools/ashlarctl/command.h"
#include "tools/ashlarctl/frame.h"
#include "tools/ashlarctl/terminal.h"
#include "tools/command_line/command_line.h"

namespace ashlar::ctl {
namespace {

using nlohmann::json;

constexpr double kLeastInterval = 0.1, kMostInterval = 3600;

struct Wishes {
  double interval = 2;
  uint64_t count = 0;  // frames; 0: until it is interrupted
};

absl::StatusOr<Wishes> ReadWishes(const Arguments& arguments) {
  Wishes wishes;
  if (arguments.Has("interval")) {
    const bool number = absl::SimpleAtod(arguments.Get("interval"), &wishes.interval) && std::isfinite(wishes.interval);
    if (!number || wishes.interval < kLeastInterval || wishes.interval > kMostInterval) {
      return absl::InvalidArgumentError("--interval: expected a number of seconds from 0.1 to 3600");
    }
  }
  if (arguments.Has("count") && (!absl::SimpleAtoi(arguments.Get("count"), &wishes.count) || wishes.count == 0)) {
    return absl::InvalidArgumentError("--count: expected a positive number");
  }
  if (arguments.Has("json") && wishes.count == 0) return absl::InvalidArgumentError("--count: required with --json");
  return wishes;
}

Screen ThisScreen(const Arguments& arguments, bool terminal) {
  Screen screen;
  winsize size{};
  screen.columns = OutputColumns().value_or(screen.columns);
  if (terminal && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_row > 0) {
    screen.rows = size.ws_row - 1u;  // the cursor's
  }
  const std::string colour = arguments.Get("color");
  screen.colour = colour == "always" || (terminal && colour != "never");
  return screen;
}

}  // namespace

absl::StatusOr<Answer> Top(const Arguments& arguments, AdminClient& client) {
  const absl::StatusOr<Wishes> wishes = ReadWishes(arguments);
  if (!wishes.ok()) return wishes.status();
  const bool terminal = isatty(STDOUT_FILENO) == 1, as_json = arguments.Has("json");
  const bool as_text = !as_json || !arguments.Get("json").empty();
  Answer answer{.json = {{"frames", json::array()}}};
  v1::StatsReply before;
  if (absl::Status status = client.Stats(v1::StatsRequest(), &before); !status.ok()) return status;
  auto then = std::chrono::steady_clock::now();
  for (uint64_t frame = 0; wishes->count == 0 || frame < wishes->count; ++frame) {
    std::this_thread::sleep_for(std::chrono::duration<double>(wishes->interval));
    v1::StatsReply stats;
    if (absl::Status status = client.Stats(v1::StatsRequest(), &stats); !status.ok()) return status;
    const auto now = std::chrono::steady_clock::now();
    const double seconds = std::chrono::duration<double>(now - then).count();
    if (as_json) answer.json["frames"].push_back(FrameJson(before, stats, seconds));
    if (as_text) {
      if (terminal) std::fputs("\033[H\033[J", stdout);
      std::fputs(Frame(before, stats, seconds, ThisScreen(arguments, terminal)).c_str(), stdout);
      if (absl::Status written = command_line::FlushOutput(); !written.ok()) return written;
    }
    before = std::move(stats);
    then = now;
  }
  return answer;
}

}  // namespace ashlar::ctl
