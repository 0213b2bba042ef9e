// SPDX-License-Identifier: Apache-2.0
// Figures: what a fault cost, as its test measured it.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace ashlar::nodes {

// Prints it, adds it to the test's properties, and appends a line of JSON to the file named by ASHLAR_FAULT_FIGURES.
inline void Figure(const std::string& name, double value) {
  const testing::TestInfo* const test = testing::UnitTest::GetInstance()->current_test_info();
  const std::string whole = std::string(test->test_suite_name()) + "." + test->name();
  std::printf("[  FIGURE  ] %s: %.1f\n", name.c_str(), value);
  testing::Test::RecordProperty(name, std::to_string(value));
  const char* const path = std::getenv("ASHLAR_FAULT_FIGURES");
  std::FILE* const file = path == nullptr ? nullptr : std::fopen(path, "a");
  if (file == nullptr) return;
  std::fprintf(file, "{\"test\": \"%s\", \"figure\": \"%s\", \"value\": %.1f}\n", whole.c_str(), name.c_str(), value);
  std::fclose(file);
}

class Stopwatch {
 public:
  double ms() const { return std::chrono::duration<double, std::milli>(Now() - began_).count(); }

 private:
  static std::chrono::steady_clock::time_point Now() { return std::chrono::steady_clock::now(); }
  const std::chrono::steady_clock::time_point began_ = Now();
};

// The number of times that a test makes its fault: `usual`, or the value of this environment variable.
inline int Times(const char* variable, int usual) {
  const char* const times = std::getenv(variable);
  return times == nullptr ? usual : std::atoi(times);
}

}  // namespace ashlar::nodes
