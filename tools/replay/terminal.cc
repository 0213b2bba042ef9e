#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <map>

#include "absl/strings/str_cat.h"
#include "tools/replay/commands.h"

namespace ashlar::replay {

absl::StatusOr<uint64_t> ParseBytes(const std::string& text) {
  static const std::map<std::string, double> kUnits = {{"", 1},
                                                       {"kB", 1e3},
                                                       {"MB", 1e6},
                                                       {"GB", 1e9},
                                                       {"TB", 1e12},
                                                       {"KiB", 1024.0},
                                                       {"MiB", 1048576.0},
                                                       {"GiB", 1073741824.0},
                                                       {"TiB", 1099511627776.0}};
  double number = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
  const auto unit = kUnits.find(std::string(parsed.ptr, text.data() + text.size()));
  if (parsed.ec != std::errc() || unit == kUnits.end() || !(number > 0) || number * unit->second > 1e18) {
    return absl::InvalidArgumentError(absl::StrCat("capacity: ", text, " is not a size such as 10GB or 512MiB"));
  }
  return static_cast<uint64_t>(number * unit->second);
}

ProgressLine::ProgressLine(std::string what) : what_(std::move(what)), terminal_(isatty(STDERR_FILENO) == 1) {}

ProgressLine::~ProgressLine() {
  if (shown_ >= 0) std::fprintf(stderr, "\r\033[K");
}

void ProgressLine::Show(uint64_t done, uint64_t all) {
  const auto permille = static_cast<int64_t>(done * 1000 / all);
  if (!terminal_ || permille == shown_) return;
  shown_ = permille;
  std::fprintf(stderr, "\r\033[K%s %5.1f %%", what_.c_str(), static_cast<double>(permille) / 10);
}

}  // namespace ashlar::replay
