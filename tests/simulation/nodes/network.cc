// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/nodes/network.h"

#include <algorithm>
#include <utility>

namespace ashlar::simulation::nodes {

bool Wire::Passes() {
  const Network::Link& link = network_.link(from_, to_);
  if (link.cut) return false;
  const bool lost = link.lost_percent > 0 && network_.schedule().Chance(link.lost_percent);
  network_.lost += lost ? 1 : 0;
  return !lost;
}

void Wire::Send(std::function<void()> arrive) {
  if (closed_) return;
  ++under_way_;
  const Nanos wait = network_.Journey(from_, to_);
  if (order_ == Order::kAny) return SendAlone(wait, std::move(arrive));
  queue_.push_back({network_.schedule().now() + wait, std::move(arrive)});
  if (queue_.size() == 1) network_.schedule().After(wait, [self = shared_from_this()] { self->SendFirst(); });
}

void Wire::SendAlone(Nanos wait, std::function<void()> arrive) {
  network_.schedule().After(wait, [self = shared_from_this(), arrive = std::move(arrive)] {
    if (self->closed_) return;
    if (!self->Passes()) return self->SendAlone(kAgain, arrive);
    --self->under_way_;
    arrive();
  });
}

void Wire::SendFirst() {
  if (closed_ || queue_.empty()) return;
  const auto again = [self = shared_from_this()] { self->SendFirst(); };
  if (!Passes()) return network_.schedule().After(kAgain, again);
  const std::function<void()> arrive = std::move(queue_.front().arrive);
  queue_.pop_front();
  --under_way_;
  if (!queue_.empty()) network_.schedule().After(queue_.front().ready - network_.schedule().now(), again);
  arrive();
}

}  // namespace ashlar::simulation::nodes
