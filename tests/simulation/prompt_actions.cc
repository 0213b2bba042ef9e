// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/prompt_actions.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "proto/limits.h"

namespace ashlar::simulation {
namespace {

constexpr size_t kTalks = 4, kWritten = 200;
constexpr int32_t kOther = 9;  // a token that occurs in no text
constexpr uint64_t kMostInside = 3;
constexpr size_t kMostCommits = 16;  // in progress, of one session

}  // namespace

// Usually a prefix of some text, and often one that was committed, or that diverges inside its span.
Asked PromptActions::AnyPrompt(SessionId session) {
  const TenantId tenant = TenantOf(session);
  const Prompts& prompts = Prompts::Of(tenant);
  const Tokens& text = prompts.tokens(Draw(prompts.size()));
  Asked asked{.tokens = text, .conversation = AnyConversation(), .match = {}};
  asked.tokens.resize(2 + Draw(text.size() - 1));
  if (!talks_[tenant].empty() && Draw(4) > 0) {
    const auto& talks = talks_[tenant];
    const auto spanning = std::ranges::find_if(talks, [](const auto& talk) { return talk.span_begin > 0; });
    const Prompts::Offer& offer = spanning != talks.end() && Draw(2) == 0 ? *spanning : *Any(talks);
    const Tokens& committed = prompts.tokens(offer.text);
    const uint64_t parts =
        offer.span_begin > 0 && Draw(4) > 0 ? offer.span_begin + 1 + Draw(offer.end - offer.span_begin) : offer.end;
    asked.tokens.assign(committed.begin(), committed.begin() + static_cast<ptrdiff_t>(parts));
    if (Draw(4) > 0) asked.conversation = offer.conversation;
  }
  if (Draw(4) > 0) asked.tokens.push_back(kOther);
  return asked;
}

void PromptActions::Land(Lease& lease) {
  const storage::MatchedPrefix& prefix = lease.asked->match.prefix;
  Landing landing{.session = lease.session, .asked = lease.asked, .lease = lease.id};
  landing.pages = std::make_unique<TestPages>(TestPages::Holding(lease.asked->tokens.size()));
  clients_.Use(lease.id, prefix.provenance == Provenance::kComposed);
  storage::LandTarget target = storage::PrefixEngine::Target(*landing.pages, prefix);
  landing.ended = [this](const Landing& ended, const std::vector<MissReason>& verdict) { Landed(ended, verdict); };
  landings_.Start(std::move(landing), std::move(target));
}

void PromptActions::Landed(const Landing& landing, const std::vector<MissReason>& verdict) {
  const Asked& asked = *landing.asked;
  const storage::MatchedPrefix& prefix = asked.match.prefix;
  const TenantId tenant = TenantOf(landing.session);
  for (size_t i = 0; i < verdict.size(); ++i) {
    switch (verdict[i]) {
      case MissReason::kNone:
      case MissReason::kCancelled:
      case MissReason::kBusy:
        break;
      case MissReason::kEvicted:
        if (!history_.evicted_prefixes) Fail("a leased prefix was evicted");
        break;
      case MissReason::kChecksumFailed:
        if (!oracle_.Corrupted(tenant)) Fail("a prefix is corrupt, and nothing corrupted it");
        break;
      case MissReason::kTierError:
        if (!oracle_.TierFailed()) Fail("a prefix met a tier error that no tier had");
        break;
      default:
        Fail("a leased prefix is missed for no good reason");
    }
  }
  if (!std::ranges::all_of(verdict, [](MissReason reason) { return reason == MissReason::kNone; })) return;
  const Prompts& prompts = Prompts::Of(tenant);
  if (!prompts.RowsAre(*landing.pages, asked.tokens, prefix.depth)) {
    return Fail("rows landed are not the rows committed");
  }
  Reach(prefix.own ? Event::kOwnLanded : Event::kPrefixLanded);
  const auto lease = std::ranges::find_if(
      clients_.leases, [&](const Lease& each) { return each.id == landing.lease && each.session == landing.session; });
  if (lease == clients_.leases.end()) return;  // other objects may have overwritten the bytes in place
  if (!prompts.TensorsAre(world_.top(), asked.match, asked.tokens))
    Fail("states in place are not the states committed");
  if (prefix.span_tokens > 0) Reach(Event::kSpanLanded);
}

void PromptActions::Commit() {
  SessionId session = *Any(clients_.sessions);
  LeaseId name{};
  bool composed = false, vouched = true;
  Prompts::Offer offer{.conversation = AnyConversation()};
  if (!clients_.leases.empty() && Draw(2) == 0) {  // like an engine that continues from its match
    const Lease& lease = *Any(clients_.leases);
    name = lease.id;
    if (Draw(8) > 0) session = lease.session;
    const bool held = std::ranges::any_of(
        clients_.leases, [&](const Lease& each) { return each.session == session && each.id == name; });
    composed = lease.composed;
    vouched = held && !composed;
    if (lease.asked) offer.conversation = lease.asked->conversation;
  }
  const TenantId tenant = TenantOf(session);
  const Prompts& prompts = Prompts::Of(tenant);
  offer.text = Draw(prompts.size());
  const std::vector<uint64_t>& depths = prompts.depths(offer.text);
  const size_t end = Draw(depths.size());
  offer.end = depths[end];
  for (size_t i = 0; i < end && offer.inside.size() < kMostInside; ++i) {
    if (Draw(depths.size()) < 2 || (i + 1 == end && Draw(2) == 0)) offer.inside.push_back(depths[i]);
  }
  if (!offer.inside.empty() && offer.end - offer.inside.back() <= kSpanTokens && Draw(3) > 0) {
    offer.span_begin = offer.inside.back();
  }
  offer.others_states = world_.bug == Bug::kCommitsOtherStates && Draw(4) == 0;
  offer.shifts_span = world_.bug == Bug::kShiftsSpans;
  const bool has_conversation = offer.conversation != ConversationId{};
  // Usually an engine tells the truth. A text that is wrongly called exact must be detected.
  const bool says_composed = has_conversation && (composed ? Draw(4) > 0 : Draw(4) == 0);
  const auto make = [&](const Prompts::Offer& of) {
    storage::PrefixCommit commit = prompts.Commit(of, Rebuilds(session));
    commit.provenance = says_composed ? Provenance::kComposed : Provenance::kExact;
    commit.lease = name;
    return commit;
  };
  const bool refused = !says_composed && !vouched;
  if (!refused && !history_.drains) {
    const storage::PrefixCommit commit = make(offer);
    offered_[tenant].Add(commit);
    Remember(tenant, commit);
    talks_[tenant].push_back(offer);
    if (talks_[tenant].size() > kTalks) talks_[tenant].pop_front();
  }
  if (world_.bug == Bug::kMixesConversations && has_conversation) {
    offer.conversation[0] = static_cast<uint8_t>(1 + offer.conversation[0] % kConversations);
  }
  const uint64_t number = next_commit_++;
  const bool unavailable = history_.drains;
  clients_.commits[number] = {.session = session, .refused = refused && !unavailable, .spanning = offer.span_begin > 0};
  cache().Commit(session, make(offer), [this, number, unavailable](const std::vector<CommitOutcome>& outcomes) {
    const bool all =
        std::ranges::all_of(outcomes, [](CommitOutcome outcome) { return outcome == CommitOutcome::kUnavailable; });
    if (unavailable && !all) Fail("a cache that drains keeps what is committed");
    Committed(number, outcomes);
  });
}

// Records the keys under which the disk may have what is committed.
void PromptActions::Remember(TenantId tenant, const storage::PrefixCommit& commit) {
  const auto add = [&](const PrefixKeys& keys) {
    for (const storage::PrefixCommit::Checkpoint& checkpoint : commit.checkpoints) {
      written_.emplace_back(tenant, keys.Checkpoint(checkpoint.depth));
    }
    for (const Key& block : keys.blocks()) written_.emplace_back(tenant, block);
    if (commit.span) written_.emplace_back(tenant, keys.Span(commit.span->begin, commit.text.tokens().size()));
  };
  add(commit.text.shared());
  if (commit.text.own()) add(*commit.text.own());
  while (written_.size() > kWritten) written_.pop_front();
}

void PromptActions::Committed(uint64_t number, const std::vector<CommitOutcome>& outcomes) {
  const auto found = clients_.commits.find(number);
  if (found == clients_.commits.end()) return Fail("a commit was answered twice");
  const Committing commit = found->second;
  clients_.commits.erase(found);
  for (const CommitOutcome outcome : outcomes) {
    Trace(static_cast<uint64_t>(outcome));
    if ((outcome == CommitOutcome::kBadSource) != commit.refused) {
      Fail(commit.refused ? "what was composed was taken for exact" : "a commit was refused that was right");
    }
    if (outcome == CommitOutcome::kBusy && world_.executor.refused() == 0 && clients_.commits.size() < kMostCommits) {
      Fail("a commit was refused by a queue that had space");
    }
    if (outcome == CommitOutcome::kKept) Reach(Event::kKept);
    if (outcome == CommitOutcome::kKeptAsSpan) Reach(Event::kKeptAsSpan);
  }
}

void PromptActions::Operate() {
  if (written_.empty()) return;
  const auto& [tenant, key] = *Any(written_);
  switch (Draw(3)) {
    case 0:
      history_.evicted_prefixes = true;  // set before, because waiting landings are notified during the eviction
      cache().retention().Evict(tenant, key);
      break;
    case 1:
      if (cache().retention().Pin(tenant, key, 0)) history_.pinned_prefixes.insert({tenant, key});
      break;
    default:
      for (const auto& [whose, pinned] : history_.pinned_prefixes) cache().retention().Unpin(whose, pinned);
      history_.pinned_prefixes.clear();
  }
}

// Checks a lookup's answer about a prefix, as far as possible without the bytes.
void PromptActions::Check(const Lease& lease, const Match& match, size_t queries) {
  const storage::MatchedPrefix& prefix = match.prefix;
  Trace(prefix.depth);
  if (prefix.depth == 0) return;
  const Asked& asked = *lease.asked;
  if (prefix.depth >= asked.tokens.size()) return Fail("nothing of a prompt is left to compute");
  if (!offered_[TenantOf(lease.session)].Has(prefix, asked.tokens, asked.conversation)) {
    return Fail("a prefix that its tenant, or its conversation, never committed");
  }
  if (prefix.span_tokens > 0 && !Rebuilds(lease.session)) return Fail("a span, to an engine that cannot rebuild");
  const auto begin = static_cast<uint32_t>(queries);
  const auto blocks = static_cast<uint32_t>(prefix.checkpoint_depth() / limits::kPrefixBlockTokens);
  const uint32_t checkpoint = begin + blocks;
  const uint32_t span = prefix.span_tokens > 0 ? checkpoint + 1 : storage::PrefixObjects::kNone;
  if (prefix.objects != storage::PrefixObjects{begin, blocks, checkpoint, span} ||
      match.found.size() != queries + prefix.objects.size()) {
    return Fail("a prefix of too many objects, or too few");
  }
  for (size_t i = queries; i < match.found.size(); ++i) {
    if (match.found[i].reason != MissReason::kNone) return Fail("a prefix of which something is missing");
  }
}

}  // namespace ashlar::simulation
