#include "storage/tier/record_store.h"

#include <rocksdb/db.h>
#include <rocksdb/options.h>
#include <rocksdb/write_batch.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace ashlar::storage {
namespace {

absl::Status ToStatus(const std::string& path, const rocksdb::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const std::string message = absl::StrCat(path, ": ", status.ToString());
  if (status.IsCorruption()) return absl::DataLossError(message);
  if (status.IsNoSpace()) return absl::ResourceExhaustedError(message);
  // The lock of another process is an IO error to RocksDB, and has no code of its own.
  if (message.find("/LOCK") != std::string::npos) return absl::FailedPreconditionError(message);
  return absl::UnavailableError(message);
}

class RocksRecordStore final : public RecordStore {
 public:
  explicit RocksRecordStore(std::string path) : path_(std::move(path)) {}

  absl::Status Open() {
    rocksdb::Options options;
    options.create_if_missing = true;
    options.paranoid_checks = true;
    // A record is written once, read at the next start, deleted: memory that sorts more of them saves nothing.
    options.write_buffer_size = size_t{8} << 20;
    options.max_total_wal_size = uint64_t{32} << 20;
    options.compression = rocksdb::kLZ4Compression;
    options.max_background_jobs = 2;
    options.max_open_files = 64;
    // Power may go while a record is on its way into the log: what lies behind the first torn one was never
    // acknowledged.
    options.wal_recovery_mode = rocksdb::WALRecoveryMode::kPointInTimeRecovery;
    options.info_log_level = rocksdb::InfoLogLevel::WARN_LEVEL;
    options.keep_log_file_num = 2;
    rocksdb::DB* database = nullptr;
    const rocksdb::Status status = rocksdb::DB::Open(options, path_, &database);
    database_.reset(database);
    return ToStatus(path_, status);
  }

  absl::Status Load(absl::FunctionRef<absl::Status(std::string_view, std::string_view)> visit) override {
    if (absl::Status status = Reopen(); !status.ok()) return status;
    rocksdb::ReadOptions options;
    options.verify_checksums = true;
    options.fill_cache = false;
    const std::unique_ptr<rocksdb::Iterator> records(database_->NewIterator(options));
    for (records->SeekToFirst(); records->Valid(); records->Next()) {
      const rocksdb::Slice name = records->key(), value = records->value();
      if (absl::Status status = visit({name.data(), name.size()}, {value.data(), value.size()}); !status.ok()) {
        return status;
      }
    }
    return ToStatus(path_, records->status());
  }

  absl::Status Write(std::span<const Change> batch) override {
    if (absl::Status status = Reopen(); !status.ok()) return status;
    rocksdb::WriteBatch changes;
    for (const Change& change : batch) {
      const rocksdb::Status added =
          change.value.has_value() ? changes.Put(change.name, *change.value) : changes.Delete(change.name);
      if (!added.ok()) return ToStatus(path_, added);
    }
    rocksdb::WriteOptions options;
    options.sync = true;
    const rocksdb::Status written = database_->Write(options, &changes);
    if (!written.ok()) database_.reset();
    return ToStatus(path_, written);
  }

 private:
  // After an error RocksDB refuses all writes, and what its log holds is not what it remembers. A new start reads what
  // is there.
  absl::Status Reopen() { return database_ == nullptr ? Open() : absl::OkStatus(); }

  const std::string path_;
  std::unique_ptr<rocksdb::DB> database_;  // none after a write that failed
};

}  // namespace

absl::StatusOr<std::unique_ptr<RecordStore>> OpenRecordStore(const std::string& path) {
  auto store = std::make_unique<RocksRecordStore>(path);
  if (absl::Status status = store->Open(); !status.ok()) return status;
  return store;
}

}  // namespace ashlar::storage
