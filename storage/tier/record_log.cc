// SPDX-License-Identifier: Apache-2.0
#include "storage/tier/record_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "storage/tier/disk_error.h"

namespace ashlar::storage {
namespace {

namespace fs = std::filesystem;

constexpr size_t kBlock = 32768;
constexpr size_t kHeader = 7;  // checksum (u32), length (u16), type
enum Type : uint8_t { kPadding = 0, kFull = 1, kFirst = 2, kMiddle = 3, kLast = 4 };

// CRC32C of the type and the bytes after it, masked as in RocksDB.
uint32_t Checksum(std::string_view bytes) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> made{};
    for (uint32_t i = 0; i < made.size(); ++i) {
      uint32_t crc = i;
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0);
      made[i] = crc;
    }
    return made;
  }();
  uint32_t crc = ~0u;
  for (const char byte : bytes) crc = table[(crc ^ static_cast<uint8_t>(byte)) & 0xff] ^ (crc >> 8);
  crc = ~crc;
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

struct Fragment {
  Type type = kPadding;
  std::string_view bytes;
};

// Parses the fragment at the start of the rest of a block, if it is whole.
bool Parse(std::string_view rest, Fragment* fragment) {
  if (rest.size() < kHeader) return false;
  uint32_t checksum;
  uint16_t length;
  std::memcpy(&checksum, rest.data(), sizeof checksum);
  std::memcpy(&length, rest.data() + 4, sizeof length);
  const auto type = static_cast<uint8_t>(rest[6]);
  if (type < kFull || type > kLast || length > rest.size() - kHeader) return false;
  if (checksum != Checksum(rest.substr(6, 1 + size_t{length}))) return false;
  *fragment = {static_cast<Type>(type), rest.substr(kHeader, length)};
  return true;
}

// Assembles fragments. A batch with a missing fragment is dropped.
class Batches {
 public:
  explicit Batches(RecordLogScan& scan) : scan_(scan) {}

  void Take(const Fragment& fragment) {
    if (fragment.type == kFull || fragment.type == kFirst) {
      begun_ = true;
      batch_.clear();
    }
    if (!begun_) return;
    batch_ += fragment.bytes;
    if (fragment.type == kFirst || fragment.type == kMiddle) return;
    begun_ = false;
    scan_.batches.push_back(batch_);
    scan_.whole_after_damage = scan_.whole_after_damage || damaged_;
  }
  void Damaged() {
    begun_ = false;
    damaged_ = true;
  }

 private:
  RecordLogScan& scan_;
  std::string batch_;
  bool begun_ = false, damaged_ = false;
};

void AppendFragment(std::string& log, Type type, std::string_view bytes) {
  const std::string body = absl::StrCat(std::string(1, static_cast<char>(type)), std::string(bytes));
  const uint32_t checksum = Checksum(body);
  const auto length = static_cast<uint16_t>(bytes.size());
  log.append(reinterpret_cast<const char*>(&checksum), sizeof checksum);
  log.append(reinterpret_cast<const char*>(&length), sizeof length);
  log += body;
}

absl::Status Error(const std::string& path, absl::string_view what) {
  return DiskError(errno, absl::StrCat(path, ": ", what));
}

// Replaces an existing file.
absl::Status Replace(const std::string& path, std::string_view bytes) {
  const std::string fresh = path + ".dbtmp";  // RocksDB removes files with this name
  const int file = open(fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0) return Error(fresh, "open");
  absl::Cleanup close_and_remove = [&] {
    close(file);
    unlink(fresh.c_str());
  };
  while (!bytes.empty()) {
    const ssize_t written = write(file, bytes.data(), bytes.size());
    if (written < 0 && errno != EINTR) return Error(fresh, "write");
    if (written > 0) bytes.remove_prefix(static_cast<size_t>(written));
  }
  if (fsync(file) != 0) return Error(fresh, "sync");
  if (rename(fresh.c_str(), path.c_str()) != 0) return Error(path, "rename");
  const std::string folder = fs::path(path).parent_path().string();
  const int directory = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool synced = directory >= 0 && fsync(directory) == 0;
  absl::Status status = synced ? absl::OkStatus() : Error(folder, "sync");
  if (directory >= 0) close(directory);
  return status;
}

// Without a stream, because streams throw if the file cannot be read.
absl::StatusOr<std::string> ReadWhole(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return Error(path, "open");
  std::string bytes;
  std::array<char, 64 * 1024> piece;
  ssize_t got = 0;
  while ((got = read(file, piece.data(), piece.size())) > 0 || (got < 0 && errno == EINTR)) {
    if (got > 0) bytes.append(piece.data(), static_cast<size_t>(got));
  }
  const absl::Status status = got < 0 ? Error(path, "read") : absl::OkStatus();
  close(file);
  if (!status.ok()) return status;
  return bytes;
}

}  // namespace

RecordLogScan ScanRecordLog(std::string_view bytes) {
  RecordLogScan scan;
  Batches batches(scan);
  for (size_t block = 0; block < bytes.size(); block += kBlock) {
    std::string_view rest = bytes.substr(block, kBlock);
    while (rest.size() >= kHeader) {
      const size_t zeros = rest.find_first_not_of('\0');
      if (zeros ==
          std::string_view::npos) {  // unused space after the log's end, or damage: no batch continues after it
        batches.Damaged();
        break;
      }
      Fragment fragment;
      if (Parse(rest, &fragment)) {
        batches.Take(fragment);
        rest.remove_prefix(kHeader + fragment.bytes.size());
      } else {
        batches.Damaged();
        // The next one may begin anywhere later, but its type is not zero.
        rest.remove_prefix(zeros < kHeader ? 1 : zeros - (kHeader - 1));
      }
    }
  }
  return scan;
}

std::string EncodeRecordLog(const std::vector<std::string>& batches) {
  std::string log;
  for (const std::string& batch : batches) {
    std::string_view rest = batch;
    bool first = true;
    do {
      const size_t left = kBlock - log.size() % kBlock;
      if (left < kHeader) {
        log.append(left, '\0');
        continue;
      }
      const std::string_view part = rest.substr(0, left - kHeader);
      const bool last = part.size() == rest.size();
      AppendFragment(log, first ? (last ? kFull : kFirst) : (last ? kLast : kMiddle), part);
      rest.remove_prefix(part.size());
      first = false;
      if (last) break;
    } while (true);
  }
  return log;
}

absl::StatusOr<int> RepairRecordLogs(const std::string& path) {
  int repaired = 0;
  std::error_code error;
  for (fs::directory_iterator entry(path, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->path().extension() != ".log") continue;
    const absl::StatusOr<std::string> bytes = ReadWhole(entry->path().string());
    if (!bytes.ok()) return bytes.status();
    const RecordLogScan scan = ScanRecordLog(*bytes);
    if (!scan.whole_after_damage) continue;
    if (absl::Status status = Replace(entry->path().string(), EncodeRecordLog(scan.batches)); !status.ok()) {
      return status;
    }
    ++repaired;
  }
  if (error && error.value() != ENOENT) return DiskError(error.value(), absl::StrCat(path, ": read"));
  return repaired;
}

}  // namespace ashlar::storage
