// SPDX-License-Identifier: Apache-2.0
// Part of DirectorySession: updates from etcd to the mirror.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/peer/directory/directory_session.h"

namespace ashlar::daemon {

void DirectorySession::Reconcile() {
  std::map<ShortDigest, uint32_t> followed;
  {
    MutexLock lock(shared_.mutex);
    followed = shared_.followed;
  }
  for (auto at = follows_.begin(); at != follows_.end();) {
    if (followed.contains(at->first)) {
      ++at;
      continue;
    }
    StopWatch(&at->second);
    shared_.mirror.Close(at->first);
    at = follows_.erase(at);
  }
  // Namespaces are read one after the other: concurrent pages would only share the connection.
  bool reading = std::ranges::any_of(follows_, [](const auto& item) { return item.second.reading > 0; });
  for (const auto& [ns, count] : followed) {
    const auto [at, fresh] = follows_.try_emplace(ns);
    Follow& follow = at->second;
    if (fresh) shared_.mirror.Open(ns);
    if (follow.watch != 0 || follow.reading > 0) continue;
    if (follow.revision > 0) {
      follow.watch = ++last_watch_;
      watches_[follow.watch] = ns;
      StartWatch(keys_.EntriesOf(ns), follow.revision, follow.watch);
    } else if (!reading) {
      reading = true;
      follow.reading = ++last_read_;
      if (follow.read_at > 0) {
        ReadPage(ns, follow.reading, follow.read_to, follow.read_at, follow.slices);
        continue;
      }
      if (believe_until_ == 0) shared_.mirror.BeginRound(ns);
      ReadPage(ns, follow.reading, keys_.EntriesOf(ns), 0, 0);
    }
  }
}

void DirectorySession::ReadPage(const ShortDigest& ns, uint64_t number, const std::string& from, int64_t revision,
                                uint32_t slices) {
  const std::string end = *keys_.SliceEnd(from, std::max(slices, 1u));
  etcdserverpb::RangeRequest request;
  request.set_key(from);
  request.set_range_end(end);
  request.set_limit(page_entries_);
  request.set_revision(revision);
  const storage::Nanos began = clock_.Now(), limit = client_->Limit();
  client_->Range(request, [=, this](const absl::Status& status, const auto& response) {
    FitPage(status, clock_.Now() - began, limit);
    const auto at = follows_.find(ns);
    if (at == follows_.end() || at->second.reading != number) return;  // no longer followed
    if (absl::IsOutOfRange(status)) {                                  // compacted meanwhile: start again
      at->second.reading = at->second.read_at = 0;
      return;
    }
    if (!status.ok()) return Fail("cannot read entries", status);
    Note(response.header());
    for (const mvccpb::KeyValue& pair : response.kvs()) PutEntry(pair);
    const int64_t of = revision > 0 ? revision : response.header().revision();
    const uint32_t cut = slices > 0 ? slices : SlicesFor(response.count());
    const bool more = response.more() && !response.kvs().empty();
    if (more || end != RangeEnd(keys_.EntriesOf(ns))) {
      Follow& follow = at->second;
      follow.read_to = more ? response.kvs(response.kvs_size() - 1).key() + '\0' : end;
      follow.read_at = of;
      follow.slices = cut;
      return ReadPage(ns, number, std::string(follow.read_to), of, cut);
    }
    if (believe_until_ == 0) shared_.mirror.EndRound(ns);
    at->second.reading = at->second.read_at = 0;
    at->second.revision = of;
    MutexLock lock(shared_.mutex);
    ++shared_.counted.resyncs;
  });
}

// A page takes only a small part of a call's time limit at the throughput of this connection.
void DirectorySession::FitPage(const absl::Status& status, storage::Nanos took, storage::Nanos limit) {
  constexpr storage::Nanos kSlow = 4, kQuick = 16;
  if (absl::IsDeadlineExceeded(status)) page_entries_ /= 4;
  if (status.ok() && took > limit / kSlow) page_entries_ /= 2;
  if (status.ok() && took < limit / kQuick) page_entries_ *= 2;
  page_entries_ = std::clamp(page_entries_, kLeastPageEntries, kPageEntries);
}

void DirectorySession::StopWatch(Follow* follow) {
  if (follow->watch == 0) return;
  watches_.erase(follow->watch);
  etcdserverpb::WatchRequest request;
  request.mutable_cancel_request()->set_watch_id(std::exchange(follow->watch, 0));
  client_->Watch(request);
}

void DirectorySession::StartWatch(const std::string& prefix, int64_t revision, int64_t id) {
  etcdserverpb::WatchRequest request;
  etcdserverpb::WatchCreateRequest* create = request.mutable_create_request();
  create->set_key(prefix);
  create->set_range_end(RangeEnd(prefix));
  create->set_start_revision(revision + 1);
  create->set_progress_notify(true);
  create->set_watch_id(id);
  client_->Watch(request);
}

void DirectorySession::GotWatch(const etcdserverpb::WatchResponse& response) {
  Note(response.header());
  const auto watch = watches_.find(response.watch_id());
  Follow* const follow = watch == watches_.end() ? nullptr : &follows_.at(watch->second);
  const bool erasures = response.watch_id() == kErasureWatch;
  const bool members = follow == nullptr && response.watch_id() <= kMemberWatch;
  if (follow == nullptr && !members && !erasures) return;  // no longer followed
  if (response.canceled()) {
    if (follow != nullptr && response.compact_revision() > 0) {
      follow->watch = follow->revision = 0;
      watches_.erase(watch);
      return;
    }
    return Fail(absl::UnavailableError(absl::StrCat("etcd ended a watch: ", response.cancel_reason())));
  }
  if (response.created()) return;
  // etcd reports its revision from time to time, even without changes.
  int64_t last = response.events().empty() ? response.header().revision() : 0;
  for (const mvccpb::Event& event : response.events()) {
    last = std::max(last, event.kv().mod_revision());
    if (members) {
      GotMemberEvent(event);
    } else if (erasures) {
      GotErasureEvent(event);
    } else {
      GotEntryEvent(event);
    }
    if (phase_ != Phase::kJoined) return;
  }
  if (follow != nullptr) follow->revision = std::max(follow->revision, last);
  if (members && !response.events().empty()) PublishMembers();
  if (erasures && !response.events().empty() && events_.erasures_changed) events_.erasures_changed();
  MutexLock lock(shared_.mutex);
  shared_.counted.watch_events += response.events_size();
  shared_.counted.revision_lag = response.header().revision() - last;
}

void DirectorySession::GotMemberEvent(const mvccpb::Event& event) {
  const std::optional<uint64_t> incarnation = keys_.ReadMember(event.kv().key());
  if (!incarnation.has_value()) return;
  if (event.type() == mvccpb::Event::DELETE) {
    if (*incarnation == self_->incarnation) {
      lease_ = 0;
      return Fail(absl::UnavailableError("the lease has expired"));
    }
    records_.erase(*incarnation);
    sweep_at_ = std::min(sweep_at_, clock_.Now() + lease_time_);  // time limit for its return
    return;
  }
  std::optional<Member> member = DecodeMember(event.kv().value(), *incarnation);
  if (!member.has_value()) return;
  records_[*incarnation] = {std::make_shared<const Member>(*std::move(member)), event.kv().create_revision()};
}

void DirectorySession::GotEntryEvent(const mvccpb::Event& event) {
  if (event.type() == mvccpb::Event::PUT) return PutEntry(event.kv());
  const std::optional<DirectoryKeys::Entry> entry = keys_.ReadEntry(event.kv().key());
  if (entry.has_value() && entry->incarnation != self_->incarnation) {
    shared_.mirror.Remove(entry->id, entry->incarnation);
  }
}

void DirectorySession::PutEntry(const mvccpb::KeyValue& pair) {
  const std::optional<DirectoryKeys::Entry> entry = keys_.ReadEntry(pair.key());
  if (entry.has_value() && entry->incarnation == self_->incarnation) return;
  const std::optional<Holding> holding =
      entry.has_value() ? DecodeHolding(pair.value(), entry->id) : std::optional<Holding>();
  if (holding.has_value()) return shared_.mirror.Put(entry->id, entry->incarnation, *holding);
  MutexLock lock(shared_.mutex);
  ++shared_.counted.entries_unread;
}

}  // namespace ashlar::daemon
