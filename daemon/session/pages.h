// SPDX-License-Identifier: Apache-2.0
// Model, Pages: an opened model, and the pages that an engine declared for it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/session/budget.h"
#include "daemon/session/open_layouts.h"
#include "daemon/session/region.h"
#include "proto/key.h"
#include "proto/layout.h"
#include "proto/object.h"
#include "proto/shard.h"
#include "storage/prefix/prefixes.h"
#include "storage/sharing/page_pool.h"
#include "storage/transfer/transfer.h"

namespace ashlar::v1 {
class OpenModelRequest;
class DeclarePagesRequest;
}  // namespace ashlar::v1

namespace ashlar::daemon {

// Immutable.
struct Model {
  // INVALID_ARGUMENT naming the field for what makes no sense, UNIMPLEMENTED naming it for what this version does not
  // serve: a part of the layers; RESOURCE_EXHAUSTED where `budget` has no room for it, or meanwhile for the request.
  static absl::StatusOr<std::shared_ptr<const Model>> Open(absl::string_view tenant,
                                                           const v1::OpenModelRequest& request, OpenLayouts& layouts,
                                                           const std::shared_ptr<Budget>& budget);

  explicit Model(std::shared_ptr<const Layout> its_layout)
      : shared_layout(std::move(its_layout)), layout(*shared_layout) {}
  // Heap that it takes, without its layout: that may be another model's, too.
  uint64_t MemoryBytes() const;

  NamespaceId ns;
  Identity identity;
  TensorShard shard;  // that its engine computes
  const std::shared_ptr<const Layout> shared_layout;
  const Layout& layout;  // of that shard
  // Returns whether the model's engine can use the object.
  bool Has(const ObjectHeader& object) const { return object.ns == ns && object.shard == shard; }

  double tokens_per_second = 0;                          // that its engine prefills; 0: it did not say
  storage::ComputeCost cost;                             // of all shards
  std::shared_ptr<const storage::PrefixModel> prefixes;  // null: its engine does not use them
  Budget::Charge charge;
};

// Immutable once a session has it. Keeps its region mapped and its model's tables alive.
class Pages {
 public:
  // INVALID_ARGUMENT naming the field unless there is one entry for every attention layer, ascending, each with all of
  // its pages inside the region, aligned to its elements, and no two rows overlapping, be they keys, values or scales,
  // of one layer or two. Layers whose rows interleave step alike (row_array.h). With common pages, rows of layers of
  // two groups may share memory: then page p of the one meets page p of the other alone.
  static absl::StatusOr<std::shared_ptr<Pages>> Declare(std::shared_ptr<const Model> model,
                                                        std::shared_ptr<const Region> region,
                                                        const v1::DeclarePagesRequest& request);

  const Model& model() const { return *model_; }
  const std::shared_ptr<const Region>& region() const { return region_; }

  // Groups of layers, each with page tables of its own: one, unless the engine has declared several.
  struct Group {
    uint32_t page_tokens = 0;
    uint32_t pages = 0;
  };
  const std::vector<Group>& groups() const { return groups_; }
  bool common_pages() const { return common_pages_; }
  // Of the first group: the only one of pages that the daemon allocates.
  uint32_t page_tokens() const { return groups_.front().page_tokens; }

  // Divides a request's page table of so many entries, in which the groups' tables lie one behind the other, as its
  // `group_pages` says: where each of them begins, and the end. INVALID_ARGUMENT names the field.
  absl::StatusOr<std::vector<size_t>> Divide(size_t entries, std::span<const uint32_t> group_pages) const;
  // One entry an attention layer, ascending, with the layout's rotation, and its own part of a page table that has been
  // divided so. They point into the page table.
  std::vector<storage::PagedRows> RowsIn(const std::vector<int32_t>& page_table, std::span<const size_t> tables) const;

  // Checks that positions [first, first + count) lie on entries of each group's table that name declared pages.
  // INVALID_ARGUMENT names the entry.
  absl::Status CheckPositions(std::span<const int32_t> page_table, std::span<const size_t> tables, uint64_t first,
                              uint64_t count) const;

  // Returns whether stored rows have the same bytes at every position: no layer's keys are turned on their way into
  // pages.
  bool position_free() const;

  // Hands the allocation of page ids over to `pool`, which has as many pages.
  void Allocate(std::shared_ptr<storage::PagePool> pool) { pool_ = std::move(pool); }
  // Null: the engine allocates them. The pool is the metadata thread's.
  const std::shared_ptr<storage::PagePool>& pool() const { return pool_; }

  // Heap that it takes, without its model, region and pool; and what is charged for it.
  uint64_t MemoryBytes() const {
    return kLeastHeapBytes + sizeof(Pages) + rows_.capacity() * (sizeof(rows_[0]) + sizeof(group_of_[0])) +
           groups_.capacity() * sizeof(groups_[0]);
  }
  void Keep(Budget::Charge charge) { charge_ = std::move(charge); }

 private:
  Pages(std::shared_ptr<const Model> model, std::shared_ptr<const Region> region)
      : model_(std::move(model)), region_(std::move(region)) {}
  absl::Status ReadGroups(const v1::DeclarePagesRequest& request);

  const std::shared_ptr<const Model> model_;
  const std::shared_ptr<const Region> region_;
  std::vector<Group> groups_;
  bool declared_groups_ = false, common_pages_ = false;
  std::vector<storage::PagedRows> rows_;
  std::vector<uint32_t> group_of_;  // of each of the rows
  std::shared_ptr<storage::PagePool> pool_;
  Budget::Charge charge_;
};

}  // namespace ashlar::daemon
