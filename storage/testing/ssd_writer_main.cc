// SPDX-License-Identifier: Apache-2.0
// Stores and erases objects in the SSD tier of a folder until it is killed, and says on its output what was
// acknowledged. usage: ssd_writer FOLDER SEED
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>

#include "storage/testing/ssd_folder.h"

namespace ashlar::storage {
namespace {

// One system call per line, so that readers see whole lines, including all lines before the end.
void Say(char what, const SsdFolder::Version& version) {
  char line[64];
  const int bytes = std::snprintf(line, sizeof line, "%c %lu %lu\n", what, static_cast<unsigned long>(version.number),
                                  static_cast<unsigned long>(version.generation));
  if (write(STDOUT_FILENO, line, static_cast<size_t>(bytes)) != bytes) std::_Exit(3);
}

class Writer {
 public:
  Writer(const std::string& folder, uint64_t seed) : random_(seed) {
    auto recovered = tier_.Open(folder);
    if (!recovered.ok()) {
      std::fprintf(stderr, "%s\n", recovered.status().ToString().c_str());
      std::_Exit(2);
    }
    for (auto& object : *recovered) {
      const SsdFolder::Version version = SsdFolder::VersionOf(object.header);
      next_generation_ = std::max(next_generation_, version.generation + 1);
      objects_[version.number] = {version.generation, std::move(object.slot), /*acknowledged=*/true};
    }
    // Generations of objects that did not survive are not reused either.
    next_generation_ += seed % 1000;
  }

  [[noreturn]] void Run() {
    while (true) {
      if (!StoreOne()) EraseOne();
      tier_.io().PollUntil([this] { return under_way_ < 8; });
    }
  }

 private:
  struct Object {
    uint64_t generation = 0;
    Slot slot;
    bool acknowledged = false;
  };

  bool StoreOne() {
    const SsdFolder::Version version{random_() % SsdFolder::kNumbers, next_generation_};
    if (objects_.contains(version.number)) return false;
    auto slot = tier_.tier().Allocate(SsdFolder::kTenant, 1 + random_() % SsdFolder::kMaxExtents);
    if (!slot.ok()) return false;
    ++next_generation_;
    ++under_way_;
    Object& object = objects_[version.number] = {version.generation, *std::move(slot)};
    std::vector<const std::byte*> sources;
    for (uint64_t i = 0; i < object.slot.Extents(); ++i) sources.push_back(tier_.ExtentOf(version, i));
    const bool taken = tier_.tier().Write(object.slot, 0, std::move(sources), [this, version, &object](absl::Status s) {
      if (!s.ok()) std::_Exit(4);
      tier_.tier().Commit(SsdFolder::kTenant, PoolKind::kPublic, SsdFolder::HeaderOf(version, object.slot.Extents()),
                          object.slot, [this, version, &object](absl::Status committed) {
                            if (!committed.ok()) std::_Exit(5);
                            Say('A', version);
                            object.acknowledged = true;
                            --under_way_;
                          });
    });
    if (!taken) std::_Exit(6);
    return true;
  }

  void EraseOne() {
    const auto found = objects_.lower_bound(random_() % SsdFolder::kNumbers);
    if (found == objects_.end() || !found->second.acknowledged) return;
    const SsdFolder::Version version{found->first, found->second.generation};
    Say('E', version);
    ++under_way_;
    tier_.tier().Erase(SsdFolder::kTenant, NumberedKey(version.number), std::move(found->second.slot),
                       [this] { --under_way_; });
    objects_.erase(found);
  }

  std::mt19937_64 random_;
  SsdFolder tier_;
  std::map<uint64_t, Object> objects_;
  uint64_t next_generation_ = 1;
  int under_way_ = 0;
};

}  // namespace
}  // namespace ashlar::storage

int main(int argc, char** argv) {
  if (argc != 3) return 1;
  ashlar::storage::Writer(argv[1], std::strtoull(argv[2], nullptr, 10)).Run();
}
