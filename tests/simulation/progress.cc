// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/progress.h"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <system_error>

namespace ashlar::simulation {
namespace {

constexpr char kTitle[] = "ashlar-simulation-2";

// Calls visit with every number of a progress, in the order in which they are written.
template <typename AnyProgress, typename Visit>
void ForEachNumber(AnyProgress& progress, const Visit& visit) {
  for (auto* number : {&progress.first, &progress.trace, &progress.done}) visit(*number);
  for (auto& states : progress.coverage.pairs) {
    for (auto& count : states) visit(count);
  }
  for (auto& count : progress.reached.counts) visit(count);
  for (auto& count : progress.transitions.counts) visit(count);
}

}  // namespace

bool LoadNumbers(const std::string& path, const std::string& title, std::vector<uint64_t>& numbers) {
  std::ifstream file(path);
  if (!file) return false;
  std::string found;
  file >> found;
  for (uint64_t& number : numbers) file >> number;
  return file && found == title;
}

bool SaveNumbers(const std::string& path, const std::string& title, const std::vector<uint64_t>& numbers) {
  const std::string fresh = path + ".new";
  {
    std::ofstream file(fresh);
    file << title << '\n';
    for (const uint64_t number : numbers) file << number << ' ';
    file << '\n';
    if (!file.flush()) return false;
  }
  std::error_code error;
  std::filesystem::rename(fresh, path, error);
  return !error;
}

bool Load(const std::string& path, Progress& progress) {
  if (!std::filesystem::exists(path)) return true;
  Progress found;
  std::vector<uint64_t> numbers;
  ForEachNumber(found, [&](uint64_t& number) { numbers.push_back(number); });
  if (!LoadNumbers(path, kTitle, numbers)) return false;
  auto next = numbers.begin();
  ForEachNumber(found, [&](uint64_t& number) { number = *next++; });
  if (found.first != progress.first || found.trace != progress.trace) return false;
  progress = found;
  return true;
}

bool Save(const std::string& path, const Progress& progress) {
  std::vector<uint64_t> numbers;
  ForEachNumber(progress, [&](const uint64_t& number) { numbers.push_back(number); });
  return SaveNumbers(path, kTitle, numbers);
}

}  // namespace ashlar::simulation
