// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/page_actions.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ashlar::simulation {

using storage::PageId;
using storage::PagePools;

namespace {

constexpr uint32_t kRegionPages = 32;
constexpr uint64_t kShared[] = {1, 2, 5};  // texts that requests share in place
constexpr uint64_t kMostTexts = 3, kMostOwn = 6, kMostMore = 5;

uint32_t PagesOf(const Text& text) {
  return TestPages::Holding(Plans().at(text).tokens);
}

std::vector<PageId> ToVector(std::span<const PageId> pages) {
  return {pages.begin(), pages.end()};
}

float* MarkOn(const TestPages& memory, PageId page) {
  return memory.Through({page}).Key(0, 0, 0);
}

bool Holds(const TestPages& memory, const Text& text, std::span<const PageId> pages) {
  return storage::LandingError(memory.Through(ToVector(pages)), Plans().at(text), ContentOf(text), 0) < kTolerance;
}

}  // namespace

void PageActions::AddRegion(TenantId tenant) {
  regions_.emplace(tenant, Region{TestPages(kRegionPages), nullptr});
}

void PageActions::Declare() {
  DeclareFor(1 + Draw(kTenants));
}

void PageActions::DeclareFor(TenantId tenant) {
  Region& region = regions_.at(tenant);
  const auto of_tenant = [tenant](const auto& item) { return item.second.tenant == tenant; };
  const bool used = std::ranges::any_of(requests_, of_tenant) || std::ranges::any_of(fillings_, of_tenant);
  const auto pool = world_.pools->Open(tenant, tenant, kRegionPages);
  if (pool.ok() == used) Fail(used ? "pages that requests hold were declared anew" : "pages at rest are held");
  if (pool.ok()) region.pool = *pool;
}

void PageActions::Admit() {
  const SessionId session = *Any(clients_.sessions);
  const TenantId tenant = TenantOf(session);
  Region& region = regions_.at(tenant);
  if (region.pool == nullptr) DeclareFor(tenant);
  Request request{
      .session = session, .tenant = tenant, .mark = static_cast<float>(next_request_), .own = Draw(kMostOwn)};
  std::vector<PagePool::Want> wants;
  for (uint64_t n = Draw(kMostTexts + 1); n > 0; --n) {
    request.texts.emplace_back(tenant, kShared[Draw(std::size(kShared))]);
    wants.push_back({Plans().at(request.texts.back()).key, PagesOf(request.texts.back())});
  }
  LeaseId name{};
  std::memcpy(name.data(), &next_request_, sizeof next_request_);
  ++next_request_;
  const uint64_t reclaimed = region.pool->levels().reclaimed_segments;
  const auto answer = world_.pools->Admit(session, tenant, name, region.pool, wants, request.own);
  if (!answer.ok()) return Fail(absl::StrCat("not admitted: ", answer.status().message()));
  Trace(answer->admission);
  if (answer->admission == 0) return CheckRefusal(tenant, wants, answer->shortage);
  if (region.pool->levels().reclaimed_segments > reclaimed) Reach(Event::kPagesReclaimed);
  requests_.emplace(name, std::move(request));
  MarkOwnPages(name);
}

void PageActions::MarkOwnPages(const LeaseId& name) {
  const Request& request = requests_.at(name);
  const PagePools::Request* const held = world_.pools->Find(request.session, name);
  if (held == nullptr) return Fail("a request is over that no session ended");
  for (const PageId page : held->pool->OwnPages(held->admission)) {
    Trace(static_cast<uint64_t>(page));
    *MarkOn(regions_.at(request.tenant).memory, page) = request.mark;
  }
}

void PageActions::Extend() {
  if (requests_.empty()) return;
  auto& [name, request] = *Any(requests_);
  const PagePools::Request* const held = world_.pools->Find(request.session, name);
  if (held == nullptr) return Fail("a request is over that no session ended");
  const uint64_t own = request.own + Draw(kMostMore);
  PagePool::Shortage shortage;
  const std::vector<PageId> before = ToVector(held->pool->OwnPages(held->admission));
  if (!held->pool->Extend(held->admission, own, shortage)) return CheckRefusal(request.tenant, {}, shortage);
  request.own = own;
  const auto now = held->pool->OwnPages(held->admission);
  if (now.size() != own || !std::equal(before.begin(), before.end(), now.begin())) {
    return Fail("a request that got more pages has not those that it had");
  }
  MarkOwnPages(name);
}

