// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <cstdio>

#include "tools/replay/commands.h"

namespace ashlar::replay {

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
