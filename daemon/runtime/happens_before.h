// SPDX-License-Identifier: Apache-2.0
// Tells ThreadSanitizer about an ordering between threads inside a library that is built without it, such as gRPC.
#pragma once

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace ashlar::daemon {

// Call HappensBefore before passing the object to the library, and HappensAfter first in what the library calls on
// another thread. Both do nothing in other builds.
inline void HappensBefore([[maybe_unused]] const void* object) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(const_cast<void*>(object));
#endif
}

inline void HappensAfter([[maybe_unused]] const void* object) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(const_cast<void*>(object));
#endif
}

}  // namespace ashlar::daemon
