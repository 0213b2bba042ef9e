// SPDX-License-Identifier: Apache-2.0
// The back ends under test, each with and without workers.
#pragma once

#include <memory>
#include <ostream>
#include <vector>

#include "kernels/host/thread_pool.h"
#include "kernels/kernels.h"
#include "kernels/testing/device_call.h"

namespace ashlar::kernels::testing {

// One back end with or without workers.
struct Backend {
  const Kernels* kernels;
  bool with_workers;
};

inline std::ostream& operator<<(std::ostream& out, const Backend& backend) {
  return out << backend.kernels->name() << (backend.with_workers ? "_workers" : "");
}

// All of them. The reference always uses one thread, and a device needs no workers.
inline std::vector<Backend> Backends() {
  std::vector<Backend> backends;
  for (const Kernels* kernels : Available()) {
    backends.push_back({kernels, false});
    if (kernels != &Reference() && kernels->memory() == nullptr) backends.push_back({kernels, true});
  }
  return backends;
}

// The ones that are compared with the reference.
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

  void Run(const ComposeArgs& args) { Run(&Kernels::Compose, args); }
  void Run(const ComposeTransitionsArgs& args) { Run(&Kernels::ComposeTransitions, args); }
  void Run(const CaptureArgs& args) { Run(&Kernels::Capture, args); }
  void Run(const AdvanceSeamArgs& args) { Run(&Kernels::AdvanceSeam, args); }
  void Run(const DecodeBufferedArgs& args) { Run(&Kernels::DecodeBuffered, args); }
  void Run(const VerifyDraftsArgs& args) { Run(&Kernels::VerifyDrafts, args); }
  void Run(const RebuildStateArgs& args) { Run(&Kernels::RebuildState, args); }
  void Run(const RotateKeysArgs& args) { Run(&Kernels::RotateKeys, args); }
  void Run(const LandArgs& args) { Run(&Kernels::Land, args); }
  void Run(const GatherArgs& args) { Run(&Kernels::Gather, args); }
  void Run(const ChecksumArgs& args) { Run(&Kernels::Checksum, args); }
  template <typename Args>
  void Run(Event (Kernels::*operation)(const Args&, Queue&) const, const Args& args) {
    if (kernels_.memory() == nullptr) return (kernels_.*operation)(args, *queue_).Wait();
    DeviceCall call(*kernels_.memory());
    (kernels_.*operation)(call.Stage(args), *queue_).Wait();
    call.CopyBack();
  }

 private:
  const std::unique_ptr<ThreadPool> workers_;
  const Kernels& kernels_;
  const std::unique_ptr<Queue> queue_;
};

}  // namespace ashlar::kernels::testing
