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

struct Options {
  std::vector<std::string> traces;  // all of the same format
  std::string format;
  std::string model = "marconi-7b";
  std::vector<uint64_t> capacities;
  std::vector<std::string> policies;
  int threads = 0;  // 0: all cores
  std::string json, plot;
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
