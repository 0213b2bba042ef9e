// SPDX-License-Identifier: Apache-2.0
// Cache events: bounded queues for each subscriber, and messages over ZeroMQ in the form that routers read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>
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
constexpr NamespaceId kTextNs{};

ObjectHeader HeaderOf(uint8_t key, ObjectKind kind = ObjectKind::kPrefixBlock) {
  ObjectHeader header;
  header.kind = kind;
  header.key.bytes[0] = key;
  header.ns.bytes[0] = 7;
  header.tokens = kBlock;
  header.bytes = 1000;
  return header;
}
void Report(EventHub& hub, const ObjectHeader& header, TierKind was, TierKind now, storage::TenantId tenant = 0) {
  hub.Resides({tenant, storage::PoolKind::kPublic}, header, {.nearest = now, .was = was});
}

TEST(EventHub, PublishesStoreMoveAndRemove) {
  EventHub hub;
  const auto all = hub.Subscribe({});
  Report(hub, HeaderOf(1), TierKind::kNone, TierKind::kDram);
  Report(hub, HeaderOf(1), TierKind::kDram, TierKind::kDram);  // only used again
  Report(hub, HeaderOf(1), TierKind::kDram, TierKind::kSsd);
  Report(hub, HeaderOf(1), TierKind::kSsd, TierKind::kNone);
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
  Report(hub, HeaderOf(1), TierKind::kNone, TierKind::kDram, 0);
  Report(hub, HeaderOf(2), TierKind::kNone, TierKind::kDram, 1);
  const std::vector<CacheEvent> events = tenant->Take(10, kNow);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].key.bytes[0], 2);
  EXPECT_TRUE(ns->Take(10, kNow).empty());
}

TEST(EventHub, ASlowSubscriberGetsAGapAndDelaysNoOther) {
  EventHub hub;
  const auto slow = hub.Subscribe({}, 2), other = hub.Subscribe({});
  for (uint8_t i = 1; i <= 5; ++i) Report(hub, HeaderOf(i), TierKind::kNone, TierKind::kDram);
  EXPECT_EQ(other->Take(10, kNow).size(), 5u);
  std::vector<CacheEvent> events = slow->Take(10, kNow);
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[2].kind, Kind::kGap);
  EXPECT_EQ(events[2].lost, 3u);
  EXPECT_EQ(events[2].sequence, 5u);
  Report(hub, HeaderOf(6), TierKind::kNone, TierKind::kDram);
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
  KvEventsTest() : tokens_(3 * kBlock + 5), keys_(NamespaceId{}, kBlock, Fill(tokens_)) {
    texts_.Note(0, kTextNs, keys_);
  }
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
  RefusedConnections refused_;
  const std::shared_ptr<EventHub::Subscription> events_ = hub_.Subscribe({}, 8);
};

TEST_F(KvEventsTest, BlocksAreEncodedWithTheirTokensAndParents) {
  Report(hub_, Block(0), TierKind::kNone, TierKind::kDram);
  Report(hub_, Block(1), TierKind::kNone, TierKind::kDram);
  Report(hub_, Block(1), TierKind::kDram, TierKind::kSsd);
  Report(hub_, Block(0), TierKind::kDram, TierKind::kNone);
  Report(hub_, HeaderOf(9, ObjectKind::kSegment), TierKind::kNone, TierKind::kDram);
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

TEST_F(KvEventsTest, SendsOnlyPrefixBlocks) {
  Report(hub_, HeaderOf(9, ObjectKind::kSegment), TierKind::kNone, TierKind::kDram);
  hub_.Resides({0, storage::PoolKind::kPrivate}, Block(0), {.nearest = TierKind::kDram, .was = TierKind::kNone});
  EXPECT_EQ(EncodeKvEvents(events_->Take(100, kNow), texts_, 1), "");
}

TEST_F(KvEventsTest, SendsSegmentsIfAskedTo) {
  texts_.KeepSegments();
  const ObjectHeader segment = HeaderOf(9, ObjectKind::kSegment);
  texts_.NoteSegment(0, kTextNs, segment.key, {5, 6, 7});
  Report(hub_, segment, TierKind::kNone, TierKind::kDram);
  Report(hub_, segment, TierKind::kDram, TierKind::kNone);
  texts_.Erase(0, std::nullopt);
  Report(hub_, segment, TierKind::kNone, TierKind::kSsd);
  const Json events = Json::from_msgpack(EncodeKvEvents(events_->Take(100, kNow), texts_, 1))[1];
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0]["type"], "SegmentStored");
  EXPECT_EQ(events[0]["block_hashes"], Json::array({Hash(segment.key)}));
  EXPECT_EQ(events[0]["block_size"], segment.tokens);
  EXPECT_EQ(events[0]["medium"], "CPU");
  EXPECT_EQ(events[1]["type"], "SegmentRemoved");
  EXPECT_EQ(events[2]["medium"], "STORAGE");
  EXPECT_EQ(events[2]["token_ids"], Json::array());  // erased
}

