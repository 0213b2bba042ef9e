// SPDX-License-Identifier: Apache-2.0
#include "daemon/rpc/request_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <thread>
#include <vector>

namespace ashlar::daemon {
namespace {

using testing::ElementsAre;

TEST(RequestReader, ReadsInOrderOnItsOwnThread) {
  std::vector<int> read;
  std::thread::id thread;
  {
    RequestReader reader;
    std::promise<void> go_on;
    reader.Post([&, waits = go_on.get_future().share()] {
      waits.wait();
      thread = std::this_thread::get_id();
    });
    for (int i = 0; i < 3; ++i) reader.Post([&read, i] { read.push_back(i); });
    go_on.set_value();
  }
  EXPECT_THAT(read, ElementsAre(0, 1, 2)) << "what was posted is read before the reader goes";
  EXPECT_NE(thread, std::this_thread::get_id());
}

TEST(RequestReader, ReleasesRequestAfterRead) {
  RequestReader reader;
  auto request = std::make_shared<int>();
  const std::weak_ptr<int> held = request;
  reader.Post([request = std::move(request)] {});
  std::promise<bool> gone;
  reader.Post([&] { gone.set_value(held.expired()); });
  EXPECT_TRUE(gone.get_future().get());
}

}  // namespace
}  // namespace ashlar::daemon
