// Events of the cache: bounded for each subscriber, and over ZeroMQ in the form that routers follow.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zmq.h>

#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "daemon/events/block_texts.h"
#include "daemon/events/event_hub.h"
#include "daemon/events/kv_events.h"
#include "daemon/events/zmq_publisher.h"
#include "proto/prefix.h"

namespace ashlar::daemon {
namespace {

using Kind = CacheEvent::Kind;
using Json = nlohmann::json;
constexpr storage::Nanos kNow = 1'000'000, kPatience = 10'000'000'000;
constexpr uint32_t kBlock = 16;

ObjectHeader HeaderOf(uint8_t key, ObjectKind kind = ObjectKind::kPrefixBlock) {
  ObjectHeader header;
  header.kind = kind;
  header.key.bytes[0] = key;
  header.ns.bytes[0] = 7;
  header.tokens = kBlock;
  header.bytes = 1000;
  return header;
}
void Tell(EventHub& hub, const ObjectHeader& header, TierKind was, TierKind now, storage::TenantId tenant = 0) {
  hub.Resides({tenant, storage::PoolKind::kPublic}, header, {.nearest = now, .was = was});
}

TEST(EventHub, TellsOfWhatComesMovesAndGoes) {
  EventHub hub;
  const auto all = hub.Subscribe({});
  Tell(hub, HeaderOf(1), TierKind::kNone, TierKind::kDram);
  Tell(hub, HeaderOf(1), TierKind::kDram, TierKind::kDram);  // only used again
  Tell(hub, HeaderOf(1), TierKind::kDram, TierKind::kSsd);
  Tell(hub, HeaderOf(1), TierKind::kSsd, TierKind::kNone);
  const std::vector<CacheEvent> events = all->Take(10, kNow);
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0].kind, Kind::kStored);
  EXPECT_EQ(events[1].kind, Kind::kTier);
  EXPECT_EQ(events[1].was, TierKind::kDram);
  EXPECT_EQ(events[2].kind, Kind::kRemoved);
  EXPECT_EQ(events[2].tier, TierKind::kSsd);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(events[i].sequence, i + 1);
  EXPECT_TRUE(all->Take(10, kNow).empty());
}

TEST(EventHub, FiltersByTenantAndNamespace) {
  EventHub hub;
  const auto tenant = hub.Subscribe({.tenant = 1, .ns = {}});
  const auto ns = hub.Subscribe({.tenant = {}, .ns = NamespaceId{}});
  Tell(hub, HeaderOf(1), TierKind::kNone, TierKind::kDram, 0);
  Tell(hub, HeaderOf(2), TierKind::kNone, TierKind::kDram, 1);
  const std::vector<CacheEvent> events = tenant->Take(10, kNow);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].key.bytes[0], 2);
  EXPECT_TRUE(ns->Take(10, kNow).empty());
}

TEST(EventHub, ASlowSubscriberHearsOfAGapAndNobodyWaits) {
  EventHub hub;
  const auto slow = hub.Subscribe({}, 2), other = hub.Subscribe({});
  for (uint8_t i = 1; i <= 5; ++i) Tell(hub, HeaderOf(i), TierKind::kNone, TierKind::kDram);
  EXPECT_EQ(other->Take(10, kNow).size(), 5u);
  std::vector<CacheEvent> events = slow->Take(10, kNow);
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[2].kind, Kind::kGap);
  EXPECT_EQ(events[2].lost, 3u);
  EXPECT_EQ(events[2].sequence, 5u);
  Tell(hub, HeaderOf(6), TierKind::kNone, TierKind::kDram);
  events = slow->Take(10, kNow);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].sequence, 6u);
}

TEST(EventHub, SubscribersAreBoundedAndEndWithTheirHolders) {
  EventHub hub;
  std::vector<std::shared_ptr<EventHub::Subscription>> many;
  for (size_t i = 0; i < EventHub::kMostSubscribers; ++i) many.push_back(hub.Subscribe({}));
  EXPECT_EQ(hub.Subscribe({}), nullptr);
  many.pop_back();
  EXPECT_NE(hub.Subscribe({}), nullptr);
  EXPECT_EQ(hub.subscribers(), EventHub::kMostSubscribers - 1);
}

