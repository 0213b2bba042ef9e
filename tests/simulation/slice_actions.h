// SPDX-License-Identifier: Apache-2.0
// The driver's calls in slices: any other step may happen between two of them.
#pragma once

#include <functional>
#include <list>

#include "tests/simulation/clients.h"
#include "tests/simulation/context.h"
#include "tests/simulation/history.h"
#include "tests/simulation/oracle.h"
#include "tests/simulation/prompt_actions.h"

namespace ashlar::simulation {

class SliceActions : DriverPart {
 public:
  SliceActions(Context& context, Clients& clients, History& history, Oracle& oracle, PromptActions& prompts)
      : DriverPart(context), clients_(clients), history_(history), oracle_(oracle), prompts_(prompts) {}

  void Lookup();
  void Release();
  void Close(SessionId session, const std::function<void()>& drained);
  void Tick();
  void GoOn();
  void EndAll();

 private:
  void GoOnSearching(std::list<Searching>::iterator searching);
  void Searched(Searching& searching, Match match);
  void NoteEnded();

  Clients& clients_;
  History& history_;
  Oracle& oracle_;
  PromptActions& prompts_;
};

}  // namespace ashlar::simulation
