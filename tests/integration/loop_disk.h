// SPDX-License-Identifier: Apache-2.0
// A small ext4 of its own, which a test can fill, empty and make read-only: an image mounted by a loop device.
#pragma once

#include <string>

namespace ashlar::integration {

class LoopDisk {
 public:
  // Returns why this is impossible here; empty: possible. Afterwards this process has its own mounts, which end with
  // it.
  static std::string WhyNot();

  explicit LoopDisk(const std::string& size = "64M");  // failures are test failures
  ~LoopDisk();
  LoopDisk(const LoopDisk&) = delete;
  LoopDisk& operator=(const LoopDisk&) = delete;

  std::string path() const { return folder_ + "/disk"; }
  void Fill();   // fills the disk completely
  void Empty();  // removes the files of Fill
  // Frees blocks that were allocated past the ends of RocksDB's logs, which would long hide that the disk is full. No
  // process may be writing to them.
  void TrimLogs(const std::string& records);
  void Remount(const std::string& options);
  // Makes the disk read-only, even if it is being written, as after an error of the device. Until MountAgain, for which
  // no process may have a file of it open.
  void Abort() { Remount("abort"); }
  void MountAgain();

 private:
  std::string folder_;
};

}  // namespace ashlar::integration