class KvEventsTest : public ::testing::Test {
 protected:
  KvEventsTest() : tokens_(3 * kBlock + 5), keys_(NamespaceId{}, kBlock, Fill(tokens_)) { texts_.Note(keys_); }
  static std::span<const int32_t> Fill(std::vector<int32_t>& tokens) {
    std::iota(tokens.begin(), tokens.end(), 100);
    return tokens;
  }
  ObjectHeader Block(size_t index) const {
    ObjectHeader header = HeaderOf(0);
    header.key = keys_.blocks()[index];
    header.first_token = index * kBlock;
    header.tokens = (index + 1) * kBlock;
    return header;
  }
  static Json Hash(const Key& key) { return Json::binary(std::vector<uint8_t>(key.bytes.begin(), key.bytes.end())); }

  std::vector<int32_t> tokens_;
  PrefixKeys keys_;
  BlockTexts texts_;
  EventHub hub_;
  const std::shared_ptr<EventHub::Subscription> events_ = hub_.Subscribe({}, 8);
};

TEST_F(KvEventsTest, BlocksAreEncodedWithTheirTokensAndParents) {
  Tell(hub_, Block(0), TierKind::kNone, TierKind::kDram);
  Tell(hub_, Block(1), TierKind::kNone, TierKind::kDram);
  Tell(hub_, Block(1), TierKind::kDram, TierKind::kSsd);
  Tell(hub_, Block(0), TierKind::kDram, TierKind::kNone);
  Tell(hub_, HeaderOf(9, ObjectKind::kSegment), TierKind::kNone, TierKind::kDram);
  const Json batch = Json::from_msgpack(EncodeKvEvents(events_->Take(100, kNow), texts_, 12.5));
  ASSERT_EQ(batch.size(), 3u);
  EXPECT_EQ(batch[0], 12.5);
  EXPECT_EQ(batch[2], 0);
  const Json& events = batch[1];
  ASSERT_EQ(events.size(), 5u);
  EXPECT_EQ(events[0]["type"], "BlockStored");
  EXPECT_EQ(events[0]["block_hashes"], Json::array({Hash(keys_.blocks()[0])}));
  EXPECT_EQ(events[0]["parent_block_hash"], nullptr);
  EXPECT_EQ(events[0]["token_ids"], std::vector<int32_t>(tokens_.begin(), tokens_.begin() + kBlock));
  EXPECT_EQ(events[0]["block_size"], kBlock);
  EXPECT_EQ(events[0]["medium"], "CPU");
  EXPECT_EQ(events[1]["parent_block_hash"], Hash(keys_.blocks()[0]));
  EXPECT_EQ(events[1]["block_size"], kBlock);
  EXPECT_EQ(events[2]["type"], "BlockRemoved");
  EXPECT_EQ(events[2]["medium"], "CPU");
  EXPECT_EQ(events[3]["type"], "BlockStored");
  EXPECT_EQ(events[3]["medium"], "STORAGE");
  EXPECT_EQ(events[4]["type"], "BlockRemoved");
}

TEST_F(KvEventsTest, NothingOfWhatRoutersDoNotFollowIsSent) {
  Tell(hub_, HeaderOf(9, ObjectKind::kSegment), TierKind::kNone, TierKind::kDram);
  hub_.Resides({0, storage::PoolKind::kPrivate}, Block(0), {.nearest = TierKind::kDram, .was = TierKind::kNone});
  EXPECT_EQ(EncodeKvEvents(events_->Take(100, kNow), texts_, 1), "");
}

TEST_F(KvEventsTest, AGapClearsWhatWasKnown) {
  for (int i = 0; i < 20; ++i) {
    Tell(hub_, Block(0), TierKind::kNone, TierKind::kDram);
    Tell(hub_, Block(0), TierKind::kDram, TierKind::kNone);
  }
  const Json batch = Json::from_msgpack(EncodeKvEvents(events_->Take(100, kNow), texts_, 1));
  EXPECT_EQ(batch[1].back()["type"], "AllBlocksCleared");
}

