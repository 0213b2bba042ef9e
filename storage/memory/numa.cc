// SPDX-License-Identifier: Apache-2.0
#include "storage/memory/numa.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace ashlar::storage {
namespace {

constexpr const char* kNodes = "/sys/devices/system/node";

// Parses the kernel's lists of numbers, such as "0-2,5".
std::vector<uint32_t> ParseList(absl::string_view text) {
  std::vector<uint32_t> numbers;
  for (const absl::string_view range : absl::StrSplit(absl::StripAsciiWhitespace(text), ',', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> ends = absl::StrSplit(range, absl::MaxSplits('-', 1));
    uint32_t first = 0, last = 0;
    if (!absl::SimpleAtoi(ends.first, &first)) continue;
    if (!absl::SimpleAtoi(ends.second, &last)) last = first;
    for (uint32_t node = first; node <= std::min(last, NumaPolicy::kMaxNodes - 1); ++node) numbers.push_back(node);
  }
  return numbers;
}

std::string ReadAll(const std::string& path) {
  std::ifstream file(path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// Returns the nodes with memory that this process may use.
std::vector<uint32_t> UsableNodes(const std::string& root) {
  const std::vector<uint32_t> there = ParseList(ReadAll(absl::StrCat(root, kNodes, "/has_memory")));
  std::ifstream status(root + "/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    absl::string_view list = line;
    if (!absl::ConsumePrefix(&list, "Mems_allowed_list:")) continue;
    const std::vector<uint32_t> allowed = ParseList(list);
    std::vector<uint32_t> usable;
    std::set_intersection(there.begin(), there.end(), allowed.begin(), allowed.end(), std::back_inserter(usable));
    return usable;
  }
  return there;
}

int KernelsMode(NumaPolicy::Mode mode) {
  switch (mode) {
    case NumaPolicy::Mode::kAny:
      return MPOL_DEFAULT;
    case NumaPolicy::Mode::kBind:
      return MPOL_BIND;
    case NumaPolicy::Mode::kPreferred:
      return MPOL_PREFERRED;
    case NumaPolicy::Mode::kInterleave:
      return MPOL_INTERLEAVE;
  }
  return MPOL_DEFAULT;
}

}  // namespace

absl::Status CheckNodes(const NumaPolicy& policy, const std::string& root) {
  const std::vector<uint32_t> usable = policy.nodes.empty() ? std::vector<uint32_t>() : UsableNodes(root);
  for (size_t i = 0; i < policy.nodes.size(); ++i) {
    if (std::binary_search(usable.begin(), usable.end(), policy.nodes[i])) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("nodes[", i, "]: this process cannot use memory of node ", policy.nodes[i],
                     "; usable nodes: ", usable.empty() ? "none" : absl::StrJoin(usable, ", ")));
  }
  return absl::OkStatus();
}

uint64_t AvailableOnNodes(const std::vector<uint32_t>& nodes, const std::string& root) {
  uint64_t available = 0;
  for (const uint32_t node : nodes) {
    std::ifstream file(absl::StrCat(root, kNodes, "/node", node, "/meminfo"));
    bool known = false;
    for (std::string line; std::getline(file, line);) {  // "Node 0 MemFree:    123 kB"
      std::istringstream words(line);
      std::string word, number, name;
      uint64_t kilobytes = 0;
      if (!(words >> word >> number >> name >> kilobytes)) continue;
      const bool counts = name == "MemFree:" || name == "Active(file):" || name == "Inactive(file):";
      if (counts) available += kilobytes * 1024;
      known |= name == "MemFree:";
    }
    if (!known) return UINT64_MAX;
  }
  return available;
}

absl::Status SetNumaPolicy(void* mapping, uint64_t bytes, const NumaPolicy& policy) {
  constexpr size_t kBits = 8 * sizeof(unsigned long);               // NOLINT(google-runtime-int): the kernel's type
  std::array<unsigned long, NumaPolicy::kMaxNodes / kBits> mask{};  // NOLINT(google-runtime-int)
  for (const uint32_t node : policy.nodes) mask[node / kBits] |= 1UL << node % kBits;
  // The kernel reads one bit less than the given number.
  if (syscall(SYS_mbind, mapping, bytes, KernelsMode(policy.mode), mask.data(), NumaPolicy::kMaxNodes + 1, 0) != 0) {
    return absl::FailedPreconditionError(absl::ErrnoToStatus(errno, "mbind").message());
  }
  return absl::OkStatus();
}

}  // namespace ashlar::storage
