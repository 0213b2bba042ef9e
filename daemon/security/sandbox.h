// SPDX-License-Identifier: Apache-2.0
// Sandbox: what the daemon gives up of its process's rights, so that somebody who has taken it over cannot use them.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ashlar::v1 {
class Config;
}

namespace ashlar::daemon {

// Files and folders, with all below them. What does not exist is left out.
struct SandboxPaths {
  std::vector<std::string> read;
  std::vector<std::string> write;  // and read, make, remove
};

// What a daemon with this configuration, read from `file`, may need: the folders of its sockets, its disk tier, its
// audit file, its certificates and of `file`; the system's libraries, settings and devices.
SandboxPaths PathsFor(const v1::Config& config, const std::string& file);

// Landlock: from now on the calling thread, and those that it makes, open nothing else, and execute nothing. Files that
// are open stay so. Before other threads are made, which it does not concern. Returns false, and changes nothing, where
// the kernel has no landlock. The process gets no new privileges from programs any more, either way.
absl::StatusOr<bool> RestrictFiles(const SandboxPaths& paths);

// Seccomp: from now on all threads of the process are refused (EPERM) calls that a daemon that serves never makes: to
// start programs and processes, to look into other processes, to mount, to change namespaces, users, capabilities, the
// clock or the kernel, and to make sockets of unusual kinds. UNIMPLEMENTED where the build has no libseccomp.
absl::Status RestrictCalls();

}  // namespace ashlar::daemon
