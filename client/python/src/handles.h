// SPDX-License-Identifier: Apache-2.0
// The handles that Python holds: a cache, and a request that keeps what its calls point to.
#pragma once

#include <nanobind/nanobind.h>

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ashlar/engine.h"
#include "client/engine/boundary.h"
#include "client/python/src/arrays.h"
#include "client/python/src/model.h"
#include "client/session/region.h"

namespace ashlar::python {

// The values of ashlar.Verdict.
enum class Verdict : int { kOk = 0, kPending = 100, kRestart = 101, kOtherPages = 102, kNoPages = 103 };

inline Verdict VerdictOf(const engine::Status& status) {
  return static_cast<Verdict>(Checked(status));
}

// Shared by a cache and its requests: widths are checked in both.
struct OpenedModel {
  explicit OpenedModel(nb::handle model) : description(model) {}
  ModelDescription description;
  size_t groups = 0;  // groups of layers in the cache's memory; 0: one page table serves all layers
};

// A handle of the client. Python may close or release it on one thread while another thread is in a call. Each call
// holds it until it returns. Its end may wait for the daemon, so the GIL is released meanwhile. In a forked child every
// use throws, and closing does nothing.
template <typename Engine>
class Held {
 public:
  explicit Held(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() { Close(nullptr); }

  // For calls that do not wait.
  Engine* operator->() const { return shared().get(); }
  Engine& operator*() const { return *shared(); }
  const std::shared_ptr<Engine>& shared() const {
    Checked(engine::CheckProcess(creator_));  // RuntimeError
    return engine_;
  }
  // Calls it without Python's global lock.
  template <typename Call>
  auto WithoutGil(Call call) const {
    std::shared_ptr<Engine> engine = shared();
    const nb::gil_scoped_release release;
    auto result = call(*engine);
    engine.reset();
    return result;
  }
  // `next` replaces it.
  void Close(std::shared_ptr<Engine> next) {
    if (creator_.InChild()) return Leave();
    std::shared_ptr<Engine> engine = std::exchange(engine_, std::move(next));
    const nb::gil_scoped_release release;
    engine.reset();
  }

 private:
  // Leaks the parent's objects: its threads do not exist in the child, and its locks may be held forever.
  void Leave() { new std::shared_ptr<Engine>(std::move(engine_)); }

  std::shared_ptr<Engine> engine_;
  internal::CreatorProcess creator_;
};

// The owner of arrays that show a region: the memory stays mapped as long as any of them, after the handle's end, too.
inline nb::capsule KeepMapped(const Region& region) {
  return nb::capsule(new Region(region), [](void* kept) noexcept {
    const nb::gil_scoped_release release;  // notifies the daemon
    delete static_cast<Region*>(kept);
  });
}

struct PyCache {
  Held<engine::Cache> cache{std::make_shared<engine::Cache>()};  // never null
  std::shared_ptr<OpenedModel> model;
  bool closed = false;
};

struct PyRequest {
  Held<engine::Request> request{std::make_shared<engine::Request>()};  // never null
  std::shared_ptr<OpenedModel> model;
  std::vector<int32_t> tokens;
  nb::object plan;  // the plan object that Python has; none: the plan may have changed
};

// A copy of a plan when it was requested. The pointers of `plan` are the request's own and must not be followed.
struct PyPlan {
  engine::Plan plan = {};
  std::vector<engine::Step> steps;
  std::vector<engine::Segment> segments;
};

// The tensors of a Run or of a checkpoint as Python sees them: attributes layer, state, conv_tail, transition, decay,
// exponents. The structs point into the arrays, which `kept` keeps alive.
struct LinearTensorsView {
  LinearTensorsView(const std::string& name, nb::handle layers, const ModelDescription& model, bool transitions);
  std::vector<engine::LinearTensors> tensors;
  std::deque<Strided> kept;
};

// Returns a copy of the plan, of the class that the request's class names as `plan_type`. A copy, because the request's
// own plan changes with its verdicts. Until then this returns the same object.
nb::object PlanOf(nb::pointer_and_handle<PyRequest> self);

// A started call. Its end waits for the call, while other Python threads continue.
struct PyJob {
  PyJob() = default;
  ~PyJob() {
    const nb::gil_scoped_release release;
    job = engine::Job();
    cache.reset();
    request.reset();
  }
  nb::object written;                        // the object that receives the call's result
  std::shared_ptr<void> kept;                // the call's arguments
  std::shared_ptr<engine::Cache> cache;      // cache of the call; null: none
  std::shared_ptr<engine::Request> request;  // request of the call; null: none
  engine::Job job;
};

void BindCache(nb::module_& module);
void BindRequest(nb::module_& module);
void BindPages(nb::module_& module);
void BindProber(nb::module_& module);

}  // namespace ashlar::python
