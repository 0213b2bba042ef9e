// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/directory/directory_connection.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace ashlar::daemon {

bool DirectoryMembership::IsOldest() const {
  return std::ranges::none_of(records, [&](const auto& each) { return each.second.create_revision < registered; });
}

void DirectoryConnection::Fail(absl::string_view during, const absl::Status& status) {
  const std::string what = status.ok() ? "etcd closed the stream" : std::string(status.message());
  fail(absl::UnavailableError(absl::StrCat(during, ": ", what)));
}

void DirectoryConnection::LeaseExpired() {
  membership.lease = 0;
  fail(absl::UnavailableError("the lease has expired"));
}

void DirectoryConnection::Note(const etcdserverpb::ResponseHeader& header) {
  if (header.revision() > known.revision()) known.set_revision(header.revision());
  if (header.raft_term() > known.raft_term()) known.set_raft_term(header.raft_term());
  MutexLock lock(shared.mutex);
  shared.counted.revision = known.revision();
}

// A page takes only a small part of a call's time limit at the throughput of this connection.
void DirectoryConnection::FitPage(const absl::Status& status, storage::Nanos took, storage::Nanos limit) {
  constexpr storage::Nanos kSlow = 4, kQuick = 16;
  if (absl::IsDeadlineExceeded(status)) page_entries /= 4;
  if (status.ok() && took > limit / kSlow) page_entries /= 2;
  if (status.ok() && took < limit / kQuick) page_entries *= 2;
  page_entries = std::clamp(page_entries, kLeastPageEntries, kPageEntries);
}

void DirectoryConnection::StartWatch(const std::string& prefix, int64_t revision, int64_t id) {
  etcdserverpb::WatchRequest request;
  etcdserverpb::WatchCreateRequest* create = request.mutable_create_request();
  create->set_key(prefix);
  create->set_range_end(RangeEnd(prefix));
  create->set_start_revision(revision + 1);
  create->set_progress_notify(true);
  create->set_watch_id(id);
  client->Watch(request);
}

}  // namespace ashlar::daemon
