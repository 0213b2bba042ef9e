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
  // INVALID_ARGUMENT names an invalid field. UNIMPLEMENTED names an unsupported one (a subset of the layers).
  // RESOURCE_EXHAUSTED if `budget` has no space for the model, or temporarily for the request.
  static absl::StatusOr<std::shared_ptr<const Model>> Open(absl::string_view tenant,
                                                           const v1::OpenModelRequest& request, OpenLayouts& layouts,
                                                           const std::shared_ptr<Budget>& budget);

  explicit Model(std::shared_ptr<const Layout> its_layout)
      : shared_layout(std::move(its_layout)), layout(*shared_layout) {}
  // Returns the heap bytes without the layout, which other models may share.
  uint64_t MemoryBytes() const;

  NamespaceId ns;
  Identity identity;
  TensorShard shard;  // the shard that its engine computes
  const std::shared_ptr<const Layout> shared_layout;
  const Layout& layout;  // layout of that shard
  // Returns whether the model's engine can use the object.
  bool Has(const ObjectHeader& object) const { return object.ns == ns && object.shard == shard; }

  double tokens_per_second = 0;                          // prefill rate; 0 if unknown
  storage::ComputeCost cost;                             // cost of all shards together
  std::shared_ptr<const storage::PrefixModel> prefixes;  // null if the model was opened without prefixes
  Budget::Charge charge;
};

// Immutable once a session has it. Keeps its region mapped and its model's tables alive.
class Pages {
 public:
  // INVALID_ARGUMENT names the field unless there is one entry per attention layer, ascending, with all pages inside
  // the region and aligned to its elements, and no two rows (keys, values or scales of any layer) overlap. Layers with
  // interleaved rows must have equal strides (row_array.h). With common pages, rows of layers of two groups may share
  // memory if page p of one only meets page p of the other.
  static absl::StatusOr<std::shared_ptr<Pages>> Declare(std::shared_ptr<const Model> model,
                                                        std::shared_ptr<const Region> region,
                                                        const v1::DeclarePagesRequest& request);

  const Model& model() const { return *model_; }
  const std::shared_ptr<const Region>& region() const { return region_; }

  // A group of layers with its own page tables. There is one unless the engine declares several.
  struct Group {
    uint32_t page_tokens = 0;
    uint32_t pages = 0;
  };
  const std::vector<Group>& groups() const { return groups_; }
  bool common_pages() const { return common_pages_; }
  // Tokens per page of the first group, the only one for pages that the daemon allocates.
  uint32_t page_tokens() const { return groups_.front().page_tokens; }

  // Divides a request's page table of `entries`, in which the tables of the groups follow one another, by
  // `group_pages`. Returns where each table begins, and the end. INVALID_ARGUMENT names the field.
  absl::StatusOr<std::vector<size_t>> Divide(size_t entries, std::span<const uint32_t> group_pages) const;
  // Returns one entry per attention layer, ascending, with the layout's rotation and its part of the divided page
  // table. The entries point into the page table.
  std::vector<storage::PagedRows> RowsIn(const std::vector<int32_t>& page_table, std::span<const size_t> tables) const;

  // Checks that positions [first, first + count) are covered by entries of each group's table that name declared pages.
  // INVALID_ARGUMENT names the entry.
  absl::Status CheckPositions(std::span<const int32_t> page_table, std::span<const size_t> tables, uint64_t first,
                              uint64_t count) const;

  // Returns whether stored rows are the same at every position: no layer rotates keys when they are landed.
  bool position_free() const;

  // Lets `pool`, which has the same number of pages, allocate page ids.
  void Allocate(std::shared_ptr<storage::PagePool> pool) { pool_ = std::move(pool); }
  // Null if the engine allocates pages. The pool belongs to the metadata thread.
  const std::shared_ptr<storage::PagePool>& pool() const { return pool_; }

  // Returns the heap bytes without model, region and pool. `charge` is the budget charge for them.
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
  std::vector<uint32_t> group_of_;  // index: entry of rows_
  std::shared_ptr<storage::PagePool> pool_;
  Budget::Charge charge_;
};

}  // namespace ashlar::daemon
