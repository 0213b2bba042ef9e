// SPDX-License-Identifier: Apache-2.0
// ashlar-replay's commands.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace ashlar::replay {

// Options of ServeTraces. All sizes are the model's own; the replay divides them by `scale`.
struct ServeOptions {
  std::vector<double> arrival_rates;  // requests per second
  uint64_t dram_bytes = 0, ssd_bytes = 0;
  std::string admission = "second_use";  // the daemon's ssd.admission
  uint64_t scale = 16;
  std::vector<std::string> prefill_rates;  // TOKENS:RATE; none: the model's FLOPs
  size_t requests = 400;                   // most requests per trace
  size_t running = 16;                     // requests at a time
  std::string daemon;                      // empty: `ashlard` beside this program
};

struct Options {
  std::vector<std::string> traces;  // all of the same format
  std::string format;
  std::string model = "marconi-7b";
  std::vector<std::string> models = {"marconi-7b", "qwen3-next", "kimi-linear", "ring-mini"};  // used by FindBreakEven
  std::vector<uint64_t> links = {50'000'000'000};  // bytes per second; used by FindBreakEven
  std::string state_type = "bf16";                 // type of stored states and transitions: bf16 or fp32
  std::vector<uint64_t> capacities;
  std::vector<std::string> policies;
  uint64_t capture = 64;  // tokens: states are captured at multiples of it
  uint64_t page = 1;      // tokens: least size of a page of Ashlar's; used by RunTraces
  int threads = 0;        // 0: all cores
  std::string json, plot;
  ServeOptions serve;
};

struct Curves {
  std::string title, x, y;
  bool logarithmic = false;  // the x axis is logarithmic
  struct Curve {
    std::string name;
    std::vector<std::pair<double, double>> points;
  };
  struct Panel {
    std::string title;
    std::vector<Curve> curves;
  };
  std::vector<Panel> panels;  // top to bottom
};

// What a command finds: the numbers of its table, and the curves of its plot (no panels: it has no plot).
struct Figures {
  nlohmann::json json;
  Curves curves;
};

// Each command prints a table and fills `figures` with the same numbers.
absl::Status RunTraces(const Options& options, Figures& figures);
absl::Status ComparePlacements(const Options& options, Figures& figures);
absl::Status ReuseSegments(const Options& options, Figures& figures);
absl::Status FindBreakEven(const Options& options, Figures& figures);
absl::Status ServeTraces(const Options& options, Figures& figures);

// Returns the curves as an SVG picture, drawn by gnuplot. UNAVAILABLE if gnuplot is not installed or fails.
absl::StatusOr<std::string> Draw(const Curves& curves);

// Replaces the file. UNAVAILABLE names it and the reason.
absl::Status WriteFile(const std::string& path, const std::string& text);

// Progress on one line of a terminal. Prints nothing if stderr is not a terminal.
class ProgressLine {
 public:
  explicit ProgressLine(std::string what);
  ~ProgressLine();
  void Show(uint64_t done, uint64_t all);

 private:
  const std::string what_;
  const bool terminal_;
  int64_t shown_ = -1;  // permille
};

}  // namespace ashlar::replay
