// SPDX-License-Identifier: Apache-2.0
#include "daemon/session/unread_descriptors.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cstddef>
#include <cstdlib>

#include "daemon/runtime/unix_socket.h"
#include "daemon/testing/node.h"

namespace ashlar::daemon {
namespace {

constexpr storage::TenantId kTenant = 3, kOther = 4;

// A connection that was sent one descriptor.
struct Sent {
  Sent(UnreadDescriptors& unread, UnreadDescriptors::Receiver receiver, storage::TenantId tenant) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) std::abort();
    ours = UniqueFd(ends[0]);
    theirs = UniqueFd(ends[1]);
    const UniqueFd sent(open("/dev/null", O_RDONLY | O_CLOEXEC));
    EXPECT_TRUE(Send(ours.get(), "with a descriptor", sent.get()).ok());
    unread.Sent(receiver, tenant, ours.get());
  }
  UniqueFd ours, theirs;
};

TEST(UnreadDescriptors, AreCountedUntilRead) {
  UnreadDescriptors unread;
  EXPECT_FALSE(unread.Holds(1));
  const Sent sent(unread, 1, kTenant);
  EXPECT_TRUE(unread.Holds(1));
  char byte;
  EXPECT_EQ(recv(sent.theirs.get(), &byte, 1, MSG_PEEK), 1);
  EXPECT_TRUE(unread.Holds(1)) << "only looked at";
  EXPECT_TRUE(Receive(sent.theirs.get()).ok());
  EXPECT_FALSE(unread.Holds(1));
}

TEST(UnreadDescriptors, AreBoundedPerTenant) {
  UnreadDescriptors unread;
  const Sent first(unread, 1, kTenant), second(unread, 2, kTenant), other(unread, 3, kOther);
  EXPECT_TRUE(unread.MaySend(kTenant, 3).ok());
  const absl::Status refused = unread.MaySend(kTenant, 2);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(unread.MaySend(kOther, 2).ok());
  EXPECT_TRUE(Receive(first.theirs.get()).ok());
  EXPECT_TRUE(unread.MaySend(kTenant, 2).ok());
}

// A session's end does not take back the descriptors it was sent, because another process may hold its socket.
TEST(UnreadDescriptors, CountForEndedSessionUntilSocketIsClosed) {
  const size_t before = OpenDescriptors();
  {
    UnreadDescriptors unread;
    Sent sent(unread, 1, kTenant), read(unread, 2, kTenant);
    EXPECT_TRUE(Receive(read.theirs.get()).ok());
    const size_t open = OpenDescriptors();
    unread.Ended(2, std::move(read.ours));
    EXPECT_EQ(OpenDescriptors(), open - 1) << "nothing to keep it for";
    shutdown(sent.ours.get(), SHUT_RDWR);
    unread.Ended(1, std::move(sent.ours));
    EXPECT_EQ(OpenDescriptors(), open - 1);
    EXPECT_FALSE(unread.MaySend(kTenant, 1).ok());
    sent.theirs.Reset();
    EXPECT_TRUE(unread.MaySend(kTenant, 1).ok());
    EXPECT_EQ(OpenDescriptors(), open - 3);
  }
  EXPECT_EQ(OpenDescriptors(), before);
}

}  // namespace
}  // namespace ashlar::daemon