TEST_F(KvEventsTest, ATextIsNotedAsASegmentOnlyIfTheyAreSent) {
  const Key key = HeaderOf(9, ObjectKind::kSegment).key;
  texts_.NoteSegment(0, kTextNs, key, {5, 6, 7});
  EXPECT_FALSE(texts_.Find(0, key).has_value());
  texts_.KeepSegments();
  texts_.NoteSegment(0, kTextNs, key, {5, 6, 7});
  EXPECT_EQ(texts_.Find(0, key)->tokens, (std::vector<int32_t>{5, 6, 7}));
}

TEST_F(KvEventsTest, AGapClearsKnownBlocks) {
  for (int i = 0; i < 20; ++i) {
    Report(hub_, Block(0), TierKind::kNone, TierKind::kDram);
    Report(hub_, Block(0), TierKind::kDram, TierKind::kNone);
  }
  const Json batch = Json::from_msgpack(EncodeKvEvents(events_->Take(100, kNow), texts_, 1));
  EXPECT_EQ(batch[1].back()["type"], "AllBlocksCleared");
}

TEST_F(KvEventsTest, RemembersTheLatestTexts) {
  BlockTexts few(2 * kBlock);
  few.Note(0, kTextNs, keys_);
  EXPECT_FALSE(few.Find(0, keys_.blocks()[0]).has_value());
  ASSERT_TRUE(few.Find(0, keys_.blocks()[2]).has_value());
  EXPECT_EQ(few.Find(0, keys_.blocks()[2])->before, keys_.blocks()[1]);
  EXPECT_EQ(texts_.Find(0, keys_.blocks()[0])->before, std::nullopt);
}

