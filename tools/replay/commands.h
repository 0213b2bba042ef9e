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
  std::vector<std::string> traces;  // of one format
  std::string format;
  std::string model = "marconi-7b";
  std::vector<uint64_t> capacities;
  std::vector<std::string> policies;
  int threads = 0;  // 0: all cores
  std::string json, plot;
};

// Prints a table, and fills `figures` with the same numbers.
absl::Status RunTraces(const Options& options, nlohmann::json& figures);
absl::Status ComparePlacements(const Options& options, nlohmann::json& figures);
absl::Status ReuseSegments(const Options& options, nlohmann::json& figures);

// 10GB, 512MB, 1.5GB, 64GiB; a bare number is bytes. INVALID_ARGUMENT.
absl::StatusOr<uint64_t> ParseBytes(const std::string& text);

// A line of a terminal that is written over, nothing elsewhere.
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

// Curves, drawn by gnuplot into an SVG file. UNAVAILABLE where it is not installed.
struct Curves {
  std::string title, x, y;
  bool logarithmic = false;  // x
  struct Curve {
    std::string name;
    std::vector<std::pair<double, double>> points;
  };
  struct Panel {
    std::string title;
    std::vector<Curve> curves;
  };
  std::vector<Panel> panels;  // one below another
};
absl::Status Draw(const Curves& curves, const std::string& path);

}  // namespace ashlar::replay
