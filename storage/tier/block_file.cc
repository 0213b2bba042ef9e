// SPDX-License-Identifier: Apache-2.0
#include "storage/tier/block_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "storage/tier/disk_error.h"
#include "storage/tier/file_owner.h"

namespace ashlar::storage {
namespace {

constexpr uint64_t kLeftFree = uint64_t{16}
                               << 20;  // for the file's metadata, the records beside it, and other programs

absl::Status Error(const std::string& path, absl::string_view what) {
  return DiskError(errno, absl::StrCat(path, ": ", what));
}

class DirectFile final : public BlockFile {
 public:
  DirectFile(std::string path, int descriptor, uint64_t bytes)
      : path_(std::move(path)), descriptor_(descriptor), bytes_(bytes) {}
  ~DirectFile() override { close(descriptor_); }

  uint64_t size() const override { return bytes_; }

  absl::Status Read(uint64_t offset, std::span<std::byte> target) override {
    return Move("read", offset, target, [this](std::span<std::byte> rest, uint64_t at) {
      return pread(descriptor_, rest.data(), rest.size(), static_cast<off_t>(at));
    });
  }

  absl::Status Write(uint64_t offset, std::span<const std::byte> source) override {
    return Move("write", offset, source, [this](std::span<const std::byte> rest, uint64_t at) {
      return pwrite(descriptor_, rest.data(), rest.size(), static_cast<off_t>(at));
    });
  }

  absl::Status Sync() override { return fdatasync(descriptor_) == 0 ? absl::OkStatus() : Error(path_, "sync"); }

 private:
  template <typename Byte, typename Call>
  absl::Status Move(absl::string_view what, uint64_t offset, std::span<Byte> bytes, Call call) {
    const uint64_t address = reinterpret_cast<uintptr_t>(bytes.data());
    if ((offset | bytes.size() | address) % kBlockBytes != 0 || offset > bytes_ || bytes.size() > bytes_ - offset) {
      return absl::InvalidArgumentError(absl::StrCat(path_, ": ", what, " of ", bytes.size(), " bytes at ", offset,
                                                     ": not aligned to whole blocks of the file"));
    }
    while (!bytes.empty()) {
      const ssize_t moved = call(bytes, offset);
      if (moved < 0 && errno == EINTR) continue;
      if (moved < 0) return Error(path_, what);
      // A part that ends inside a block is moved again, because the next call must begin at a block.
      const size_t whole = static_cast<size_t>(moved) / kBlockBytes * kBlockBytes;
      if (whole == 0)
        return absl::DataLossError(absl::StrCat(path_, ": ", what, ": unexpected end of file at ", offset));
      offset += whole;
      bytes = bytes.subspan(whole);
    }
    return absl::OkStatus();
  }

  const std::string path_;
  const int descriptor_;
  const uint64_t bytes_;
};

// An open folder of a path, and the file name in it.
class Place {
 public:
  // `folder` is borrowed; a negative one is opened.
  Place(const std::string& path, int folder) : path_(path), folder_(folder), owned_(folder < 0) {
    const size_t slash = path.rfind('/');
    name_ = slash == std::string::npos ? path : path.substr(slash + 1);
    const std::string parent = slash == std::string::npos ? "." : path.substr(0, slash + 1);
    if (owned_) folder_ = open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  }
  ~Place() {
    if (owned_ && folder_ >= 0) close(folder_);
  }
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  absl::Status status() const { return folder_ < 0 ? Error(path_, "open the directory") : absl::OkStatus(); }
  int Open(int flags) const { return openat(folder_, name_.c_str(), flags | O_NOFOLLOW | O_CLOEXEC, 0600); }
  void Remove() const { unlinkat(folder_, name_.c_str(), 0); }
  absl::Status Sync() const { return fsync(folder_) == 0 ? absl::OkStatus() : Error(path_, "sync the directory"); }

