// SPDX-License-Identifier: Apache-2.0
// The driver's steps on hosted regions: requests are admitted to their pages, fill segments for each other, and end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "storage/sharing/page_pools.h"
#include "tests/simulation/clients.h"
#include "tests/simulation/context.h"
#include "tests/simulation/landing_actions.h"
#include "tests/simulation/oracle.h"

namespace ashlar::simulation {

using storage::PagePool;

class PageActions : DriverPart {
 public:
  PageActions(Context& context, Clients& clients, Oracle& oracle, LandingActions& landings)
      : DriverPart(context), clients_(clients), oracle_(oracle), landings_(landings) {}

  void AddRegion(TenantId tenant);  // called once per tenant, before the steps
  void Declare();
  void Admit();
  void Extend();
  void Fill();
  void EndRequest();
  void EndRequestsOf(SessionId session);
  void CheckPages();
  void Conclude();
  void Crashed();

  bool admitted() const { return !requests_.empty(); }
  bool filling() const { return !fillings_.empty(); }

 private:
  // The pages that one tenant's engines share, as allocated by their daemon.
  struct Region {
    TestPages memory;
    std::shared_ptr<PagePool> pool;  // null: not declared
  };
  struct Request {
    SessionId session;
    TenantId tenant;
    std::vector<Text> texts;
    float mark = 0;  // value on each of its own pages
    uint64_t own = 0;
  };
  struct Filling {  // filling of shared pages by a landing
    TenantId tenant;
    LeaseId request;
    size_t segment = 0;  // index of the segment in the request
    Text text;
    std::vector<storage::PageId> pages;
  };

  void DeclareFor(TenantId tenant);
  // False: it is not stored.
  bool FillFromCache(const LeaseId& name, size_t segment, const Text& text, std::vector<storage::PageId> pages);
  void Filled(LandingId number, const std::vector<MissReason>& verdict);
  void MarkOwnPages(const LeaseId& name);
  void CheckRefusal(TenantId tenant, const std::vector<PagePool::Want>& wants, const PagePool::Shortage& shortage);

  Clients& clients_;
  Oracle& oracle_;
  LandingActions& landings_;
  std::map<TenantId, Region> regions_;
  std::map<LeaseId, Request> requests_;
  std::map<LandingId, Filling> fillings_;
  uint64_t next_request_ = 1;
};

}  // namespace ashlar::simulation
