// SPDX-License-Identifier: Apache-2.0
// DiskFaults: which of a process's calls on the files of a folder are to fail. A test shares it with disk_faults.cc,
// which the process has loaded (LD_PRELOAD).
#pragma once

#include <atomic>

namespace ashlar::integration {

// The errno with which calls fail; 0: they succeed. It is in the file named by ASHLAR_DISK_FAULTS; ASHLAR_DISK_FOLDER
// names the folder.
struct DiskFaults {
  std::atomic<int> read, write, sync;
  std::atomic<int> change;  // open for writing, make, rename, remove, resize
  std::atomic<int> struck;  // number of failed calls
  std::atomic<int> hang;    // while not 0, all of these calls and close wait
  std::atomic<int> hung;    // number of waiting calls
};

}  // namespace ashlar::integration