 private:
  const std::string path_;
  std::string name_;
  int folder_;
  const bool owned_;
};

// Checked before the file is allocated: a file system without enough space may take every free block before it refuses,
// and the daemon retries every few seconds. Blocks reserved for root count as used even for root, because they allow
// repairs of a full disk.
absl::Status CheckSpace(const std::string& path, int descriptor, const struct stat& info, uint64_t bytes) {
  const uint64_t has = static_cast<uint64_t>(info.st_blocks) * 512;
  if (has >= bytes) return absl::OkStatus();
  struct statvfs about {};
  if (fstatvfs(descriptor, &about) != 0) return Error(path, "query the free space of the file system");
  if (about.f_blocks == 0) return absl::OkStatus();  // unknown size
  const uint64_t needed = bytes - has, free = uint64_t{about.f_bavail} * about.f_frsize;
  if (free >= kLeftFree && needed <= free - kLeftFree) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(path, ": allocate ", bytes, " bytes: no space; ", needed,
                                                   " more bytes needed, ", kLeftFree,
                                                   " reserved for other files; the file system has ", free, " free"));
}

absl::Status Resize(const std::string& path, int descriptor, const struct stat& info, uint64_t bytes) {
  if (absl::Status space = CheckSpace(path, descriptor, info, bytes); !space.ok()) return space;
  if (fallocate(descriptor, 0, 0, static_cast<off_t>(bytes)) != 0) {
    const int error = errno;
    // Frees blocks that were allocated before the space ran out.
    if (ftruncate(descriptor, info.st_size) != 0) return Error(path, "truncate");
    errno = error;
    const absl::Status status = Error(path, absl::StrCat("allocate ", bytes, " bytes"));
    if (error == EOPNOTSUPP) return absl::FailedPreconditionError(status.message());
    return error == EFBIG ? absl::ResourceExhaustedError(status.message()) : status;
  }
  if (ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) return Error(path, "truncate");
  return fsync(descriptor) == 0 ? absl::OkStatus() : Error(path, "sync");
}

}  // namespace

absl::StatusOr<std::unique_ptr<BlockFile>> OpenBlockFile(const std::string& path, uint64_t bytes, int folder) {
  if (bytes == 0 || bytes % BlockFile::kBlockBytes != 0 || bytes > uint64_t{INT64_MAX}) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", bytes, " bytes; expected a whole number of blocks"));
  }
  const Place place(path, folder);
  if (absl::Status status = place.status(); !status.ok()) return status;
  int descriptor = place.Open(O_RDWR | O_DIRECT);
  bool made = false;
  if (descriptor < 0 && errno == ENOENT) {
    descriptor = place.Open(O_RDWR | O_DIRECT | O_CREAT | O_EXCL);
    made = descriptor >= 0 ||
           errno == EINVAL;  // without O_DIRECT support some file systems create the file and then refuse
  }
  if (descriptor < 0) {
    const absl::Status status = errno == ELOOP ? IsLink(path) : Error(path, "open");
    const bool refused = errno == EINVAL;
    if (made) place.Remove();
    if (!refused) return status;
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": the file system does not support O_DIRECT; use ext4 or xfs"));
  }
  absl::Cleanup close_and_remove = [&] {
    if (made) place.Remove();
    close(descriptor);
  };
  if (flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return Error(path, "lock");
    return absl::FailedPreconditionError(absl::StrCat(path, ": locked by another process"));
  }
  struct stat info {};
  if (fstat(descriptor, &info) != 0) return Error(path, "stat");
  if (!S_ISREG(info.st_mode)) return absl::FailedPreconditionError(absl::StrCat(path, ": is not a regular file"));
  if (absl::Status owned = CheckOwner(path, info); !owned.ok()) return owned;
  if ((info.st_mode & 0777) != 0600 && fchmod(descriptor, 0600) != 0) return Error(path, "set the mode");
  // Even if the file has this size, because a copy may have holes.
  if (absl::Status status = Resize(path, descriptor, info, bytes); !status.ok()) return status;
  // Syncs the folder, so that the file's name survives a power loss.
  if (absl::Status status = place.Sync(); !status.ok()) return status;
  std::move(close_and_remove).Cancel();
  return std::make_unique<DirectFile>(path, descriptor, bytes);
}

}  // namespace ashlar::storage
