// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/directory/directory_follower.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace ashlar::daemon {

void DirectoryFollower::Reconcile() {
  std::map<ShortDigest, uint32_t> followed;
  {
    MutexLock lock(connection_.shared.mutex);
    followed = connection_.shared.followed;
  }
  for (auto at = follows_.begin(); at != follows_.end();) {
    if (followed.contains(at->first)) {
      ++at;
      continue;
    }
    StopWatch(&at->second);
    connection_.shared.mirror.Close(at->first);
    at = follows_.erase(at);
  }
  // Namespaces are read one after the other: concurrent pages would only share the connection.
  bool reading = std::ranges::any_of(follows_, [](const auto& item) { return item.second.reading > 0; });
  for (const auto& [ns, count] : followed) {
    const auto [at, fresh] = follows_.try_emplace(ns);
    Follow& follow = at->second;
    if (fresh) connection_.shared.mirror.Open(ns);
    if (follow.watch != 0 || follow.reading > 0) continue;
    if (follow.revision > 0) {
      follow.watch = ++last_watch_;
      watches_[follow.watch] = ns;
      connection_.StartWatch(connection_.keys.EntriesOf(ns), follow.revision, follow.watch);
    } else if (!reading) {
      reading = true;
      follow.reading = ++last_read_;
      if (follow.read_at > 0) {
        ReadPage(ns, follow.reading, follow.read_to, follow.read_at, follow.slices);
        continue;
      }
      if (connection_.membership.believe_until == 0) connection_.shared.mirror.BeginRound(ns);
      ReadPage(ns, follow.reading, connection_.keys.EntriesOf(ns), 0, 0);
    }
  }
}

void DirectoryFollower::ReadPage(const ShortDigest& ns, uint64_t number, const std::string& from, int64_t revision,
                                 uint32_t slices) {
  const std::string end = *connection_.keys.SliceEnd(from, std::max(slices, 1u));
  etcdserverpb::RangeRequest request;
  request.set_key(from);
  request.set_range_end(end);
  request.set_limit(connection_.page_entries);
  request.set_revision(revision);
  const storage::Nanos began = connection_.clock.Now(), limit = connection_.client->Limit();
  connection_.client->Range(request, [=, this](const absl::Status& status, const auto& response) {
    connection_.FitPage(status, connection_.clock.Now() - began, limit);
    const auto at = follows_.find(ns);
    if (at == follows_.end() || at->second.reading != number) return;  // no longer followed
    if (absl::IsOutOfRange(status)) {                                  // compacted meanwhile: start again
      at->second.reading = at->second.read_at = 0;
      return;
    }
    if (!status.ok()) return connection_.Fail("cannot read entries", status);
    connection_.Note(response.header());
    for (const mvccpb::KeyValue& pair : response.kvs()) PutEntry(pair);
    const int64_t of = revision > 0 ? revision : response.header().revision();
    const uint32_t cut = slices > 0 ? slices : SlicesFor(response.count());
    const bool more = response.more() && !response.kvs().empty();
    if (more || end != RangeEnd(connection_.keys.EntriesOf(ns))) {
      Follow& follow = at->second;
      follow.read_to = more ? response.kvs(response.kvs_size() - 1).key() + '\0' : end;
      follow.read_at = of;
      follow.slices = cut;
      return ReadPage(ns, number, std::string(follow.read_to), of, cut);
    }
    if (connection_.membership.believe_until == 0) connection_.shared.mirror.EndRound(ns);
    at->second.reading = at->second.read_at = 0;
    at->second.revision = of;
    MutexLock lock(connection_.shared.mutex);
    ++connection_.shared.counted.resyncs;
  });
}

void DirectoryFollower::StopWatch(Follow* follow) {
  if (follow->watch == 0) return;
  watches_.erase(follow->watch);
  etcdserverpb::WatchRequest request;
  request.mutable_cancel_request()->set_watch_id(std::exchange(follow->watch, 0));
  connection_.client->Watch(request);
}

void DirectoryFollower::Got(const etcdserverpb::WatchResponse& response, int64_t revision) {
  for (const mvccpb::Event& event : response.events()) {
    if (event.type() == mvccpb::Event::PUT) {
      PutEntry(event.kv());
      continue;
    }
    const std::optional<DirectoryKeys::Entry> entry = connection_.keys.ReadEntry(event.kv().key());
    if (entry.has_value() && entry->incarnation != connection_.membership.self->incarnation) {
      connection_.shared.mirror.Remove(entry->id, entry->incarnation);
    }
  }
  Follow& follow = follows_.at(watches_.at(response.watch_id()));
  follow.revision = std::max(follow.revision, revision);
}

void DirectoryFollower::Compacted(int64_t watch) {
  const auto found = watches_.find(watch);
  Follow& follow = follows_.at(found->second);
  follow.watch = follow.revision = 0;
  watches_.erase(found);
}

void DirectoryFollower::ReadAgain() {
  for (auto& [ns, follow] : follows_) follow.ReadAgain();
}

void DirectoryFollower::Restart() {
  for (auto& [ns, follow] : follows_) {
    StopWatch(&follow);
    follow.ReadAgain();
    follow.reading = 0;
  }
}

void DirectoryFollower::Disconnected() {
  watches_.clear();
  for (auto& [ns, follow] : follows_) {
    follow.watch = 0;
    follow.reading = 0;
  }
}

void DirectoryFollower::PutEntry(const mvccpb::KeyValue& pair) {
  const std::optional<DirectoryKeys::Entry> entry = connection_.keys.ReadEntry(pair.key());
  if (entry.has_value() && entry->incarnation == connection_.membership.self->incarnation) return;
  const std::optional<Holding> holding =
      entry.has_value() ? DecodeHolding(pair.value(), entry->id) : std::optional<Holding>();
  if (holding.has_value()) return connection_.shared.mirror.Put(entry->id, entry->incarnation, *holding);
  MutexLock lock(connection_.shared.mutex);
  ++connection_.shared.counted.entries_unread;
}

}  // namespace ashlar::daemon
