// SPDX-License-Identifier: Apache-2.0
// Processes in a PID namespace of their own, as containers start them: outside of it they have a number, and inside of
// it nothing outside has one.
#pragma once

#include <sys/types.h>

namespace ashlar::integration {

// Returns whether this machine lets this process make one.
bool MayMakePidNamespaces();

// fork(), with the child as process 1 of a new PID namespace when `own_pid_namespace`.
pid_t Fork(bool own_pid_namespace);

}  // namespace ashlar::integration