TEST_F(KvEventsTest, TheLatestTextsAreRemembered) {
  BlockTexts few(2 * kBlock);
  few.Note(keys_);
  EXPECT_FALSE(few.Find(keys_.blocks()[0]).has_value());
  ASSERT_TRUE(few.Find(keys_.blocks()[2]).has_value());
  EXPECT_EQ(few.Find(keys_.blocks()[2])->before, keys_.blocks()[1]);
  EXPECT_EQ(texts_.Find(keys_.blocks()[0])->before, std::nullopt);
}

// A ZeroMQ socket that waits for so long, and no longer.
class Reader {
 public:
  Reader(void* context, int type, const std::string& address) : socket_(zmq_socket(context, type)) {
    const int patience = 10'000, now = 0;
    zmq_setsockopt(socket_, ZMQ_RCVTIMEO, &patience, sizeof patience);
    zmq_setsockopt(socket_, ZMQ_LINGER, &now, sizeof now);
    if (type == ZMQ_SUB) zmq_setsockopt(socket_, ZMQ_SUBSCRIBE, "", 0);
    zmq_connect(socket_, address.c_str());
  }
  ~Reader() { zmq_close(socket_); }
  void Send(const std::string& frame) { zmq_send(socket_, frame.data(), frame.size(), 0); }
  std::vector<std::string> Message() {
    std::vector<std::string> frames;
    for (int more = 1; more != 0;) {
      std::string frame(65536, '\0');
      const int size = zmq_recv(socket_, frame.data(), frame.size(), 0);
      if (size < 0) return {};
      frame.resize(static_cast<size_t>(size));
      frames.push_back(std::move(frame));
      size_t length = sizeof more;
      zmq_getsockopt(socket_, ZMQ_RCVMORE, &more, &length);
    }
    return frames;
  }

 private:
  void* const socket_;
};

std::string Big(uint64_t number) {
  std::string bytes(8, '\0');
  for (size_t i = 0; i < 8; ++i) bytes[7 - i] = static_cast<char>(number >> (8 * i));
  return bytes;
}

TEST_F(KvEventsTest, SubscribersHearOfBlocksAndAskForWhatTheyMissed) {
  auto publisher = ZmqPublisher::Start(
      {.address = "tcp://127.0.0.1:*", .replay_address = "tcp://127.0.0.1:*", .topic = "kv"}, hub_, texts_);
  ASSERT_TRUE(publisher.ok()) << publisher.status();
  // Before anybody listens.
  Tell(hub_, Block(0), TierKind::kNone, TierKind::kDram);
  while ((*publisher)->batches() < 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  void* const context = zmq_ctx_new();
  {
    // As a REQ socket asks: an empty frame, then the number.
    Reader asking(context, ZMQ_REQ, (*publisher)->replay_address());
    asking.Send(Big(0));
    const std::vector<std::string> first = asking.Message();
    ASSERT_EQ(first.size(), 3u);
    EXPECT_EQ(first[0], "kv");
    EXPECT_EQ(first[1], Big(0));
    EXPECT_EQ(Json::from_msgpack(first[2])[1][0]["type"], "BlockStored");
    Reader subscriber(context, ZMQ_SUB, (*publisher)->address());
    std::vector<std::string> message;
    std::thread teller([&] {  // until the subscription has arrived there
      for (int i = 0; i < 200; ++i) {
        Tell(hub_, Block(1), TierKind::kNone, TierKind::kDram);
        Tell(hub_, Block(1), TierKind::kDram, TierKind::kNone);
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    });
    const std::vector<std::string> one = subscriber.Message(), two = subscriber.Message();
    teller.join();
    ASSERT_EQ(one.size(), 3u);
    ASSERT_EQ(two.size(), 3u);
    uint64_t number = 0;
    for (const char byte : one[1]) number = number << 8 | static_cast<uint8_t>(byte);
    EXPECT_EQ(two[1], Big(number + 1)) << "numbers follow one another";
  }
  zmq_ctx_term(context);
}

TEST_F(KvEventsTest, AnAddressThatIsTakenIsRefused) {
  auto first = ZmqPublisher::Start({.address = "tcp://127.0.0.1:*"}, hub_, texts_);
  ASSERT_TRUE(first.ok());
  const auto second = ZmqPublisher::Start({.address = (*first)->address()}, hub_, texts_);
  EXPECT_TRUE(absl::IsUnavailable(second.status())) << second.status();
}

}  // namespace
}  // namespace ashlar::daemon
