// SPDX-License-Identifier: Apache-2.0
#include "storage/tier/record_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <utility>
#include <vector>

#include "storage/testing/temporary_folder.h"

namespace {
std::atomic<int> syncs = 0;
}  // namespace

// RocksDB's calls are routed here too, because the program's symbols take precedence over the C library's.
extern "C" int fdatasync(int file) {
  ++syncs;
  return static_cast<int>(syscall(SYS_fdatasync, file));
}

namespace ashlar::storage {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::SizeIs;

using Records = std::vector<std::pair<std::string, std::string>>;

class RecordStoreTest : public ::testing::Test {
 protected:
  std::unique_ptr<RecordStore> Open() {
    auto store = OpenRecordStore(path_);
    EXPECT_TRUE(store.ok()) << store.status();
    return store.ok() ? *std::move(store) : nullptr;
  }
  static Records All(RecordStore& store) {
    Records records;
    EXPECT_EQ(store.Load([&](std::string_view name, std::string_view value) {
      records.emplace_back(name, value);
      return absl::OkStatus();
    }),
              absl::OkStatus());
    return records;
  }
  static absl::Status Put(RecordStore& store, const std::string& name, std::optional<std::string> value) {
    const RecordStore::Change change{name, std::move(value)};
    return store.Write({&change, 1});
  }

  TemporaryFolder folder_;
  const std::string path_ = folder_ / "index";
};

TEST_F(RecordStoreTest, LoadsRecordsInOrderOfNames) {
  auto store = Open();
  const std::string binary("\0\xff\n", 3);
  const std::vector<RecordStore::Change> batch = {
      {"b", "2"}, {"a", "1"}, {binary, binary}, {"a", std::nullopt}, {"c", ""}};
  ASSERT_EQ(store->Write(batch), absl::OkStatus());
  const Records expected = {{binary, binary}, {"b", "2"}, {"c", ""}};
  EXPECT_EQ(All(*store), expected);
  store.reset();
  store = Open();
  EXPECT_EQ(All(*store), expected);
  ASSERT_EQ(Put(*store, "never there", std::nullopt), absl::OkStatus());
  EXPECT_EQ(All(*store), expected);
}

// A killed process loses nothing that was written but not synced; a machine that loses power does.
TEST_F(RecordStoreTest, WritesAreSyncedBeforeTheyReturn) {
  const auto store = Open();
  for (const char* const name : {"a", "b"}) {
    const int before = syncs;
    ASSERT_EQ(Put(*store, name, "1"), absl::OkStatus());
    EXPECT_GT(syncs, before);
  }
}

TEST_F(RecordStoreTest, ANewFolderLogsNoError) {
  std::vector<std::string> lines;
  const auto store = OpenRecordStore(path_, [&](bool, std::string_view line) { lines.emplace_back(line); });
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_THAT(lines, IsEmpty());
}

TEST_F(RecordStoreTest, AnErrorOfTheVisitorEndsTheLoad) {
  auto store = Open();
  ASSERT_EQ(store->Write(std::vector<RecordStore::Change>{{"a", "1"}, {"b", "2"}}), absl::OkStatus());
  int visited = 0;
  EXPECT_EQ(store->Load([&](std::string_view, std::string_view) {
    ++visited;
    return absl::AbortedError("enough");
  }),
            absl::AbortedError("enough"));
  EXPECT_EQ(visited, 1);
}

TEST_F(RecordStoreTest, BelongsToOneAtATime) {
  auto store = Open();
  const absl::Status second = OpenRecordStore(path_).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kFailedPrecondition) << second;
  EXPECT_THAT(second.message(), HasSubstr(path_));
}

TEST_F(RecordStoreTest, DamageIsFoundAndNotServed) {
  {
    auto store = Open();
    std::vector<RecordStore::Change> batch;
    for (int i = 0; i < 2000; ++i)
      batch.push_back({"record " + std::to_string(i), std::string(1000, static_cast<char>(i))});
    for (int i = 0; i < 16; ++i) ASSERT_EQ(store->Write(batch), absl::OkStatus());  // more than stays in memory
  }
  Open().reset();  // moves the log's records into tables
  bool damaged = false;
  for (const auto& entry : std::filesystem::directory_iterator(path_)) {
    if (entry.path().extension() != ".sst" || entry.file_size() < 8192) continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(4000);
    file.write("damage", 6);
    damaged = true;
  }
  ASSERT_TRUE(damaged);
  absl::Status status;
  if (auto store = OpenRecordStore(path_); store.ok()) {
    status = (*store)->Load([](std::string_view, std::string_view) { return absl::OkStatus(); });
  } else {
    status = store.status();
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
}

// A limit on file sizes emulates a full disk.
TEST_F(RecordStoreTest, ContinuesAfterFailedWrite) {
  auto store = Open();
  ASSERT_EQ(Put(*store, "before", "1"), absl::OkStatus());
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit tight{64 * 1024, before.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &tight), 0);
  const absl::Status failed = Put(*store, "large", std::string(1 << 20, 'x'));
  const absl::Status still = Put(*store, "large", std::string(1 << 20, 'x'));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_FALSE(failed.ok());
  EXPECT_FALSE(still.ok());
  ASSERT_EQ(Put(*store, "after", "2"), absl::OkStatus());
  ASSERT_EQ(Put(*store, "large", std::nullopt), absl::OkStatus());
  const Records expected = {{"after", "2"}, {"before", "1"}};
  EXPECT_EQ(All(*store), expected);
  store.reset();
  store = Open();
  EXPECT_EQ(All(*store), expected);
}

}  // namespace
}  // namespace ashlar::storage
