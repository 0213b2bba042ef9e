#include "tests/simulation/progress.h"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <system_error>

namespace ashlar::simulation {
namespace {

constexpr char kTitle[] = "ashlar-simulation-1";

}  // namespace

bool Load(const std::string& path, Progress& progress) {
  std::ifstream file(path);
  if (!file) return !std::filesystem::exists(path);
  std::string title;
  Progress found;
  file >> title >> found.first >> found.trace >> found.done;
  for (auto& states : found.coverage.pairs) {
    for (uint64_t& count : states) file >> count;
  }
  for (uint64_t& count : found.reached.counts) file >> count;
  if (!file || title != kTitle || found.first != progress.first || found.trace != progress.trace) return false;
  progress = found;
  return true;
}

bool Save(const std::string& path, const Progress& progress) {
  const std::string fresh = path + ".new";
  {
    std::ofstream file(fresh);
    file << kTitle << '\n' << progress.first << ' ' << progress.trace << ' ' << progress.done << '\n';
    for (const auto& states : progress.coverage.pairs) {
      for (const uint64_t count : states) file << count << ' ';
      file << '\n';
    }
    for (const uint64_t count : progress.reached.counts) file << count << ' ';
    file << '\n';
    if (!file.flush()) return false;
  }
  std::error_code error;
  std::filesystem::rename(fresh, path, error);
  return !error;
}

}  // namespace ashlar::simulation