// Pages that a refusal counts as held must have a holder.
void PageActions::CheckRefusal(TenantId tenant, const std::vector<PagePool::Want>& wants,
                               const PagePool::Shortage& shortage) {
  if (shortage.needed <= shortage.free + shortage.reclaimable) Fail("a request was refused pages that there are");
  std::set<PageId> held;
  for (const auto& [name, request] : requests_) {
    const PagePools::Request* const pages = world_.pools->Find(request.session, name);
    if (pages == nullptr) return Fail("a request is over that no session ended");
    if (request.tenant != tenant) continue;
    const auto add = [&held](std::span<const PageId> some) { held.insert(some.begin(), some.end()); };
    add(pages->pool->OwnPages(pages->admission));
    for (const PagePool::Segment& segment : pages->pool->Segments(pages->admission)) add(segment.pages);
  }
  for (const auto& [number, filling] : fillings_) {
    if (filling.tenant == tenant) held.insert(filling.pages.begin(), filling.pages.end());
  }
  std::map<Key, uint64_t> wanted;
  for (const PagePool::Want& want : wants) wanted[want.key] = want.pages;
  uint64_t most = held.size();
  for (const auto& [key, pages] : wanted) most += pages;
  if (shortage.held > most) Fail("pages are held by no request");
}

void PageActions::Fill() {
  if (requests_.empty()) return;
  const auto& [name, request] = *Any(requests_);
  const PagePools::Request* const held = world_.pools->Find(request.session, name);
  if (held == nullptr) return Fail("a request is over that no session ended");
  if (request.texts.empty()) return;
  const size_t index = Draw(request.texts.size());
  const Text text = request.texts[index];
  const PagePool::Segment segment = held->pool->Segments(held->admission)[index];
  const TestPages& memory = regions_.at(request.tenant).memory;
  if (segment.pages.size() != PagesOf(text)) return Fail("a shared segment with other pages than it needs");
  switch (segment.content) {
    case PageContent::kFilled:
      Reach(Event::kPagesShared);
      if (!Holds(memory, text, segment.pages)) Fail("shared pages do not hold their segment");
      return;
    case PageContent::kBeingFilled:
      if (held->pool->Filled(held->admission, index)) Fail("a request has filled what was another's to fill");
      return;
    case PageContent::kToFill:
      break;
  }
  for (const auto& [landing, filling] : fillings_) {
    if (filling.tenant != request.tenant || filling.pages != ToVector(segment.pages)) continue;
    if (filling.request != name) Fail("pages are to be filled that another landing still writes to");
    return;
  }
  const auto writable = [&](PageId page) { return held->pool->MayWrite(page) == PagePool::Writable::kToFill; };
  if (!std::ranges::all_of(segment.pages, writable)) return Fail("pages to be filled must not be written");
  if (Draw(8) > 0 && FillFromCache(name, index, text, ToVector(segment.pages))) return;
  storage::WriteRows(memory.Through(ToVector(segment.pages)), Plans().at(text), ContentOf(text), 0);
  if (!held->pool->Filled(held->admission, index)) Fail("a request may not say that it has filled what it was to fill");
}

bool PageActions::FillFromCache(const LeaseId& name, size_t segment, const Text& text, std::vector<PageId> pages) {
  const Request& request = requests_.at(name);
  const ObjectHeader& plan = Plans().at(text);
  const storage::Query query{.kind = plan.kind, .key = plan.key, .shard = plan.shard, .tokens = plan.tokens};
  const Match match = cache().Lookup(request.session, {&query, 1});
  if (match.found[0].reason != MissReason::kNone) {
    oracle_.CheckMiss(text, match.found[0].reason);
    return false;
  }
  oracle_.CheckHit(text, match.found[0], true);
  oracle_.CheckNotErased(text, report_.step);
  clients_.leases.push_back({.session = request.session, .id = match.lease, .texts = {text}, .composed = true});
  const std::shared_ptr<PagePool> pool = regions_.at(request.tenant).pool;
  const TestPages& memory = regions_.at(request.tenant).memory;
  storage::LandTarget target{.rows = memory.Rows(), .segments = {{0, 0}}, .page_table = pages, .keep = memory.keep()};
  if (world_.bug != Bug::kDropsPagePins) {
    pool->Pin(pages);
    target.keep = {nullptr, [keep = memory.keep(), pool, pages](const void*) { pool->Unpin(pages); }};
  }
  const LandingId number = clients_.next_landing;
  fillings_[number] = {request.tenant, name, segment, text, std::move(pages)};
  Landing landing{.session = request.session, .texts = {text}, .lease = match.lease};
  landing.ended = [this, number](const Landing&, const std::vector<MissReason>& verdict) { Filled(number, verdict); };
  landings_.Start(std::move(landing), std::move(target));
  return true;
}

