// SPDX-License-Identifier: Apache-2.0
// Prober in Python: how much of a prompt nodes have cached.
#include <nanobind/nanobind.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "ashlar/router.h"
#include "client/python/src/arguments.h"
#include "client/python/src/arrays.h"
#include "client/python/src/handles.h"

namespace ashlar::python {
namespace {

struct PyProber {
  Held<engine::Prober> prober{std::make_shared<engine::Prober>()};  // never null
};

std::unique_ptr<PyProber> Open(nb::handle rpc_socket, nb::handle session_socket, nb::handle name,
                               nb::handle timeout_ms) {
  const std::string rpc = Path("rpc_socket", rpc_socket), session = Path("session_socket", session_socket);
  const std::string shown = Text("name", name);
  const engine::ProberOptions options{.rpc_socket = rpc.c_str(),
                                      .session_socket = session.c_str(),
                                      .name = shown.c_str(),
                                      .timeout_ms = Whole<uint32_t>("timeout_ms", timeout_ms)};
  auto self = std::make_unique<PyProber>();
  Checked(self->prober.WithoutGil([&](engine::Prober& prober) { return engine::Prober::Open(options, &prober); }));
  return self;
}

nb::dict DictOf(const engine::NodeProbe& node) {
  nb::dict tiers;
  for (uint8_t tier = 0; tier < std::size(node.tier_tokens); ++tier) {
    if (node.tier_tokens[tier] > 0) tiers[engine::TierName(tier)] = node.tier_tokens[tier];
  }
  nb::dict out;
  out["node"] = node.node;
  out["prompt_tokens"] = node.prompt_tokens;
  out["prefix_tokens"] = node.prefix_tokens;
  out["segment_tokens"] = node.segment_tokens;
  out["tiers"] = tiers;
  out["fetch_seconds"] = node.fetch_seconds;
  out["compute_seconds"] = node.compute_seconds;
  out["wait_seconds"] = node.wait_seconds;
  out["queued_tokens"] = node.queued_tokens;
  out["tokens_per_second"] = node.tokens_per_second;
  out["sessions"] = node.sessions;
  out["landings"] = node.landings;
  out["draining"] = node.draining;
  return out;
}

nb::tuple Probe(PyProber& self, nb::handle tokens, nb::handle segments, nb::handle namespace_, nb::handle model_id,
                nb::handle conversation, nb::handle salt, nb::handle cluster) {
  const Integers given("tokens", tokens);
  const std::vector<uint64_t> lengths = WholeNumbers<uint64_t>("segments", segments);
  const std::string ns = Text("namespace", namespace_), id = Text("model_id", model_id);
  const std::string of_conversation = Bytes("conversation", conversation), salt_bytes = Bytes("salt", salt);
  engine::Prompt prompt{.tokens = given.data(),
                        .token_count = given.size(),
                        .segment_lengths = lengths.data(),
                        .segment_count = lengths.size()};
  if (!of_conversation.empty() && of_conversation.size() != sizeof prompt.conversation)
    throw Refused("conversation", "expected 16 bytes");
  std::ranges::copy(of_conversation, prompt.conversation);
  prompt.salt = salt_bytes.data();
  prompt.salt_bytes = salt_bytes.size();
  const engine::ProbeModel model{.ns = ns.c_str(), .model_id = id.c_str()};
  const bool all = Flag("cluster", cluster);
  engine::Probed probed;
  Checked(self.prober.WithoutGil([&](engine::Prober& prober) { return prober.Probe(model, prompt, all, &probed); }));
  uint32_t count = 0;
  const engine::NodeProbe* const nodes = probed.nodes(&count);
  nb::list list;
  for (uint32_t i = 0; i < count; ++i) list.append(DictOf(nodes[i]));
  return nb::make_tuple(list, probed.cheapest());
}

}  // namespace

void BindProber(nb::module_& module) {
  nb::class_<PyProber>(module, "Prober")
      .def_static("open", &Open, Any("rpc_socket"), Any("session_socket"), Any("name"), Any("timeout_ms"))
      .def("probe", &Probe, Any("tokens"), Any("segments"), Any("namespace"), Any("model_id"), Any("conversation"),
           Any("salt"), Any("cluster"))
      .def("connected", [](const PyProber& self) { return self.prober->connected(); })
      .def("close", [](PyProber& self) { self.prober.Close(std::make_shared<engine::Prober>()); });
}

}  // namespace ashlar::python