// A ZeroMQ socket that waits for this long at most.
class Reader {
 public:
  // `most`: messages that it receives before they are read; 0: no limit.
  Reader(void* context, int type, const std::string& address, int most = 1000) : socket_(zmq_socket(context, type)) {
    zmq_setsockopt(socket_, ZMQ_RCVHWM, &most, sizeof most);
    const int patience = 10'000, now = 0;
    zmq_setsockopt(socket_, ZMQ_RCVTIMEO, &patience, sizeof patience);
    zmq_setsockopt(socket_, ZMQ_LINGER, &now, sizeof now);
    if (type == ZMQ_SUB) zmq_setsockopt(socket_, ZMQ_SUBSCRIBE, "", 0);
    zmq_connect(socket_, address.c_str());
  }
  ~Reader() { zmq_close(socket_); }
  void Send(const std::string& frame) { zmq_send(socket_, frame.data(), frame.size(), 0); }
  void Ask(const std::string& number) {  // like a DEALER socket
    zmq_send(socket_, "", 0, ZMQ_SNDMORE);
    Send(number);
  }
  void SetPatience(int milliseconds) { zmq_setsockopt(socket_, ZMQ_RCVTIMEO, &milliseconds, sizeof milliseconds); }
  std::vector<std::string> Message() {
    std::vector<std::string> frames;
    for (int more = 1; more != 0;) {
      std::string frame(1 << 20, '\0');
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

TEST_F(KvEventsTest, SubscribersReceiveBlocksAndRequestMissedOnes) {
  auto publisher = ZmqPublisher::Start(
      {.address = "tcp://127.0.0.1:*", .replay_address = "tcp://127.0.0.1:*", .topic = "kv"}, hub_, texts_, refused_);
  ASSERT_TRUE(publisher.ok()) << publisher.status();
  // Before any subscriber exists.
  Report(hub_, Block(0), TierKind::kNone, TierKind::kDram);
  while ((*publisher)->batches() < 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  void* const context = zmq_ctx_new();
  {
    // A REQ socket sends an empty frame, then the number.
    Reader asking(context, ZMQ_REQ, (*publisher)->replay_address());
    asking.Send(Big(0));
    const std::vector<std::string> first = asking.Message();
    ASSERT_EQ(first.size(), 3u);
    EXPECT_EQ(first[0], "kv");
    EXPECT_EQ(first[1], Big(0));
    EXPECT_EQ(Json::from_msgpack(first[2])[1][0]["type"], "BlockStored");
    Reader subscriber(context, ZMQ_SUB, (*publisher)->address());
    std::vector<std::string> message;
    std::thread teller([&] {  // until the subscription has arrived
      for (int i = 0; i < 200; ++i) {
        Report(hub_, Block(1), TierKind::kNone, TierKind::kDram);
        Report(hub_, Block(1), TierKind::kDram, TierKind::kNone);
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

uint64_t NumberOf(const std::string& big) {
  uint64_t number = 0;
  for (const char byte : big) number = number << 8 | static_cast<uint8_t>(byte);
  return number;
}

TEST_F(KvEventsTest, ErasedTextsAreThoseOfOneTenantOrNamespace) {
  NamespaceId other;
  other.bytes[0] = 1;
  std::vector<int32_t> tokens(kBlock, 5);
  const PrefixKeys others(other, kBlock, tokens);
  texts_.Note(0, other, others);
  texts_.Note(1, kTextNs, keys_);
  const Key &block = keys_.blocks()[0], &others_block = others.blocks()[0];
  texts_.Erase(0, kTextNs);
  EXPECT_FALSE(texts_.Find(0, block).has_value());
  EXPECT_TRUE(texts_.Find(0, others_block).has_value());
  EXPECT_TRUE(texts_.Find(1, block).has_value());
  texts_.Erase(0, std::nullopt);
  EXPECT_FALSE(texts_.Find(0, others_block).has_value());
  EXPECT_TRUE(texts_.Find(1, block).has_value());
  EXPECT_EQ(texts_.erasures(), 2u);
}

TEST_F(KvEventsTest, BatchesAreBounded) {
  std::vector<CacheEvent> events;
  std::vector<int32_t> tokens(4096);
  std::iota(tokens.begin(), tokens.end(), 1 << 24);  // 5 bytes each
  const PrefixKeys keys(kTextNs, 64, tokens);
  texts_.Note(0, kTextNs, keys);
  for (const Key& key : keys.blocks()) {
    for (const Kind kind : {Kind::kTier, Kind::kStored, Kind::kRemoved}) {
      events.push_back({.kind = kind,
                        .key = key,
                        .object = ObjectKind::kPrefixBlock,
                        .tier = TierKind::kSsd,
                        .was = TierKind::kSsd,
                        .tokens = 64});
    }
  }
  ASSERT_LT(CountForABatch(events), events.size());
  for (std::span<const CacheEvent> rest = events; !rest.empty();) {
    const size_t count = CountForABatch(rest);
    ASSERT_GT(count, 0u);
    EXPECT_LE(EncodeKvEvents(rest.first(count), texts_, 1).size(), kMostBatchBytes);
    rest = rest.subspan(count);
  }
  std::vector<CacheEvent> removed(500, events[2]);
  EXPECT_GT(CountForABatch(removed), 400u);
  for (CacheEvent& event : removed) EXPECT_LE(EncodeKvEvents({&event, 1}, texts_, 1).size(), 128u);
}

// A publisher with batches of the largest size, and sockets connected to it.
class LargeKvEventsTest : public KvEventsTest {
 protected:
  static constexpr size_t kMostBytes = size_t{4} << 20, kBatches = 400;  // 16 MiB

  void SetUp() override {
    std::vector<int32_t> tokens(kMostEventTokens);
    std::iota(tokens.begin(), tokens.end(), 1 << 24);  // 5 bytes each
    const PrefixKeys keys(kTextNs, kMostEventTokens, tokens);
    texts_.Note(0, kTextNs, keys);
    large_ = Block(0);
    large_.key = keys.blocks()[0];
    large_.tokens = kMostEventTokens;
    const std::string place = "ipc://" + testing::TempDir() + "/events-" + std::to_string(getpid());
    auto publisher = ZmqPublisher::Start(
        {.address = place, .replay_address = place + "-replay", .topic = "kv", .most_bytes = kMostBytes}, hub_, texts_,
        refused_);
    ASSERT_TRUE(publisher.ok()) << publisher.status();
    publisher_ = *std::move(publisher);
  }
  void TellLarge(size_t batches) {
    for (size_t i = 0; i < batches; ++i) Report(hub_, large_, TierKind::kNone, TierKind::kDram);
    told_ += batches;
    while (publisher_->batches() < told_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  // Repeats until the subscription has arrived.
  std::vector<std::string> TellUntilHeard(Reader& subscriber) {
    subscriber.SetPatience(20);
    std::vector<std::string> message;
    while (message.empty()) {
      TellLarge(1);
      message = subscriber.Message();
    }
    subscriber.SetPatience(10'000);
    return message;
  }

  ObjectHeader large_;
  uint64_t told_ = 0;
  std::unique_ptr<ZmqPublisher> publisher_;
  const std::unique_ptr<void, int (*)(void*)> context_{zmq_ctx_new(), zmq_ctx_term};
};

TEST_F(LargeKvEventsTest, KeptAndQueuedBytesAreBounded) {
  Reader subscriber(context_.get(), ZMQ_SUB, publisher_->address(), 1);
  EXPECT_LE(TellUntilHeard(subscriber).back().size(), kMostBatchBytes);
  TellLarge(kBatches);
  // It starts to read now: it receives the queued messages, and nothing else.
  subscriber.SetPatience(500);
  size_t waited = 0;
  for (auto message = subscriber.Message(); !message.empty(); message = subscriber.Message()) {
    waited += message.back().size();
  }
  EXPECT_GT(waited, 0u);
  EXPECT_LE(waited, kMostBytes + (size_t{1} << 20)) << "and what the kernel has of it";
  Reader asking(context_.get(), ZMQ_DEALER, publisher_->replay_address());
  asking.Ask(Big(0));
  size_t kept = 0;
  uint64_t last = 0;
  for (auto message = asking.Message(); message.size() == 4; message = asking.Message()) {
    if (message[2] == Big(UINT64_MAX)) break;
    kept += message.back().size();
    last = NumberOf(message[2]);
  }
  EXPECT_EQ(last + 1, publisher_->batches());
  EXPECT_LE(kept, kMostBytes);
  EXPECT_GT(kept, kMostBytes - 2 * kMostBatchBytes);
}

TEST_F(LargeKvEventsTest, AnUnreadReplayDoesNotDelayOthers) {
  Reader subscriber(context_.get(), ZMQ_SUB, publisher_->address());
  TellLarge(100);
  Reader lazy(context_.get(), ZMQ_DEALER, publisher_->replay_address(), 1);
  for (int i = 0; i < 64; ++i) lazy.Ask(Big(0));
  uint64_t next = NumberOf(TellUntilHeard(subscriber)[1]) + 1;
  for (int i = 0; i < 20; ++i) {
    TellLarge(1);
    const std::vector<std::string> message = subscriber.Message();
    ASSERT_EQ(message.size(), 3u);
    EXPECT_EQ(NumberOf(message[1]), next++) << "nothing is lost meanwhile";
    EXPECT_EQ(Json::from_msgpack(message[2])[1][0]["type"], "BlockStored");
  }
  Reader diligent(context_.get(), ZMQ_DEALER, publisher_->replay_address());
  diligent.Ask(Big(0));
  std::vector<std::string> message;
  do message = diligent.Message();
  while (message.size() == 4 && message[2] != Big(UINT64_MAX));
  EXPECT_EQ(message.size(), 4u) << "another one gets all of its own";
  lazy.SetPatience(500);
  size_t waited = 0;
  for (message = lazy.Message(); !message.empty(); message = lazy.Message()) waited += message.back().size();
  EXPECT_LE(waited, 2 * kMostBytes + (size_t{1} << 20)) << "not 64 times what is kept";
}

TEST_F(LargeKvEventsTest, AReplayHasNothingFromBeforeAnErasure) {
  TellLarge(3);
  texts_.Erase(0, std::nullopt);
  Reader asking(context_.get(), ZMQ_DEALER, publisher_->replay_address());
  asking.Ask(Big(0));
  EXPECT_EQ(asking.Message().at(2), Big(UINT64_MAX));
  TellLarge(1);  // published without its tokens afterwards
  asking.Ask(Big(0));
  const std::vector<std::string> first = asking.Message();
  ASSERT_EQ(first.size(), 4u);
  EXPECT_EQ(first[2], Big(3)) << "numbers go on";
  EXPECT_TRUE(Json::from_msgpack(first[3])[1][0]["token_ids"].empty());
}

TEST_F(KvEventsTest, AnAddressThatIsTakenIsRefused) {
  auto first = ZmqPublisher::Start({.address = "tcp://127.0.0.1:*"}, hub_, texts_, refused_);
  ASSERT_TRUE(first.ok());
  const auto second = ZmqPublisher::Start({.address = (*first)->address()}, hub_, texts_, refused_);
  EXPECT_TRUE(absl::IsUnavailable(second.status())) << second.status();
}

}  // namespace
}  // namespace ashlar::daemon
