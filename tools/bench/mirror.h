// SPDX-License-Identifier: Apache-2.0
// The role of `ashlar-bench mirror` that runs in processes of its own.
#pragma once

#include <string>

namespace ashlar::bench {

// A member of the directory of an etcd: says "ready"; at a line on standard input it announces `count` entries of a
// namespace (hexadecimal), from number `first` on, and keeps them until standard input ends. Returns the exit code.
int RunMirrorHolder(const std::string& endpoint, const std::string& name, const std::string& ns,
                    const std::string& first, const std::string& count);

}  // namespace ashlar::bench
