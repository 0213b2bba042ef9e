// SPDX-License-Identifier: Apache-2.0
#include "daemon/security/sandbox.h"

#include <fcntl.h>
#include <linux/landlock.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef ASHLAR_SECCOMP
#include <seccomp.h>
#endif

#include <cerrno>
#include <cstdint>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "ashlar/v1/config.pb.h"
#include "daemon/runtime/unique_fd.h"

namespace ashlar::daemon {
namespace {

// Rights that the headers of Debian 12 do not define.
constexpr uint64_t kTruncate = uint64_t{1} << 14;
constexpr uint64_t kReadRights = LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_READ_DIR;
constexpr uint64_t kFileRights =
    LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_WRITE_FILE | LANDLOCK_ACCESS_FS_EXECUTE | kTruncate;
constexpr uint64_t kWriteRights = kReadRights | LANDLOCK_ACCESS_FS_WRITE_FILE | LANDLOCK_ACCESS_FS_REMOVE_DIR |
                                  LANDLOCK_ACCESS_FS_REMOVE_FILE | LANDLOCK_ACCESS_FS_MAKE_DIR |
                                  LANDLOCK_ACCESS_FS_MAKE_REG | LANDLOCK_ACCESS_FS_MAKE_SOCK |
                                  LANDLOCK_ACCESS_FS_REFER | kTruncate;
constexpr uint64_t kOtherRights = LANDLOCK_ACCESS_FS_EXECUTE | LANDLOCK_ACCESS_FS_MAKE_CHAR |
                                  LANDLOCK_ACCESS_FS_MAKE_FIFO | LANDLOCK_ACCESS_FS_MAKE_BLOCK |
                                  LANDLOCK_ACCESS_FS_MAKE_SYM;  // never granted

// Returns the rights that this version of the kernel's interface knows.
uint64_t Known(long abi) {
  uint64_t known = kWriteRights | kOtherRights;
  if (abi < 2) known &= ~uint64_t{LANDLOCK_ACCESS_FS_REFER};
  if (abi < 3) known &= ~kTruncate;
  return known;
}

absl::Status Allow(int ruleset, const std::string& path, uint64_t rights) {
  const UniqueFd there(open(path.c_str(), O_PATH | O_CLOEXEC));
  if (!there.valid()) return errno == ENOENT ? absl::OkStatus() : absl::ErrnoToStatus(errno, path);
  struct stat info {};
  if (fstat(there.get(), &info) != 0) return absl::ErrnoToStatus(errno, path);
  landlock_path_beneath_attr rule{};
  rule.allowed_access = S_ISDIR(info.st_mode) ? rights : rights & kFileRights;
  rule.parent_fd = there.get();
  if (syscall(SYS_landlock_add_rule, ruleset, LANDLOCK_RULE_PATH_BENEATH, &rule, 0) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat("landlock: ", path));
}

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

#ifdef ASHLAR_SECCOMP
// By name: a CPU architecture without the call needs no rule.
constexpr const char* kRefused[] = {
    // programs and processes
    "execve", "execveat", "fork", "vfork",
    // other processes
    "ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd", "process_madvise",
    // file systems
    "mount", "umount", "umount2", "move_mount", "open_tree", "fsopen", "fsmount", "fsconfig", "fspick", "mount_setattr",
    "pivot_root", "chroot", "open_by_handle_at", "name_to_handle_at", "quotactl", "quotactl_fd", "fanotify_init",
    "swapon", "swapoff", "acct", "mknod", "mknodat",
    // namespaces, users, capabilities
    "setns", "unshare", "setuid", "setgid", "setreuid", "setregid", "setresuid", "setresgid", "setfsuid", "setfsgid",
    "setgroups", "capset", "personality",
    // the kernel and the machine
    "bpf", "perf_event_open", "init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot",
    "iopl", "ioperm", "syslog", "lookup_dcookie", "userfaultfd", "io_uring_setup", "vhangup", "sethostname",
    "setdomainname", "settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "stime",
    // keys
    "add_key", "request_key", "keyctl"};
constexpr int kSockets[] = {AF_UNIX, AF_INET, AF_INET6, AF_NETLINK};  // allowed families; netlink is for RDMA and links

absl::Status Fill(scmp_filter_ctx filter) {
  const auto failed = [](int error, absl::string_view what) {
    return absl::ErrnoToStatus(-error, absl::StrCat("seccomp: ", what));
  };
  if (int error = seccomp_attr_set(filter, SCMP_FLTATR_CTL_TSYNC, 1); error != 0) return failed(error, "all threads");
  for (const char* const name : kRefused) {
    const int call = seccomp_syscall_resolve_name(name);
    if (call == __NR_SCMP_ERROR) continue;  // libseccomp is older than the call
    if (int error = seccomp_rule_add(filter, SCMP_ACT_ERRNO(EPERM), call, 0); error != 0) return failed(error, name);
  }
  // A new thread is not a new process. A filter cannot see the flags of clone3, so clone3 is refused and the C library
  // uses clone.
  const scmp_arg_cmp no_thread{.arg = 0, .op = SCMP_CMP_MASKED_EQ, .datum_a = CLONE_THREAD, .datum_b = 0};
  if (int error = seccomp_rule_add(filter, SCMP_ACT_ERRNO(EPERM), SCMP_SYS(clone), 1, no_thread); error != 0) {
    return failed(error, "clone");
  }
  if (int error = seccomp_rule_add(filter, SCMP_ACT_ERRNO(ENOSYS), SCMP_SYS(clone3), 0); error != 0) {
    return failed(error, "clone3");
  }
  constexpr int kFamilies = 64;  // more than exist
  for (int family = 0; family < kFamilies; ++family) {
    bool known = false;
    for (const int each : kSockets) known |= each == family;
    if (known) continue;
    // The kernel takes an int, so the upper half of the register is ignored.
    const scmp_arg_cmp is_it{
        .arg = 0, .op = SCMP_CMP_MASKED_EQ, .datum_a = 0xffffffff, .datum_b = static_cast<scmp_datum_t>(family)};
    if (int error = seccomp_rule_add(filter, SCMP_ACT_ERRNO(EPERM), SCMP_SYS(socket), 1, is_it); error != 0) {
      return failed(error, "socket");
    }
  }
  const int error = seccomp_load(filter);
  return error == 0 ? absl::OkStatus() : failed(error, "load");
}
#endif

}  // namespace

SandboxPaths PathsFor(const v1::Config& config, const std::string& file) {
  SandboxPaths paths;
  paths.read = {"/etc", "/lib", "/lib64", "/opt", "/proc", "/run", "/sys", "/usr", FolderOf(file)};
  paths.write = {"/dev"};
  const v1::Listen& listen = config.listen();
  for (const std::string* path : {&listen.rpc_socket(), &listen.session_socket(), &listen.admin_socket(),
                                  &listen.metrics_socket(), &config.log().audit_file()}) {
    if (!path->empty()) paths.write.push_back(FolderOf(*path));
  }
  for (const std::string* address : {&config.events().zmq_address(), &config.events().zmq_replay_address()}) {
    absl::string_view path = *address;
    if (absl::ConsumePrefix(&path, "ipc://")) paths.write.push_back(FolderOf(std::string(path)));
  }
  if (!config.ssd().folder().empty()) paths.write.push_back(config.ssd().folder());
  const v1::PeerTls& tls = config.cluster().tls();
  const v1::Etcd& etcd = config.cluster().etcd();
  for (const std::string* path : {&tls.ca_file(), &tls.cert_file(), &tls.key_file(), &etcd.ca_file(), &etcd.cert_file(),
                                  &etcd.key_file(), &etcd.password_file()}) {
    if (!path->empty()) paths.read.push_back(FolderOf(*path));
  }
  return paths;
}

absl::StatusOr<bool> RestrictFiles(const SandboxPaths& paths) {
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
    return absl::ErrnoToStatus(errno, "sandbox: cannot set no_new_privs");
  const long abi = syscall(SYS_landlock_create_ruleset, nullptr, 0, LANDLOCK_CREATE_RULESET_VERSION);
  if (abi < 1) return false;
  const uint64_t known = Known(abi);
  const landlock_ruleset_attr handled{.handled_access_fs = known};
  const UniqueFd ruleset(static_cast<int>(syscall(SYS_landlock_create_ruleset, &handled, sizeof handled, 0)));
  if (!ruleset.valid()) return absl::ErrnoToStatus(errno, "landlock");
  for (const std::string& path : paths.read) {
    if (absl::Status allowed = Allow(ruleset.get(), path, kReadRights); !allowed.ok()) return allowed;
  }
  for (const std::string& path : paths.write) {
    if (absl::Status allowed = Allow(ruleset.get(), path, kWriteRights & known); !allowed.ok()) return allowed;
  }
  if (syscall(SYS_landlock_restrict_self, ruleset.get(), 0) != 0) return absl::ErrnoToStatus(errno, "landlock");
  return true;
}

absl::Status RestrictCalls() {
#ifdef ASHLAR_SECCOMP
  const std::unique_ptr<void, void (*)(scmp_filter_ctx)> filter(seccomp_init(SCMP_ACT_ALLOW), seccomp_release);
  if (filter == nullptr) return absl::ResourceExhaustedError("seccomp: no memory");
  return Fill(filter.get());
#else
  return absl::UnimplementedError("sandbox: this build has no libseccomp");
#endif
}

}  // namespace ashlar::daemon
