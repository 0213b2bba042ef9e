// SPDX-License-Identifier: Apache-2.0
#include "storage/memory/huge_pages.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <set>
#include <vector>

namespace ashlar::storage {
namespace {

struct Node {
  explicit Node(int* its_alive = nullptr) : alive(its_alive) {}
  ~Node() {
    if (alive != nullptr) --*alive;
  }
  uint64_t number = 7;
  int* alive;
  char rest[100] = {};
};

TEST(HugePagesTest, LargePiecesAreWholePages) {
  HugePages pages;
  for (const size_t bytes : {HugePages::kBytes, HugePages::kBytes + 1, 5 * HugePages::kBytes - 1}) {
    void* const at = pages.allocate(bytes, 64);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(at) % HugePages::kBytes, 0u);
    std::memset(at, 1, bytes);
    pages.deallocate(at, bytes, 64);
  }
  void* const small = pages.allocate(100, 64);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(small) % 64, 0u);
  pages.deallocate(small, 100, 64);
}

// More nodes than a chunk holds, for every size of chunk.
TEST(NodePoolTest, EachNumaNodeHasItsOwnAddresses) {
  constexpr uint64_t kNodes = 3 * HugePages::kBytes / sizeof(Node);
  int alive = kNodes;
  {
    NodePool<Node> pool;
    std::vector<Node*> nodes;
    for (uint64_t i = 0; i < kNodes; ++i) {
      nodes.push_back(pool.New());
      ASSERT_EQ(nodes.back()->number, 7u);
      ASSERT_EQ(reinterpret_cast<uintptr_t>(nodes.back()) % alignof(Node), 0u);
      nodes.back()->number = i;
      nodes.back()->alive = &alive;
      std::memset(nodes.back()->rest, static_cast<int>(i), sizeof(Node::rest));
    }
    EXPECT_EQ(std::set<Node*>(nodes.begin(), nodes.end()).size(), kNodes);
    for (uint64_t i = 0; i < kNodes; ++i) {
      ASSERT_EQ(nodes[i]->number, i);
      ASSERT_EQ(nodes[i]->rest[99], static_cast<char>(i));
      pool.Delete(nodes[i]);
    }
  }
  EXPECT_EQ(alive, 0) << "what is deleted has ended";
}

TEST(NodePoolTest, ReusesAddresses) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "not under the address sanitizer";
#endif
  NodePool<Node> pool;
  Node* const first = pool.New();
  Node* const second = pool.New();
  first->number = 1;
  pool.Delete(first);
  pool.Delete(second);
  EXPECT_EQ(pool.New(), second);
  Node* const again = pool.New();
  EXPECT_EQ(again, first);
  EXPECT_EQ(again->number, 7u) << "as new";
  pool.Delete(again);
  pool.Delete(second);
}

}  // namespace
}  // namespace ashlar::storage
