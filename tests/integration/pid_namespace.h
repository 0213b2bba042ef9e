// SPDX-License-Identifier: Apache-2.0
// Processes in a separate PID namespace, as containers start them: the parent namespace can see them, but they cannot
// see processes outside of their own namespace.
#pragma once

#include <sys/types.h>

namespace ashlar::integration {

// Returns whether this machine lets this process create one.
bool MayMakePidNamespaces();

// fork(), with the child as process 1 of a new PID namespace when `own_pid_namespace`.
pid_t Fork(bool own_pid_namespace);

}  // namespace ashlar::integration
