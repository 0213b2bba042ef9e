// SPDX-License-Identifier: Apache-2.0
// `ashlar-bench ssd`: values on a disk, through the SSD tier, against the same disk without it.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <random>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "tools/bench/bench.h"
#include "tools/bench/disk_engine.h"

namespace ashlar::bench {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr int kDepths[] = {4, 16};

struct Op {
  const char* name;
  bool write;
  bool random;
};
constexpr Op kOps[] = {
    {"seq_write", true, false}, {"rand_write", true, true}, {"seq_read", false, false}, {"rand_read", false, true}};

// A separate folder, by default next to this program, because /tmp may be memory.
absl::StatusOr<std::string> MakeFolder(const std::string& parent) {
  std::error_code error;
  std::string name = parent;
  if (name.empty()) name = std::filesystem::read_symlink("/proc/self/exe", error).parent_path().string();
  name += "/ashlar-bench-ssd-XXXXXX";
  if (mkdtemp(name.data()) == nullptr) return absl::ErrnoToStatus(errno, absl::StrCat("--dir: ", name));
  return name;
}

class Comparison {
 public:
  Comparison(DiskEngine& engine, DiskEngine& raw, const Options& options)
      : engine_(engine), raw_(raw), repetitions_(options.repetitions) {}

  // Engine and disk alternate, so that other users of the disk slow both.
  absl::Status Run(const Op& op, size_t values, uint64_t value_bytes, int depth, nlohmann::json& cases) {
    std::vector<double> rates, limits;
    for (int i = 0; i < repetitions_; ++i) {
      std::vector<uint32_t> order(values);
      std::iota(order.begin(), order.end(), 0);
      if (op.random) std::shuffle(order.begin(), order.end(), random_);
      for (const bool limit : {i % 2 == 0, i % 2 != 0}) {
        DiskEngine& disk = limit ? raw_ : engine_;
        absl::Status status;
        const double seconds = Seconds([&] { status = op.write ? disk.Write(order, depth) : disk.Read(order, depth); });
        if (!status.ok()) return status;
        (limit ? limits : rates).push_back(static_cast<double>(values * value_bytes) / seconds);
      }
    }
    const double rate = Median(rates), limit = Median(limits);
    cases.push_back({{"op", op.name},
                     {"value_bytes", value_bytes},
                     {"queue_depth", depth},
                     {"gb_per_s", rate / 1e9},
                     {"limit_gb_per_s", limit / 1e9},
                     {"ratio", rate / limit}});
    std::printf("%-12s %12lu %6d %10.2f %12.2f %8.2f\n", op.name, static_cast<unsigned long>(value_bytes), depth,
                rate / 1e9, limit / 1e9, rate / limit);
    std::fflush(stdout);
    return absl::OkStatus();
  }

 private:
  DiskEngine& engine_;
  DiskEngine& raw_;
  const int repetitions_;
  std::mt19937_64 random_{1};
};

absl::Status RunCases(const Options& options, const std::string& folder, nlohmann::json& cases) {
  const uint64_t round_bytes = (options.quick ? 64 : 256) * kMiB;
  const bool blobs = options.engine == "blobdb";
  auto raw = OpenRawDisk(folder, round_bytes);
  if (!raw.ok()) return raw.status();
  auto engine = blobs ? OpenBlobDb(folder, round_bytes) : OpenTierEngine(folder, round_bytes);
  if (!engine.ok()) return engine.status();
  Comparison comparison(**engine, **raw, options);
  std::printf("%-12s %12s %6s %10s %12s %8s\n", "op", "value bytes", "depth", "GB/s", "disk GB/s", "ratio");
  for (const uint64_t value_bytes : {kMiB / 4, kMiB, 4 * kMiB, 16 * kMiB}) {
    const size_t values = round_bytes / value_bytes;
    // Twice: every block of either file is written once before it is measured.
    for (int i = 0; i < 2; ++i) {
      for (DiskEngine* disk : {raw->get(), engine->get()}) {
        if (absl::Status status = disk->Fill(values, value_bytes); !status.ok()) return status;
      }
    }
    for (const Op& op : kOps) {
      for (const int depth : kDepths) {
        if (absl::Status status = comparison.Run(op, values, value_bytes, depth, cases); !status.ok()) return status;
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Ssd(const Options& options, nlohmann::json& figures) {
  if (!options.engine.empty() && options.engine != "tier" && options.engine != "blobdb") {
    return absl::InvalidArgumentError("--engine: unknown; expected tier or blobdb");
  }
  absl::StatusOr<std::string> folder = MakeFolder(options.dir);
  if (!folder.ok()) return folder.status();
  const absl::Cleanup remove = [&folder] {
    std::error_code ignored;
    std::filesystem::remove_all(*folder, ignored);
  };
  figures["machine"] = Machine();
  figures["engine"] = options.engine.empty() ? "tier" : options.engine;
  return RunCases(options, *folder, figures["cases"] = nlohmann::json::array());
}

}  // namespace ashlar::bench
