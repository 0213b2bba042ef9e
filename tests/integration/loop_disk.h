// SPDX-License-Identifier: Apache-2.0
// A small ext4 of its own, which a test can fill, empty and make read-only: an image mounted by a loop device.
#pragma once

#include <string>

namespace ashlar::integration {

class LoopDisk {
 public:
  // Why there can be none here; empty: there can. From then on this process has mounts of its own, which end with it.
  static std::string WhyNot();

  explicit LoopDisk(const std::string& size = "64M");  // failures are test failures
  ~LoopDisk();
  LoopDisk(const LoopDisk&) = delete;
  LoopDisk& operator=(const LoopDisk&) = delete;

  std::string path() const { return folder_ + "/disk"; }
  void Fill();   // fills the disk completely
  void Empty();  // removes the files of Fill
  // Gives back blocks that were allocated behind the ends of RocksDB's logs, which would hide for long that the disk is
  // full. Nobody may be writing to them.
  void TrimLogs(const std::string& records);
  void Remount(const std::string& options);
  // Read-only from now on, whoever is writing: as after an error of the device. Until MountAgain, for which nobody may
  // have a file of it open.
  void Abort() { Remount("abort"); }
  void MountAgain();

 private:
  std::string folder_;
};

}  // namespace ashlar::integration
