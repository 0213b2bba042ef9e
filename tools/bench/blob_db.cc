// SPDX-License-Identifier: Apache-2.0
// RocksDB with values in blob files, an alternative to the SSD tier, for comparison.
#include <rocksdb/db.h>
#include <rocksdb/options.h>

#include <cstring>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "tools/bench/disk_engine.h"
#include "tools/bench/disk_workers.h"

namespace ashlar::bench {
namespace {

absl::Status ToStatus(const rocksdb::Status& status) {
  return status.ok() ? absl::OkStatus() : absl::InternalError(absl::StrCat("blobdb: ", status.ToString()));
}

class BlobDb final : public DiskEngine {
 public:
  explicit BlobDb(std::string folder) : folder_(std::move(folder)) {}

  absl::Status Fill(size_t values, uint64_t value_bytes) override {
    database_.reset();
    buffers_.clear();
    value_bytes_ = value_bytes;
    rocksdb::Options options;
    options.create_if_missing = true;
    options.enable_blob_files = true;
    options.min_blob_size = 4096;
    // Bypasses the page cache, like the other stores: a round fits in memory, and would be read from the cache.
    options.use_direct_reads = true;
    options.use_direct_io_for_flush_and_compaction = true;
    options.max_background_jobs = 4;
    if (absl::Status status = ToStatus(rocksdb::DestroyDB(folder_, options)); !status.ok()) return status;
    rocksdb::DB* database = nullptr;
    if (absl::Status status = ToStatus(rocksdb::DB::Open(options, folder_, &database)); !status.ok()) return status;
    database_.reset(database);
    std::vector<uint32_t> all(values);
    std::iota(all.begin(), all.end(), 0);
    return Write(all, 4);
  }

  // Waits until the values are in blob files: values that are only in the log must still be written once more.
  absl::Status Write(const std::vector<uint32_t>& order, int depth) override {
    Reserve(depth);
    rocksdb::WriteOptions options;
    options.sync = true;
    const absl::Status status = ForEach(order, depth, [&](uint32_t number, int thread) {
      const char* value = reinterpret_cast<const char*>(buffers_[thread].data());
      return ToStatus(database_->Put(options, std::to_string(number), {value, value_bytes_}));
    });
    return status.ok() ? ToStatus(database_->Flush(rocksdb::FlushOptions())) : status;
  }

  absl::Status Read(const std::vector<uint32_t>& order, int depth) override {
    Reserve(depth);
    return ForEach(order, depth, [&](uint32_t number, int thread) {
      rocksdb::PinnableSlice value;
      const auto column = database_->DefaultColumnFamily();
      if (auto got = database_->Get({}, column, std::to_string(number), &value); !got.ok()) return ToStatus(got);
      std::memcpy(buffers_[thread].data(), value.data(), value.size());
      return absl::OkStatus();
    });
  }

 private:
  void Reserve(int depth) {
    while (buffers_.size() < static_cast<size_t>(depth)) buffers_.emplace_back(value_bytes_);
  }

  const std::string folder_;
  std::unique_ptr<rocksdb::DB> database_;
  uint64_t value_bytes_ = 0;
  std::vector<PageBuffer> buffers_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<DiskEngine>> OpenBlobDb(const std::string& folder, uint64_t) {
  return std::make_unique<BlobDb>(folder + "/blobdb");
}

}  // namespace ashlar::bench
