// What is behind a Landing.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "client/client.h"
#include "client/connection.h"
#include "client/land_call.h"
#include "client/opened_model.h"
#include "client/process_bound.h"
#include "client/region_memory.h"

namespace ashlar {

struct Landing::Impl {
  std::mutex mutex;
  std::vector<MissReason> reasons;  // guarded by mutex; of segments that were not asked for: known from the start
  bool decided = false;             // guarded by mutex
  std::vector<size_t> asked;        // for each object of the call, its place in `reasons`

  // What must stay while the daemon may write. `call` is last: it is destroyed first, and waits until it is quiet.
  std::shared_ptr<const internal::ModelHandle> model;
  std::shared_ptr<internal::LeaseHold> lease;
  std::shared_ptr<internal::RegionMemory> pages;
  std::shared_ptr<internal::LandCall> call;  // null: nothing had to be asked
  internal::Birthplace birthplace;
};

}  // namespace ashlar
