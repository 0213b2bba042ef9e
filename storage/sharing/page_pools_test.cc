// SPDX-License-Identifier: Apache-2.0
#include "storage/sharing/page_pools.h"

#include <gtest/gtest.h>

#include "storage/testing/tenants.h"

namespace ashlar::storage {
namespace {

constexpr SessionId kEngine = 10, kWorker = 11;
constexpr uint64_t kRegion = 7;

LeaseId Lease(uint8_t name) {
  LeaseId lease{};
  lease[0] = name;
  return lease;
}
std::vector<PagePool::Want> PagesOf(uint8_t text, uint32_t pages) {
  Key key;
  key.bytes[0] = text;
  return {{key, pages}};
}

class PagePoolsTest : public testing::Test {
 protected:
  // The admission; 0 if it was refused because no pages were free.
  PagePool::AdmissionId Admit(SessionId session, uint8_t lease, const std::vector<PagePool::Want>& wants,
                              uint64_t own) {
    const auto answer = pools_.Admit(session, kTenant, Lease(lease), pool_, wants, own);
    EXPECT_TRUE(answer.ok()) << answer.status();
    return answer.ok() ? answer->admission : 0;
  }

  PagePools pools_{/*leases_per_session=*/3};
  std::shared_ptr<PagePool> pool_ = *pools_.Open(kTenant, kRegion, 10);
};

TEST_F(PagePoolsTest, APassedLeaseOutlivesItsFirstSession) {
  ASSERT_NE(Admit(kEngine, 1, PagesOf(1, 4), 2), 0u);
  const auto attached = pools_.Attach(kWorker, kTenant, Lease(1));
  ASSERT_TRUE(attached.ok()) << attached.status();
  EXPECT_TRUE(pools_.Attach(kWorker, kTenant, Lease(1)).ok());
  EXPECT_TRUE((*attached)->pool->Filled((*attached)->admission, 0));
  pools_.ReleaseAll(kEngine);
  EXPECT_EQ(pools_.Find(kEngine, Lease(1)), nullptr);
  ASSERT_NE(pools_.Find(kWorker, Lease(1)), nullptr);
  EXPECT_EQ(pools_.levels(kTenant).own, 2u);
  EXPECT_EQ(pools_.levels(kTenant).shared, 4u);
  pools_.Release(kWorker, Lease(1));
  EXPECT_EQ(pools_.levels(kTenant).own, 0u);
  EXPECT_EQ(pools_.levels(kTenant).idle, 4u);
  EXPECT_EQ(pools_.Attach(kWorker, kTenant, Lease(1)).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(PagePoolsTest, LeasesOfOtherTenantsAndSessionsAreUnknown) {
  ASSERT_NE(Admit(kEngine, 1, {}, 2), 0u);
  EXPECT_EQ(pools_.Attach(kWorker, kOther, Lease(1)).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(pools_.Find(kWorker, Lease(1)), nullptr);
  pools_.Release(kWorker, Lease(1));
  EXPECT_NE(pools_.Find(kEngine, Lease(1)), nullptr);
  EXPECT_EQ(pools_.levels(kOther), PagePool::Levels());
}

TEST_F(PagePoolsTest, AnEnginesEndFreesItsRequests) {
  ASSERT_NE(Admit(kEngine, 1, PagesOf(1, 3), 2), 0u);
  ASSERT_NE(Admit(kEngine, 2, PagesOf(1, 3), 4), 0u);
  pools_.ReleaseAll(kEngine);
  EXPECT_EQ(pools_.levels(kTenant).free, 10u);  // no request had filled text 1
  EXPECT_FALSE(pool_->InUse());
  pools_.ReleaseAll(kEngine);
}

TEST_F(PagePoolsTest, RequestNamesAreUnique) {
  ASSERT_NE(Admit(kEngine, 1, {}, 2), 0u);
  const auto again = pools_.Admit(kWorker, kTenant, Lease(1), pool_, {}, 1);
  EXPECT_EQ(again.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(pools_.levels(kTenant).own, 2u);
}

TEST_F(PagePoolsTest, ARefusedRequestHoldsNothing) {
  EXPECT_EQ(Admit(kEngine, 1, {}, 11), 0u);
  EXPECT_EQ(pools_.Find(kEngine, Lease(1)), nullptr);
  EXPECT_NE(Admit(kEngine, 1, {}, 10), 0u);
}

TEST_F(PagePoolsTest, RequestsPerSessionAreBounded) {
  for (uint8_t lease = 1; lease <= 3; ++lease) ASSERT_NE(Admit(kEngine, lease, {}, 1), 0u);
  EXPECT_EQ(pools_.Admit(kEngine, kTenant, Lease(4), pool_, {}, 1).status().code(),
            absl::StatusCode::kResourceExhausted);
  ASSERT_NE(Admit(kWorker, 4, {}, 1), 0u);
  EXPECT_EQ(pools_.Attach(kEngine, kTenant, Lease(4)).status().code(), absl::StatusCode::kResourceExhausted);
  pools_.Release(kEngine, Lease(2));
  EXPECT_TRUE(pools_.Attach(kEngine, kTenant, Lease(4)).ok());
}

TEST_F(PagePoolsTest, SegmentsInATenantsPoolsAreBounded) {
  std::vector<PagePool::Want> many(limits::kMaxPageReferences);
  EXPECT_EQ(pools_.Admit(kEngine, kTenant, Lease(1), pool_, many, 0).status().code(),
            absl::StatusCode::kResourceExhausted);
  many.pop_back();
  const auto answer = pools_.Admit(kEngine, kTenant, Lease(1), pool_, many, 0);
  ASSERT_TRUE(answer.ok()) << answer.status();
  const auto second = *pools_.Open(kTenant, kRegion + 1, 10);
  EXPECT_EQ(pools_.Admit(kEngine, kTenant, Lease(2), second, {}, 1).status().code(),
            absl::StatusCode::kResourceExhausted);
  const auto others = *pools_.Open(kTenant + 1, kRegion + 2, 10);
  EXPECT_TRUE(pools_.Admit(kWorker, kTenant + 1, Lease(3), others, {}, 1).ok());
  pools_.Release(kEngine, Lease(1));
  EXPECT_TRUE(pools_.Admit(kEngine, kTenant, Lease(2), second, {}, 1).ok());
}

TEST_F(PagePoolsTest, RegionHasOneActivePool) {
  ASSERT_NE(Admit(kEngine, 1, {}, 2), 0u);
  EXPECT_EQ(pools_.Open(kTenant, kRegion, 20).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(pools_.Open(kTenant, kRegion + 1, 20).ok());
  // The declaration ends, and the request continues.
  pool_ = nullptr;
  EXPECT_EQ(pools_.Open(kTenant, kRegion, 20).status().code(), absl::StatusCode::kResourceExhausted);
  pools_.Release(kEngine, Lease(1));
  const auto later = pools_.Open(kTenant, kRegion, 20);
  ASSERT_TRUE(later.ok()) << later.status();
  EXPECT_EQ(pools_.levels(kTenant).pages, 20u);
}

TEST_F(PagePoolsTest, PagesBeingWrittenKeepPool) {
  ASSERT_NE(Admit(kEngine, 1, {}, 2), 0u);
  const PageId page = pool_->OwnPages(pools_.Find(kEngine, Lease(1))->admission)[0];
  pool_->Pin({&page, 1});
  pools_.ReleaseAll(kEngine);
  EXPECT_EQ(pools_.Open(kTenant, kRegion, 20).status().code(), absl::StatusCode::kResourceExhausted);
  pool_->Unpin({&page, 1});
  EXPECT_TRUE(pools_.Open(kTenant, kRegion, 20).ok());
  // Its lease id is in use.
  EXPECT_EQ(pools_.Admit(kEngine, kTenant, Lease(1), pool_, {}, 1).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace ashlar::storage
