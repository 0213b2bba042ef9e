// SPDX-License-Identifier: Apache-2.0
// The role of `ashlar-bench mirror` that runs in separate processes.
#pragma once

#include <string>

namespace ashlar::bench {

// A member of an etcd's directory. Prints "ready". For each line on standard input it announces `count` entries of a
// namespace (hexadecimal), starting with number `first`, and keeps them until standard input ends. Returns the exit
// code.
int RunMirrorHolder(const std::string& endpoint, const std::string& name, const std::string& ns,
                    const std::string& first, const std::string& count);

}  // namespace ashlar::bench
