// SPDX-License-Identifier: Apache-2.0
// Sandbox: drops rights of the daemon's process, so that an attacker who controls it cannot use them.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ashlar::v1 {
class Config;
}

namespace ashlar::daemon {

// Files and directories with their contents. Missing paths are skipped.
struct SandboxPaths {
  std::vector<std::string> read;
  std::vector<std::string> write;  // also read, create and remove
};

// Returns what a daemon with this configuration, read from `file`, needs: the directories of its sockets, disk tier,
// audit file, certificates and `file`; the system's libraries, settings and devices.
SandboxPaths PathsFor(const v1::Config& config, const std::string& file);

// Landlock: the calling thread, and threads it creates, can open only these paths afterwards, and execute nothing. Open
// files stay open. Call before creating other threads, which are not affected. Returns false, without a change, if the
// kernel has no Landlock. In either case the process gets no_new_privs.
absl::StatusOr<bool> RestrictFiles(const SandboxPaths& paths);

// Seccomp: all threads of the process get EPERM for system calls that a serving daemon never makes: starting programs
// and processes, inspecting other processes, mounting, changing namespaces, users, capabilities, the clock or the
// kernel, and creating unusual sockets. UNIMPLEMENTED if the build has no libseccomp.
absl::Status RestrictCalls();

}  // namespace ashlar::daemon
