// SPDX-License-Identifier: Apache-2.0
// The tables of calls hold what the service descriptors say, so that no call can lack its row.
#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "ashlar/v1/admin.pb.h"
#include "ashlar/v1/cache.pb.h"
#include "proto/admin_calls.h"
#include "proto/cache_calls.h"

namespace ashlar {
namespace {

using google::protobuf::MethodDescriptor;
using google::protobuf::ServiceDescriptor;

std::string_view View(absl::string_view text) {
  return {text.data(), text.size()};
}

TEST(CacheCalls, EveryMethodHasItsRow) {
  const ServiceDescriptor* service = v1::OpenModelRequest::descriptor()->file()->FindServiceByName("Cache");
  ASSERT_NE(service, nullptr);
  ASSERT_EQ(static_cast<size_t>(service->method_count()), kCacheCalls.size());
  for (int i = 0; i < service->method_count(); ++i) {
    const MethodDescriptor& method = *service->method(i);
    const CacheCallRow& row = kCacheCalls[static_cast<size_t>(i)];
    SCOPED_TRACE(method.name());
    EXPECT_EQ(method.name(), View(row.name));
    EXPECT_EQ(method.input_type()->name(), View(row.request));
    EXPECT_EQ(method.output_type()->name(), View(row.reply));
    EXPECT_FALSE(method.client_streaming());
    EXPECT_EQ(method.server_streaming(), row.shape == CallShape::kStream);
  }
}

// The gate looks for the secret there before a request is parsed.
TEST(CacheCalls, EveryRequestNamesItsSessionFirst) {
  const ServiceDescriptor* service = v1::OpenModelRequest::descriptor()->file()->FindServiceByName("Cache");
  for (int i = 0; i < service->method_count(); ++i) {
    const auto* first = service->method(i)->input_type()->FindFieldByNumber(1);
    ASSERT_NE(first, nullptr) << service->method(i)->name();
    EXPECT_EQ(first->name(), "session") << service->method(i)->name();
  }
}

TEST(CacheCalls, OnlyQuiesceIsForSessionsThatHaveEnded) {
  for (const CacheCallRow& row : kCacheCalls) {
    EXPECT_EQ(row.callers == Callers::kAll, row.name == "Quiesce") << row.name;
  }
  EXPECT_EQ(RowOf(CacheCall::kQuiesce).name, "Quiesce");
}

TEST(AdminCalls, EveryMethodHasItsRow) {
  struct Row {
    std::string_view name, request, reply;
  };
  static constexpr Row kRows[] = {
#define ASHLAR_ROW(name, request, reply) {#name, #request, #reply},
      ASHLAR_ADMIN_CALLS(ASHLAR_ROW)
#undef ASHLAR_ROW
  };
  const ServiceDescriptor* service = v1::ExplainReply::descriptor()->file()->FindServiceByName("Admin");
  ASSERT_NE(service, nullptr);
  ASSERT_EQ(static_cast<size_t>(service->method_count()), std::size(kRows));
  for (int i = 0; i < service->method_count(); ++i) {
    const MethodDescriptor& method = *service->method(i);
    SCOPED_TRACE(method.name());
    EXPECT_EQ(method.name(), kRows[i].name);
    EXPECT_EQ(method.input_type()->name(), kRows[i].request);
    EXPECT_EQ(method.output_type()->name(), kRows[i].reply);
    EXPECT_FALSE(method.client_streaming() || method.server_streaming());
  }
}

}  // namespace
}  // namespace ashlar
