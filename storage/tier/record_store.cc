// SPDX-License-Identifier: Apache-2.0
#include "storage/tier/record_store.h"

#include <rocksdb/db.h>
#include <rocksdb/env.h>
#include <rocksdb/options.h>
#include <rocksdb/write_batch.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "storage/tier/disk_error.h"
#include "storage/tier/record_log.h"

namespace ashlar::storage {
namespace {

bool Says(absl::string_view message, int error) {
  return absl::StrContains(message, std::strerror(error));
}

// RocksDB has few codes: an unreadable file is reported as corruption, and another process's lock as an I/O error. The
// system's messages distinguish them.
absl::Status ToStatus(const std::string& path, const rocksdb::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const std::string message = absl::StrCat(path, ": ", status.ToString());
  if (status.IsNoSpace() || Says(message, ENOSPC) || Says(message, EDQUOT)) {
    return absl::ResourceExhaustedError(message);
  }
  if (Says(message, EIO) || Says(message, EROFS)) return absl::UnavailableError(message);
  if (absl::StrContains(message, "/LOCK")) return absl::FailedPreconditionError(message);
  if (status.IsCorruption() || Says(message, ENOENT)) return absl::DataLossError(message);
  return absl::UnavailableError(message);
}

// RocksDB's own log, without a file. By default RocksDB logs to a file beside the others. If a full disk refuses a
// line, it logs that refusal too, until an assertion of WritableFileWriter ends the process.
class Log final : public rocksdb::Logger {
 public:
  explicit Log(RecordLog log) : rocksdb::Logger(rocksdb::InfoLogLevel::WARN_LEVEL), log_(std::move(log)) {}

  using rocksdb::Logger::Logv;
  void Logv(const char* format, va_list arguments) override {
    Logv(rocksdb::InfoLogLevel::INFO_LEVEL, format, arguments);
  }
  void Logv(rocksdb::InfoLogLevel level, const char* format, va_list arguments) override {
    const bool worth = level >= GetInfoLogLevel() && level < rocksdb::InfoLogLevel::HEADER_LEVEL;
    if (log_ == nullptr || !worth) return;
    std::array<char, 1024> line;
    const int length = std::vsnprintf(line.data(), line.size(), format, arguments);
    if (length < 0) return;
    log_(level >= rocksdb::InfoLogLevel::ERROR_LEVEL,
         {line.data(), std::min(static_cast<size_t>(length), line.size() - 1)});
  }

 private:
  const RecordLog log_;
};

// Refuses a store with files but without CURRENT: RocksDB would create a new one in its place.
absl::Status CheckBegun(const std::string& path) {
  std::error_code error;
  if (std::filesystem::exists(path + "/CURRENT", error)) return absl::OkStatus();
  if (error) return DiskError(error.value(), path + "/CURRENT");
  // Without a range-based loop, which throws if the folder cannot be read.
  for (std::filesystem::directory_iterator entry(path, error), end; !error && entry != end; entry.increment(error)) {
    const std::string extension = entry->path().extension().string();
    if (extension == ".sst" || extension == ".log") {
      return absl::DataLossError(absl::StrCat(path, ": CURRENT is missing, but other files exist"));
    }
  }
  if (error && error.value() != ENOENT) return DiskError(error.value(), path);
  return absl::OkStatus();
}

class RocksRecordStore final : public RecordStore {
 public:
  RocksRecordStore(std::string path, RecordLog log)
      : path_(std::move(path)), log_(std::make_shared<Log>(std::move(log))) {}

  absl::Status Open() {
    // RocksDB would create the folder too, but logs an error first.
    std::error_code error;
    std::filesystem::create_directory(path_, error);
    if (error) return DiskError(error.value(), path_);
    if (absl::Status status = CheckBegun(path_); !status.ok()) return status;
    if (absl::Status status = Repair(); !status.ok()) return status;
    rocksdb::Options options;
    options.create_if_missing = true;
    options.paranoid_checks = true;
    // A record is written once, read at the next start, and deleted: a larger sorting buffer saves nothing.
    options.write_buffer_size = size_t{8} << 20;
    options.max_total_wal_size = uint64_t{32} << 20;
    options.compression = rocksdb::kLZ4Compression;
    options.max_background_jobs = 2;
    options.max_open_files = 64;
    // A power loss may cut the batch being written: such a batch was never acknowledged. Batches after damage were
    // acknowledged; Repair has rescued them, and the next log is read too. A lost deletion can restore an object whose
    // extents belong to another one by now: the later record wins these extents, and without one the checksums reveal
    // it.
    options.wal_recovery_mode = rocksdb::WALRecoveryMode::kSkipAnyCorruptedRecords;
    options.info_log = log_;
    // After an error only Reopen opens the store again.
    options.max_bgerror_resume_count = 0;
    options.stats_dump_period_sec = 0;
    options.stats_persist_period_sec = 0;
    options.max_file_opening_threads = 1;
    rocksdb::DB* database = nullptr;
    try {
      const rocksdb::Status status = rocksdb::DB::Open(options, path_, &database);
      database_.reset(database);
      return ToStatus(path_, status);
    } catch (const std::system_error& thrown) {  // RocksDB starts threads
      return absl::UnavailableError(absl::StrCat(path_, ": ", thrown.what()));
    }
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
  absl::Status Repair() {
    const absl::StatusOr<int> repaired = RepairRecordLogs(path_);
    if (!repaired.ok()) return repaired.status();
    if (*repaired > 0) rocksdb::Error(log_.get(), "%s: %d logs were damaged", path_.c_str(), *repaired);
    return absl::OkStatus();
  }

  // After an error RocksDB refuses all writes, and its log differs from its memory. A new start reads the log.
  absl::Status Reopen() { return database_ == nullptr ? Open() : absl::OkStatus(); }

  const std::string path_;
  const std::shared_ptr<Log> log_;
  std::unique_ptr<rocksdb::DB> database_;  // null after a failed write
};

}  // namespace

absl::StatusOr<std::unique_ptr<RecordStore>> OpenRecordStore(const std::string& path, RecordLog log) {
  auto store = std::make_unique<RocksRecordStore>(path, std::move(log));
  if (absl::Status status = store->Open(); !status.ok()) return status;
  return store;
}

}  // namespace ashlar::storage
