// The back ends under test, each with and without workers.
#pragma once

#include <memory>
#include <ostream>
#include <vector>

#include "kernels/host/thread_pool.h"
#include "kernels/kernels.h"

namespace ashlar::kernels::testing {

// One back end with or without workers.
struct Backend {
  const Kernels* kernels;
  bool with_workers;
};

inline std::ostream& operator<<(std::ostream& out, const Backend& backend) {
  return out << backend.kernels->name() << (backend.with_workers ? "_workers" : "");
}

// All of them. The reference computes on one thread whatever it is lent, and a device needs none.
inline std::vector<Backend> Backends() {
  std::vector<Backend> backends;
  for (const Kernels* kernels : Available()) {
    backends.push_back({kernels, false});
    if (kernels != &Reference() && kernels->memory() == nullptr) backends.push_back({kernels, true});
  }
  return backends;
}

// Those that are held against the reference.
inline std::vector<Backend> Candidates() {
  std::vector<Backend> candidates = Backends();
  std::erase_if(candidates, [](const Backend& backend) { return backend.kernels == &Reference(); });
  return candidates;
}

// A queue of one back end, and a short way to run each operation to its end on it.
class Runner {
 public:
  explicit Runner(const Kernels& kernels) : Runner(Backend{&kernels, false}) {}
  explicit Runner(const Backend& backend)
      : workers_(backend.with_workers ? std::make_unique<ThreadPool>(3) : nullptr),
        kernels_(*backend.kernels),
        queue_(kernels_.MakeQueue(workers_.get())) {}

  void Run(const ComposeArgs& args) { kernels_.Compose(args, *queue_).Wait(); }
  void Run(const ComposeTransitionsArgs& args) { kernels_.ComposeTransitions(args, *queue_).Wait(); }
  void Run(const CaptureArgs& args) { kernels_.Capture(args, *queue_).Wait(); }
  void Run(const AdvanceSeamArgs& args) { kernels_.AdvanceSeam(args, *queue_).Wait(); }
  void Run(const DecodeBufferedArgs& args) { kernels_.DecodeBuffered(args, *queue_).Wait(); }
  void Run(const VerifyDraftsArgs& args) { kernels_.VerifyDrafts(args, *queue_).Wait(); }
  void Run(const RebuildStateArgs& args) { kernels_.RebuildState(args, *queue_).Wait(); }
  void Run(const RotateKeysArgs& args) { kernels_.RotateKeys(args, *queue_).Wait(); }
  void Run(const LandArgs& args) { kernels_.Land(args, *queue_).Wait(); }
  void Run(const GatherArgs& args) { kernels_.Gather(args, *queue_).Wait(); }
  void Run(const ChecksumArgs& args) { kernels_.Checksum(args, *queue_).Wait(); }
  void Run(Event (Kernels::*attend)(const AttendArgs&, Queue&) const, const AttendArgs& args) {
    (kernels_.*attend)(args, *queue_).Wait();
  }

 private:
  const std::unique_ptr<ThreadPool> workers_;
  const Kernels& kernels_;
  const std::unique_ptr<Queue> queue_;
};

}  // namespace ashlar::kernels::testing
