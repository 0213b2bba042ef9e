// SPDX-License-Identifier: Apache-2.0
// Statistics of a transport's peers, including peers that have left.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "daemon/peer/transport/testing/held_bytes.h"
#include "daemon/peer/transport/testing/reading.h"
#include "daemon/peer/transport/transport.h"
#include "kernels/mutex.h"

namespace ashlar::daemon {
namespace {

class TransportPeersTest : public testing::Test {
 protected:
  absl::Status Fetch(const Grant& grant, uint64_t offset, Spans targets) {
    Outcome outcome;
    asker_->Fetch(holder_->address(), grant, offset, std::move(targets), 0, outcome.done());
    return outcome.Wait();
  }

  std::unique_ptr<Transport> holder_ = *Transport::Start({}), asker_ = *Transport::Start({});
};

TEST_F(TransportPeersTest, BytesOfEndedConnectionsStayCounted) {
  std::vector<std::byte> there(50'000, std::byte{7}), here(50'000);
  const Grant read = holder_->Allow(there.size(), std::make_shared<HeldBytes>(Spans{there}));
  ASSERT_TRUE(Fetch(read, 0, {here}).ok());
  const uint64_t sent = holder_->stats().bytes_sent;
  EXPECT_GE(sent, there.size());
  EXPECT_GE(asker_->stats().bytes_received, there.size());
  asker_.reset();
  WaitFor([&] { return holder_->stats().peers.empty(); });
  EXPECT_GE(holder_->stats().bytes_sent, sent);
}

// A daemon that restarts right after it was killed finds its port in use for a moment.
TEST_F(TransportPeersTest, WaitsForAPortThatIsBeingReleased) {
  const HostPort at = holder_->address();
  std::thread release([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    holder_ = nullptr;
  });
  const auto started = Transport::Start({.listen = at});
  release.join();
  EXPECT_EQ(started.status(), absl::OkStatus());
}

// If the limit is the bytes in flight of all peers together.
TEST_F(TransportPeersTest, PeersTakeTurnsEvenIfOneRequestFits) {
  const auto second = *Transport::Start({});
  const auto asker = *Transport::Start({.bytes_in_flight = 4000});
  std::vector<std::byte> there(4000, std::byte{7});
  std::vector<std::vector<std::byte>> here(8, std::vector<std::byte>(4000));
  const auto held = std::make_shared<HeldBytes>(Spans{there}, HeldBytes::How::kLater);
  std::vector<Outcome> outcomes(8);
  struct {
    Mutex mutex;
    std::string order ABSL_GUARDED_BY(mutex);
  } ended;
  std::vector<Transport*> holders = {holder_.get(), second.get()};
  for (size_t i = 0; i < outcomes.size(); ++i) {  // four of each
    Transport& holder = *holders[i / 4];
    const Grant read = holder.Allow(there.size(), held);
    asker->Fetch(holder.address(), read, 0, {here[i]}, 0,
                 [&, i, done = outcomes[i].done()](const absl::Status& status) {
                   {
                     MutexLock lock(ended.mutex);
                     ended.order += i < 4 ? 'a' : 'b';
                   }
                   done(status);
                 });
  }
  // The first one is in flight, and all others wait.
  WaitFor([&] {
    size_t waiting = 0;
    for (const PeerStats& peer : asker->stats().peers) waiting += peer.waiting;
    return waiting == outcomes.size() - 1;
  });
  for (size_t i = 0; i < outcomes.size(); ++i) {
    held->WaitUntilAsked(i + 1);
    held->Answer();
  }
  for (Outcome& each : outcomes) EXPECT_TRUE(each.Wait().ok());
  MutexLock lock(ended.mutex);
  EXPECT_TRUE(ended.order == "abababab" || ended.order == "babababa") << ended.order;
}

TEST_F(TransportPeersTest, DepartedPeersAreErased) {
  std::vector<std::byte> there(5000, std::byte{7}), here(5000);
  const Grant read = holder_->Allow(there.size(), std::make_shared<HeldBytes>(Spans{there}));
  ASSERT_TRUE(Fetch(read, 0, {here}).ok());
  const uint64_t received = asker_->stats().bytes_received;
  asker_->KeepPeers({holder_->address()});
  EXPECT_EQ(asker_->stats().peers.size(), 1u);
  asker_->KeepPeers({});
  EXPECT_TRUE(asker_->stats().peers.empty());
  EXPECT_GE(asker_->stats().bytes_received, received);
  WaitFor([&] { return holder_->stats().peers.empty(); });  // the connection has ended, too
  EXPECT_TRUE(Fetch(read, 0, {here}).ok()) << "it may come back";
  EXPECT_EQ(here, there);
}

TEST_F(TransportPeersTest, APeerWithARequestInFlightIsNotErased) {
  // A holder that does not answer.
  struct Silent final : GrantedBytes {
    void Resolve(uint64_t, uint64_t, std::function<void(absl::StatusOr<Spans>)> answer) override { kept = answer; }
    std::function<void(absl::StatusOr<Spans>)> kept;
  };
  std::vector<std::byte> here(5000);
  const Grant read = holder_->Allow(here.size(), std::make_shared<Silent>());
  Outcome outcome;
  const uint64_t request = asker_->Fetch(holder_->address(), read, 0, {here}, 0, outcome.done());
  WaitFor([&] { return holder_->stats().transfers == 1; });
  asker_->KeepPeers({});
  EXPECT_EQ(asker_->stats().peers.size(), 1u);
  asker_->Cancel(request);
  EXPECT_EQ(outcome.Wait().code(), absl::StatusCode::kCancelled);
  asker_->KeepPeers({});
  EXPECT_TRUE(asker_->stats().peers.empty());
}

}  // namespace
}  // namespace ashlar::daemon
