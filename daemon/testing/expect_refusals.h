// SPDX-License-Identifier: Apache-2.0
// For tests: malformed requests, each refused with the name of its field.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/testing/test_engine.h"

namespace ashlar::daemon {

// Each case changes one field of a valid request, and has the beginning of the error.
template <typename Request, typename Reply>
void ExpectRefusals(TestEngine& engine, const Request& good, absl::StatusCode code,
                    const std::vector<std::pair<const char*, std::function<void(Request&)>>>& cases) {
  for (const auto& [error, spoil] : cases) {
    Request request = good;
    spoil(request);
    Reply reply;
    const absl::Status status = engine.Call(request, &reply);
    EXPECT_EQ(status.code(), code) << error;
    EXPECT_THAT(std::string(status.message()), ::testing::StartsWith(error));
  }
}

}  // namespace ashlar::daemon
