// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/prefix_history.h"

#include <memory>
#include <vector>

namespace ashlar::storage {

PrefixNode& PrefixHistory::NodeAt(std::span<const int32_t> prefix) {
  const Tree::Inserted inserted = tree_.Insert(prefix);
  if (inserted.parted) AdoptSplit(*inserted.parted);
  return *inserted.node;
}

PrefixHistory::Tree::Inserted PrefixHistory::Extend(std::span<const int32_t> tokens, uint64_t prompt,
                                                    std::span<const uint64_t> cuts, RequestTime now) {
  Tree::Inserted inserted = tree_.Insert(tokens, cuts);
  if (inserted.parted) AdoptSplit(*inserted.parted);
  PrefixNode& node = *inserted.node;
  if (inserted.added) {
    PrefixNode* parent = node.parent();
    while (parent->depth() > inserted.known) parent = parent->parent();
    leaves_.erase(LeafOf(*parent));
    node.data.brought = std::make_shared<PromptTail>(
        PromptTail{.came = now, .begin = inserted.known, .prompt_end = prompt, .end = node.depth()});
    Adopt(node);
  }
  for (PrefixNode* at = &node; at->parent() != nullptr; at = at->parent()) Visit(*at, now);
  for (const Tree::Made& made : inserted.cut) AdoptSplit(made);
  return inserted;
}

// Copies the data of the edge that it splits.
void PrefixHistory::AdoptSplit(const Tree::Made& made) {
  PrefixNode& node = *made.node;
  PrefixNode& behind = *made.behind;
  SplitKeys(node, behind);
  node.data.brought = behind.data.brought;
  node.data.needs = behind.data.needs > 0 ? 1 : 0;
  node.data.visited = behind.data.visited;
  Adopt(node);
}

void PrefixHistory::SplitKeys(PrefixNode& node, PrefixNode& behind) const {
  if (behind.data.stored == nullptr || behind.data.stored->blocks.empty()) return;
  std::vector<Key>& all = behind.data.stored->blocks;
  // Counted from the end, because cuts before may have removed the node's start.
  const uint64_t after = behind.depth() / page_tokens_ - node.depth() / page_tokens_;
  const auto before = static_cast<ptrdiff_t>(all.size() - after);
  node.data.stored = std::make_unique<StoredKeys>();
  node.data.stored->blocks.assign(all.begin(), all.begin() + before);
  all.erase(all.begin(), all.begin() + before);
}

void PrefixHistory::JoinKeys(PrefixNode& node) const {
  PrefixNode& child = node.first_child();
  if (node.data.stored == nullptr && child.data.stored == nullptr) return;
  if (child.data.stored == nullptr) child.data.stored = std::make_unique<StoredKeys>();
  std::vector<Key>& behind = child.data.stored->blocks;
  const std::vector<Key> none;
  const std::vector<Key>& before = node.data.stored == nullptr ? none : node.data.stored->blocks;
  const bool known = before.size() == node.depth() / page_tokens_ - node.begin() / page_tokens_ &&
                     behind.size() == child.depth() / page_tokens_ - child.begin() / page_tokens_;
  if (known) {
    behind.insert(behind.begin(), before.begin(), before.end());
  } else {
    behind.clear();
  }
}

void PrefixHistory::Adopt(PrefixNode& node) {
  node.data.serial = ++serials_;
  node.data.place = nodes_.size();
  nodes_.push_back(&node);
}

void PrefixHistory::Disown(PrefixNode& node) {
  PrefixEntry& entry = node.data;
  nodes_[entry.place] = nodes_.back();
  nodes_[entry.place]->data.place = entry.place;
  nodes_.pop_back();
  leaves_.erase(LeafOf(node));
}

void PrefixHistory::Visit(PrefixNode& node, RequestTime now) {
  if (node.leaf()) leaves_.erase(LeafOf(node));
  node.data.visited = now;
  if (node.leaf()) leaves_.insert(LeafOf(node));
}

void PrefixHistory::Erase(PrefixNode& leaf) {
  PrefixNode& parent = *leaf.parent();
  Disown(leaf);
  tree_.Remove(leaf);
  if (parent.parent() == nullptr) return;
  if (parent.leaf()) {
    leaves_.insert(LeafOf(parent));
  } else if (parent.children() == 1 && !parent.data.kind) {
    JoinKeys(parent);
    Disown(parent);
    tree_.Merge(parent);
  }
}

}  // namespace ashlar::storage
