// SPDX-License-Identifier: Apache-2.0
// `ashlar-bench store`: the daemon as a store of values for another process, against memcpy and a Redis server.
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <thread>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "kernels/host/thread_pool.h"
#include "tools/bench/bench.h"
#include "tools/bench/shared_memory.h"
#include "tools/bench/value_store.h"

namespace ashlar::bench {
namespace {

constexpr uint64_t kKiB = 1024, kMiB = kKiB * 1024;

// The times of calls of one kind, in rounds.
struct Samples {
  std::vector<double> calls;  // seconds of each
  std::vector<double> rates;  // bytes per second of each round
  double cpu_seconds = 0;     // CPU seconds of client and server
  double bytes = 0;
  double round_seconds = 0, round_bytes = 0;  // so far

  void EndRound() {
    rates.push_back(round_bytes / round_seconds);
    round_seconds = round_bytes = 0;
  }
  double Rate() const { return Median(rates); }
  double Quantile(double share) const {
    std::vector<double> sorted = calls;
    std::sort(sorted.begin(), sorted.end());
    return sorted[static_cast<size_t>(std::ceil(share * static_cast<double>(sorted.size()))) - 1];
  }
};

double CpuSeconds(pid_t process) {
  clockid_t clock;
  timespec time{};
  if (clock_getcpuclockid(process, &clock) != 0 || clock_gettime(clock, &time) != 0) return 0;
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// One size of value and of batch.
struct Case {
  uint64_t value_bytes = 0;
  size_t batch = 0;
  uint64_t slots = 0;     // values in the ring; whole batches
  uint64_t next = 0;      // the number of the next new value; whole batches
  uint64_t got = 0;       // batches so far
  uint64_t first_id = 0;  // first id of the case
};

// Value `id` is the contents of slot id % slots of the source ring, and begins with its number. The latest ring of
// values is in the stores. Rings are so large that data has left the caches when it is moved again.
class StoreBench {
 public:
  StoreBench(const Options& options, int threads) : options_(options), pool_(threads) {}

  absl::Status Prepare();
  absl::Status Measure(uint64_t value_bytes, size_t batch, nlohmann::json& cases);

 private:
  struct Contender {
    std::unique_ptr<ValueStore> store;
    Samples gets, puts;
  };
  static constexpr size_t kAshlar = 0, kRedis = 1;

  Batch NewValues(Case& at, size_t count);
  // Values that are in the stores, half a ring older than the newest.
  static Batch OldValues(Case& at);
  std::byte* Source(const Case& at, const Batch& batch) const {
    return source_->bytes().data() + batch.first % at.slots * at.value_bytes;
  }
  absl::Status Fill(Case& at);
  absl::Status Round(Case& at, bool warm);
  absl::Status Call(const std::vector<Batch>& batches, pid_t server, Samples& samples,
                    absl::FunctionRef<absl::Status(const Batch&)> call);
  absl::Status Get(const Case& at, const std::vector<Batch>& batches, Contender& contender, bool compare);
  void Copy(const Case& at, const std::vector<Batch>& batches);
  nlohmann::json Figures(const Case& at, bool get) const;

  const Options& options_;
  kernels::ThreadPool pool_;
  StoreSizes sizes_;
  uint64_t round_bytes_ = 0;
  uint64_t next_id_ = 1;
  std::unique_ptr<SharedMemory> source_, copied_;
  std::vector<Contender> contenders_;  // Ashlar; and Redis if requested
  std::vector<Samples> copies_;        // by 1 … threads
};

absl::Status StoreBench::Prepare() {
  sizes_ = options_.quick ? StoreSizes{.ring_bytes = 64 * kMiB, .batch_bytes = 16 * kMiB}
                          : StoreSizes{.ring_bytes = 512 * kMiB, .batch_bytes = 256 * kMiB};
  round_bytes_ = sizes_.ring_bytes / 2;
  for (auto* memory : {&source_, &copied_}) {
    auto made = SharedMemory::Make(sizes_.ring_bytes);
    if (!made.ok()) return made.status();
    *memory = *std::move(made);
  }
  uint64_t number = 1;
  for (size_t at = 0; at < sizes_.ring_bytes; at += sizeof number) {
    number = number * 6364136223846793005u + 1442695040888963407u;
    std::memcpy(source_->bytes().data() + at, &number, sizeof number);
  }
  auto ashlar = OpenAshlarStore(sizes_, pool_.Size());
  if (!ashlar.ok()) return ashlar.status();
  contenders_.push_back({.store = *std::move(ashlar)});
  if (options_.compare == "redis") {
    auto redis = OpenRedisStore(sizes_);
    if (!redis.ok()) return redis.status();
    contenders_.push_back({.store = *std::move(redis)});
  }
  return absl::OkStatus();
}

Batch StoreBench::NewValues(Case& at, size_t count) {
  const Batch batch{.first = at.next, .count = count, .value_bytes = at.value_bytes};
  at.next += count;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t id = batch.first + i;
    std::memcpy(Source(at, batch) + i * at.value_bytes, &id, sizeof id);
  }
  return batch;
}

Batch StoreBench::OldValues(Case& at) {
  const uint64_t slot = (at.got++ * at.batch + at.slots / 2) % at.slots;
  const uint64_t oldest = at.next - at.slots;
  const uint64_t id = oldest + (slot + at.slots - oldest % at.slots) % at.slots;
  return {.first = id, .count = at.batch, .value_bytes = at.value_bytes};
}

absl::Status StoreBench::Fill(Case& at) {
  const size_t count = std::min<size_t>(16, sizes_.batch_bytes / at.value_bytes);
  while (at.next < at.first_id + at.slots) {
    const Batch batch = NewValues(at, count);
    for (Contender& contender : contenders_) {
      if (absl::Status status = contender.store->Put(batch, Source(at, batch)); !status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

absl::Status StoreBench::Call(const std::vector<Batch>& batches, pid_t server, Samples& samples,
                              absl::FunctionRef<absl::Status(const Batch&)> call) {
  const double cpu = CpuSeconds(getpid()) + CpuSeconds(server);
  for (const Batch& batch : batches) {
    absl::Status status;
    samples.calls.push_back(Seconds([&] { status = call(batch); }));
    if (!status.ok()) return status;
    samples.round_seconds += samples.calls.back();
    samples.round_bytes += static_cast<double>(batch.bytes());
    samples.bytes += static_cast<double>(batch.bytes());
  }
  samples.cpu_seconds += CpuSeconds(getpid()) + CpuSeconds(server) - cpu;
  return absl::OkStatus();
}

absl::Status StoreBench::Get(const Case& at, const std::vector<Batch>& batches, Contender& contender, bool compare) {
  ValueStore& store = *contender.store;
  const auto offset = [&](const Batch& batch) { return batch.first % at.slots * at.value_bytes; };
  const absl::Status status = Call(batches, store.server(), contender.gets,
                                   [&](const Batch& batch) { return store.Get(batch, offset(batch)); });
  if (!status.ok() || !compare) return status;
  for (const Batch& batch : batches) {
    if (std::memcmp(store.targets().data() + offset(batch), Source(at, batch), batch.bytes()) != 0) {
      return absl::DataLossError(absl::StrCat("values of ", at.value_bytes, " bytes were read back wrong"));
    }
  }
  return absl::OkStatus();
}

void StoreBench::Copy(const Case& at, const std::vector<Batch>& batches) {
  copies_.resize(static_cast<size_t>(pool_.Size()));
  for (int threads = 1; threads <= pool_.Size(); ++threads) {
    (void)Call(batches, getpid(), copies_[static_cast<size_t>(threads) - 1], [&](const Batch& batch) {
      const std::byte* const source = Source(at, batch);
      std::byte* const target = copied_->bytes().data() + (source - source_->bytes().data());
      const size_t slice = batch.bytes() / static_cast<size_t>(threads);
      kernels::ParallelFor(pool_, threads, [&](int64_t t) {
        const size_t from = static_cast<size_t>(t) * slice;
        std::memcpy(target + from, source + from, t + 1 == threads ? batch.bytes() - from : slice);
      });
      return absl::OkStatus();
    });
  }
}

// The stores take turns, so that a noisy neighbour slows all of them. The warm-up's values are compared byte by byte.
absl::Status StoreBench::Round(Case& at, bool warm) {
  const size_t calls = std::clamp<size_t>(round_bytes_ / (at.batch * at.value_bytes), 2, 64);
  std::vector<Batch> fresh, old;
  for (size_t i = 0; i < calls; ++i) fresh.push_back(NewValues(at, at.batch));
  for (size_t i = 0; i < calls; ++i) old.push_back(OldValues(at));
  for (Contender& contender : contenders_) {
    const absl::Status status = Call(fresh, contender.store->server(), contender.puts, [&](const Batch& batch) {
      return contender.store->Put(batch, Source(at, batch));
    });
    if (!status.ok()) return status;
  }
  for (Contender& contender : contenders_) {
    if (absl::Status status = Get(at, old, contender, warm); !status.ok()) return status;
  }
  Copy(at, old);
  for (Contender& contender : contenders_) {
    contender.gets.EndRound();
    contender.puts.EndRound();
  }
  for (Samples& copy : copies_) copy.EndRound();
  return absl::OkStatus();
}

nlohmann::json StoreBench::Figures(const Case& at, bool get) const {
  const auto samples = [&](const Contender& contender) -> const Samples& {
    return get ? contender.gets : contender.puts;
  };
  const auto figures = [&](const Samples& of) -> nlohmann::json {
    return {{"ops_per_s", of.Rate() / static_cast<double>(at.value_bytes)},
            {"gb_per_s", of.Rate() / 1e9},
            {"p50_us", of.Quantile(0.5) * 1e6},
            {"p99_us", of.Quantile(0.99) * 1e6},
            {"cpu_s_per_gb", of.cpu_seconds / (of.bytes / 1e9)}};
  };
  double limit = 0;
  for (const Samples& copy : copies_) limit = std::max(limit, copy.Rate());
  const Samples& ashlar = samples(contenders_[kAshlar]);
  nlohmann::json out = figures(ashlar);
  out.update({{"op", get ? "get" : "put"},
              {"value_bytes", at.value_bytes},
              {"batch", at.batch},
              {"calls", ashlar.calls.size()},
              {"memcpy_gb_per_s", limit / 1e9},
              {"ratio_memcpy", ashlar.Rate() / limit}});
  if (contenders_.size() > kRedis) {
    const Samples& redis = samples(contenders_[kRedis]);
    out["redis"] = figures(redis);
    out["ratio_redis"] = ashlar.Rate() / redis.Rate();
  }
  return out;
}

void Print(const nlohmann::json& figures) {
  const auto number = [&](const char* name) { return figures.at(name).get<double>(); };
  std::printf("%-4s %9.0f %6.0f %10.0f %7.2f %10.0f %10.0f %8.2f %8.2f", figures.at("op").get<std::string>().c_str(),
              number("value_bytes") / kKiB, number("batch"), number("ops_per_s"), number("gb_per_s"), number("p50_us"),
              number("p99_us"), number("cpu_s_per_gb"), number("ratio_memcpy"));
  figures.contains("ratio_redis") ? std::printf(" %8.2f\n", number("ratio_redis")) : std::printf("\n");
  std::fflush(stdout);
}

absl::Status StoreBench::Measure(uint64_t value_bytes, size_t batch, nlohmann::json& cases) {
  const uint64_t slots = sizes_.ring_bytes / value_bytes;
  const uint64_t first = (next_id_ + slots - 1) / slots * slots;
  Case at{.value_bytes = value_bytes, .batch = batch, .slots = slots, .next = first, .first_id = first};
  if (absl::Status status = Fill(at); !status.ok()) return status;
  if (absl::Status status = Round(at, /*warm=*/true); !status.ok()) return status;
  copies_.clear();
  for (Contender& contender : contenders_) contender.gets = contender.puts = {};
  for (int i = 0; i < options_.repetitions; ++i) {
    if (absl::Status status = Round(at, /*warm=*/false); !status.ok()) return status;
  }
  next_id_ = at.next;
  for (bool get : {true, false}) {
    cases.push_back(Figures(at, get));
    Print(cases.back());
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Store(const Options& options, nlohmann::json& figures) {
  if (!options.compare.empty() && options.compare != "redis") {
    return absl::InvalidArgumentError(absl::StrCat("--compare: ", options.compare, " is unknown; expected redis"));
  }
  StoreBench bench(options,
                   options.threads > 0 ? options.threads : static_cast<int>(std::thread::hardware_concurrency()));
  if (absl::Status status = bench.Prepare(); !status.ok()) return status;
  figures["machine"] = Machine();
  nlohmann::json& cases = figures["cases"] = nlohmann::json::array();
  std::printf("%-4s %9s %6s %10s %7s %10s %10s %8s %8s %8s\n", "op", "KiB", "batch", "ops/s", "GB/s", "p50 µs",
              "p99 µs", "CPU s/GB", "/memcpy", options.compare.empty() ? "" : "/redis");
  for (uint64_t value_bytes : {64 * kKiB, 256 * kKiB, kMiB, 4 * kMiB, 16 * kMiB}) {
    if (options.quick && value_bytes > kMiB) break;
    for (size_t batch : {1, 16}) {
      if (absl::Status status = bench.Measure(value_bytes, batch, cases); !status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace ashlar::bench
