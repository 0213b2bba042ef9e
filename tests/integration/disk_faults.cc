// SPDX-License-Identifier: Apache-2.0
// Intercepts a process's calls to the C library by which RocksDB and the slab use the disk, and makes them fail or hang
// (disk_faults.h). Without device-mapper there is no device that fails on demand.
#include "tests/integration/disk_faults.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

using ashlar::integration::DiskFaults;

DiskFaults* Faults() {
  static DiskFaults* const faults = [] {
    static DiskFaults none{};
    const char* const path = std::getenv("ASHLAR_DISK_FAULTS");
    const int fd = path == nullptr ? -1 : static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC));
    void* const shared =
        fd < 0 ? MAP_FAILED : ::mmap(nullptr, sizeof(DiskFaults), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return shared == MAP_FAILED ? &none : static_cast<DiskFaults*>(shared);
  }();
  return faults;
}

bool InFolder(const char* path) {
  static const char* const folder = std::getenv("ASHLAR_DISK_FOLDER");
  return folder != nullptr && path != nullptr && std::strncmp(path, folder, std::strlen(folder)) == 0;
}

bool InFolder(int fd) {
  char link[64], path[4096];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = ::readlink(link, path, sizeof path - 1);
  if (length < 0) return false;
  path[length] = '\0';
  return InFolder(path);
}

template <typename File>
void WaitWhileHung(File file) {
  if (Faults()->hang == 0 || !InFolder(file)) return;
  ++Faults()->hung;
  while (Faults()->hang != 0) ::usleep(1000);
  --Faults()->hung;
}

template <typename File>
bool Fails(const std::atomic<int> DiskFaults::*kind, File file) {
  WaitWhileHung(file);
  const int error = Faults()->*kind;
  if (error == 0 || !InFolder(file)) return false;
  ++Faults()->struck;
  errno = error;
  return true;
}

template <typename Function>
Function* Real(Function*, const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

// The library's own function of that name.
#define REAL(name)                                                                  \
  ([] {                                                                             \
    static auto* const real = Real(static_cast<decltype(&::name)>(nullptr), #name); \
    return real;                                                                    \
  }())

extern "C" {

ssize_t write(int fd, const void* bytes, size_t size) {
  return Fails(&DiskFaults::write, fd) ? -1 : REAL(write)(fd, bytes, size);
}
ssize_t pwrite(int fd, const void* bytes, size_t size, off_t offset) {
  return Fails(&DiskFaults::write, fd) ? -1 : REAL(pwrite)(fd, bytes, size, offset);
}
ssize_t pwrite64(int fd, const void* bytes, size_t size, off64_t offset) {
  return Fails(&DiskFaults::write, fd) ? -1 : REAL(pwrite64)(fd, bytes, size, offset);
}
ssize_t read(int fd, void* bytes, size_t size) {
  return Fails(&DiskFaults::read, fd) ? -1 : REAL(read)(fd, bytes, size);
}
ssize_t pread(int fd, void* bytes, size_t size, off_t offset) {
  return Fails(&DiskFaults::read, fd) ? -1 : REAL(pread)(fd, bytes, size, offset);
}
ssize_t pread64(int fd, void* bytes, size_t size, off64_t offset) {
  return Fails(&DiskFaults::read, fd) ? -1 : REAL(pread64)(fd, bytes, size, offset);
}
size_t fread_unlocked(void* bytes, size_t size, size_t count, FILE* file) {
  return Fails(&DiskFaults::read, ::fileno(file)) ? 0 : REAL(fread_unlocked)(bytes, size, count, file);
}
int fsync(int fd) {
  return Fails(&DiskFaults::sync, fd) ? -1 : REAL(fsync)(fd);
}
int fdatasync(int fd) {
  return Fails(&DiskFaults::sync, fd) ? -1 : REAL(fdatasync)(fd);
}
// Without flags it only checks whether the call exists, which no disk can refuse.
int sync_file_range(int fd, off64_t offset, off64_t size, unsigned flags) {
  return flags != 0 && Fails(&DiskFaults::sync, fd) ? -1 : REAL(sync_file_range)(fd, offset, size, flags);
}
int ftruncate(int fd, off_t size) noexcept {
  return Fails(&DiskFaults::change, fd) ? -1 : REAL(ftruncate)(fd, size);
}
int ftruncate64(int fd, off64_t size) noexcept {
  return Fails(&DiskFaults::change, fd) ? -1 : REAL(ftruncate64)(fd, size);
}
int fallocate(int fd, int mode, off_t offset, off_t size) {
  return Fails(&DiskFaults::change, fd) ? -1 : REAL(fallocate)(fd, mode, offset, size);
}
int fallocate64(int fd, int mode, off64_t offset, off64_t size) {
  return Fails(&DiskFaults::change, fd) ? -1 : REAL(fallocate64)(fd, mode, offset, size);
}
int mkdir(const char* path, mode_t mode) noexcept {
  return Fails(&DiskFaults::change, path) ? -1 : REAL(mkdir)(path, mode);
}
int rename(const char* from, const char* to) noexcept {
  return Fails(&DiskFaults::change, to) ? -1 : REAL(rename)(from, to);
}
int unlink(const char* path) noexcept {
  return Fails(&DiskFaults::change, path) ? -1 : REAL(unlink)(path);
}
int unlinkat(int folder, const char* path, int flags) noexcept {
  return Fails(&DiskFaults::change, folder) ? -1 : REAL(unlinkat)(folder, path, flags);
}
int close(int fd) {
  WaitWhileHung(fd);
  return REAL(close)(fd);
}
// In an open folder.
int openat(int folder, const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  const bool changes = (flags & O_ACCMODE) != O_RDONLY || (flags & O_CREAT) != 0;
  if (folder == AT_FDCWD) return REAL(openat)(folder, path, flags, mode);
  if (!changes) WaitWhileHung(folder);
  return changes && Fails(&DiskFaults::change, folder) ? -1 : REAL(openat)(folder, path, flags, mode);
}
int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  const bool changes = (flags & O_ACCMODE) != O_RDONLY || (flags & O_CREAT) != 0;
  if (!changes) WaitWhileHung(path);
  return changes && Fails(&DiskFaults::change, path) ? -1 : REAL(open)(path, flags, mode);
}
int open64(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  const bool changes = (flags & O_ACCMODE) != O_RDONLY || (flags & O_CREAT) != 0;
  if (!changes) WaitWhileHung(path);
  return changes && Fails(&DiskFaults::change, path) ? -1 : REAL(open64)(path, flags, mode);
}

}  // extern "C"