void PageActions::Filled(LandingId number, const std::vector<MissReason>& verdict) {
  const Filling filling = std::move(fillings_.extract(number).mapped());
  if (verdict[0] == MissReason::kCancelled || verdict[0] == MissReason::kBusy) return;
  if (verdict[0] != MissReason::kNone) return oracle_.CheckMiss(filling.text, verdict[0]);
  const auto request = requests_.find(filling.request);
  if (request == requests_.end()) return;
  const PagePools::Request* const held = world_.pools->Find(request->second.session, filling.request);
  if (held == nullptr) return Fail("a request is over that no session ended");
  if (!held->pool->Filled(held->admission, filling.segment)) Fail("a landing has filled what was another's to fill");
  if (!Holds(regions_.at(filling.tenant).memory, filling.text, filling.pages)) {
    Fail("bytes landed on shared pages are not the bytes published");
  }
  Reach(Event::kPagesFilled);
}

// Often one that does not wait for its landing.
void PageActions::EndRequest() {
  if (requests_.empty()) return;
  auto request = Any(requests_);
  if (!fillings_.empty() && Draw(2) == 0) request = requests_.find(Any(fillings_)->second.request);
  if (request == requests_.end()) return;
  world_.pools->Release(request->second.session, request->first);
  requests_.erase(request);
}

void PageActions::EndRequestsOf(SessionId session) {
  world_.pools->ReleaseAll(session);
  std::erase_if(requests_, [session](const auto& item) { return item.second.session == session; });
}

// No page is owned by two requests, or both owned and shared, or allocated while an ended request still writes to it.
// Own pages hold what their request wrote.
void PageActions::CheckPages() {
  std::map<std::pair<TenantId, PageId>, std::string> owners;
  const auto own = [&](TenantId tenant, std::span<const PageId> pages, const std::string& owner) {
    for (const PageId page : pages) {
      const auto [known, fresh] = owners.emplace(std::pair(tenant, page), owner);
      if (!fresh && known->second != owner) Fail("a page has two owners");
    }
  };
  uint64_t number = 0;
  for (const auto& [name, request] : requests_) {
    const PagePools::Request* const held = world_.pools->Find(request.session, name);
    if (held == nullptr) return Fail("a request is over that no session ended");
    const auto pages = held->pool->OwnPages(held->admission);
    if (pages.size() != request.own) Fail("a request has not the pages that it was given");
    own(request.tenant, pages, absl::StrCat("request ", ++number));
    for (const PageId page : pages) {
      if (*MarkOn(regions_.at(request.tenant).memory, page) != request.mark) {
        Fail("something has written on a request's own page");
      }
    }
    const std::vector<PagePool::Segment> segments = held->pool->Segments(held->admission);
    for (size_t i = 0; i < segments.size(); ++i) {
      own(request.tenant, segments[i].pages, absl::StrCat("text ", request.texts[i].second));
    }
  }
  for (const auto& [landing, filling] : fillings_) {
    own(filling.tenant, filling.pages, absl::StrCat("text ", filling.text.second));
  }
}

// Nothing is held any longer: all pages are free.
void PageActions::Conclude() {
  for (const auto& [tenant, region] : regions_) {
    if (region.pool == nullptr) continue;
    if (region.pool->InUse()) Fail("pages are in use when all has ended");
    if (region.pool->Admit({}, kRegionPages).admission == 0) Fail("pages are lost");
  }
}

void PageActions::Crashed() {
  fillings_.clear();
  requests_.clear();
  for (auto& [tenant, region] : regions_) region.pool.reset();
}

}  // namespace ashlar::simulation
