// SPDX-License-Identifier: Apache-2.0
#include "daemon/rpc/grpc_threads.h"

#include <grpc/grpc.h>
#include <grpc/support/cpu.h>
#include <grpc/support/time.h>
#include <grpcpp/alarm.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/mutex.h"

namespace ashlar::daemon {
namespace {

// Threads of gRPC 1.51: its executor has at most two per core, and starts another one if a queue has more than two
// closures.
constexpr uint64_t kExecutorThreadsOfACore = 2;
constexpr uint64_t kClosuresOfAThread = 4;
constexpr char kExecutorName[] = "default-executo";  // truncated by the kernel
constexpr std::chrono::seconds kPatience{2};

uint64_t ExecutorThreads() {
  return kExecutorThreadsOfACore * std::max(1u, gpr_cpu_num_cores());
}

// Returns the number of the executor's threads, or the maximum if /proc cannot be read.
uint64_t CountExecutorThreads() {
  uint64_t count = 0;
  std::error_code error;
  for (std::filesystem::directory_iterator it("/proc/self/task", error), end; it != end; it.increment(error)) {
    if (error) break;
    std::string name;
    std::getline(std::ifstream(it->path() / "comm"), name);
    if (name == kExecutorName) ++count;
  }
  return error ? ExecutorThreads() : count;
}

// Closed until Open.
class Gate {
 public:
  void Open() {
    {
      MutexLock lock(mutex_);
      open_ = true;
    }
    opened_.NotifyAll();
  }
  void Pass() {
    MutexLock lock(mutex_);
    while (!open_) opened_.Wait(mutex_);
  }

 private:
  Mutex mutex_;
  CondVar opened_;
  bool open_ ABSL_GUARDED_BY(mutex_) = false;
};

absl::Status Reserve() {
  grpc_init();  // never shut down
  // Alarm callbacks run on the executor. While they wait, its queues grow.
  const auto gate = std::make_shared<Gate>();
  const uint64_t wanted = ExecutorThreads();
  std::vector<grpc::Alarm> alarms(kClosuresOfAThread * wanted);
  for (size_t i = 0; i < alarms.size(); ++i) {
    // Most are due immediately. The last ones use gRPC's timers, which start the thread that waits for the next timer.
    const bool late = i + 2 >= alarms.size();
    // A past time needs no timer, whatever the clocks say.
    alarms[i].Set(late ? gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(1, GPR_TIMESPAN))
                       : gpr_inf_past(GPR_CLOCK_MONOTONIC),
                  [gate](bool) { gate->Pass(); });
  }
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  uint64_t there = CountExecutorThreads();
  while (there < wanted && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    there = CountExecutorThreads();
  }
  gate->Open();
  if (there >= wanted) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("threads: gRPC started only ", there, " of ", wanted,
                                                   "; raise pids.max of the control group, or RLIMIT_NPROC"));
}

}  // namespace

uint64_t GrpcThreads() {
  const uint64_t cores = std::max(1u, gpr_cpu_num_cores());
  constexpr uint64_t kTimersAndResolver = 6;
  return kTimersAndResolver + ExecutorThreads() + std::clamp<uint64_t>(cores, 2, 32) + 1 +
         std::clamp<uint64_t>(cores / 2, 2, 16);
}

absl::Status ReserveGrpcThreads() {
  static const absl::Status reserved = Reserve();
  return reserved;
}

}  // namespace ashlar::daemon
