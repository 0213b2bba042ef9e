// SPDX-License-Identifier: Apache-2.0
// `ashlar-bench vectors FILE`: every back end against test vectors of an independent program.
#include "kernels/testing/vectors.h"

#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tools/bench/bench.h"

namespace ashlar::bench {
namespace {

using kernels::testing::VectorCheck;
using kernels::testing::VectorsFile;

absl::Status ReadVectors(const std::string& path, VectorsFile& vectors) {
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file) return absl::NotFoundError(absl::StrCat("cannot read ", path));
  std::variant<VectorsFile, std::string> parsed = kernels::testing::ParseVectors(text);
  if (const auto* error = std::get_if<std::string>(&parsed)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", *error));
  }
  vectors = std::get<VectorsFile>(std::move(parsed));
  return absl::OkStatus();
}

// Errors may be infinite, which JSON has no number for.
nlohmann::json Figure(std::string_view backend, const VectorCheck& check) {
  nlohmann::json figure = {{"backend", backend},       {"op", check.operation}, {"what", check.what},
                           {"vectors", check.vectors}, {"bound", check.bound},  {"pass", check.passes()}};
  figure["error"] = std::isfinite(check.error) ? nlohmann::json(check.error) : nlohmann::json(nullptr);
  return figure;
}

}  // namespace

absl::Status CheckVectorsFile(const Options& options, nlohmann::json& figures) {
  VectorsFile vectors;
  if (absl::Status status = ReadVectors(options.file, vectors); !status.ok()) return status;
  size_t failed = 0, total = 0;
  figures["file"] = options.file;
  nlohmann::json& cases = figures["cases"] = nlohmann::json::array();
  std::printf("%-4s %-10s %-19s %-32s %9s %9s  %s\n", "", "backend", "op", "what", "error", "bound", "vectors");
  for (const kernels::Kernels* back_end : kernels::Available()) {
    for (const VectorCheck& check : kernels::testing::CheckVectors(vectors, *back_end)) {
      std::printf("%-4s %-10s %-19s %-32s %9.1e %9.1e  %s\n", check.passes() ? "ok" : "FAIL",
                  std::string(back_end->name()).c_str(), check.operation.c_str(), check.what.c_str(), check.error,
                  check.bound, check.vectors.c_str());
      cases.push_back(Figure(back_end->name(), check));
      ++total;
      failed += check.passes() ? 0 : 1;
    }
  }
  figures["passed"] = failed == 0;
  std::printf("%zu of %zu checks passed\n", total - failed, total);
  if (failed > 0) return absl::DataLossError(absl::StrCat(failed, " of ", total, " checks failed"));
  return absl::OkStatus();
}

}  // namespace ashlar::bench
