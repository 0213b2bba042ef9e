// SPDX-License-Identifier: Apache-2.0
// PageStore in Python: keys are bytes of 32, slots are numbers. ashlar/pages.py is what users call.
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "client/engine/status.h"
#include "client/python/src/handles.h"
#include "client/python/src/page_store.h"

namespace ashlar::python {
namespace {

struct PyPageClient {
  std::shared_ptr<Client> client;
  internal::CreatorProcess creator;
};

// Python assigns the slots' numbers, so each call checks them.
struct PyPageStore {
  Held<PageStore> store;  // null: closed

  const Held<PageStore>& open() const {
    if (store.shared() == nullptr) throw std::runtime_error("the store is closed");
    return store;
  }
};

std::vector<PageKey> ReadKeys(const std::vector<nb::bytes>& keys) {
  std::vector<PageKey> read(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    if (keys[i].size() != read[i].bytes.size()) {
      throw Refused(At("keys", i), std::to_string(keys[i].size()) + " bytes; expected 32");
    }
    std::memcpy(read[i].bytes.data(), keys[i].c_str(), read[i].bytes.size());
  }
  return read;
}

void CheckSlots(const PageStore& store, const std::vector<uint32_t>& slots, size_t count) {
  if (slots.size() != count)
    throw Refused("slots", std::to_string(slots.size()) + "; expected " + std::to_string(count));
  for (const uint32_t slot : slots) {
    if (slot >= store.slots())
      throw Refused("slots", std::to_string(slot) + " is out of range; the store has " + std::to_string(store.slots()) +
                                 " slots");
  }
}

std::unique_ptr<PyPageClient> Connect(nb::handle rpc_socket, nb::handle session_socket, nb::handle name,
                                      nb::handle timeout_ms) {
  const ClientOptions options{.rpc_socket = Path("rpc_socket", rpc_socket),
                              .session_socket = Path("session_socket", session_socket),
                              .timeout = std::chrono::milliseconds(Whole<uint32_t>("timeout_ms", timeout_ms)),
                              .name = Text("name", name)};
  absl::StatusOr<std::unique_ptr<Client>> client = absl::UnknownError("");
  {
    nb::gil_scoped_release release;
    client = Client::Connect(options);
  }
  Checked(engine::ToStatus(client.status()));
  return std::unique_ptr<PyPageClient>(new PyPageClient{.client = *std::move(client), .creator = {}});
}

std::unique_ptr<PyPageStore> Open(nb::handle given, nb::handle model_id, nb::handle weights_digest, nb::handle content,
                                  nb::handle page_bytes, nb::handle page_tokens, nb::handle tokens_per_second,
                                  nb::handle flops_per_token, nb::handle slots, nb::handle land_ms) {
  const PyPageClient& self = Bound<PyPageClient>("client", given, "ashlar.PageClient");
  Checked(engine::CheckProcess(self.creator));
  // No tokenizer produces such tokens. The identity names them as keys, and the content of the pages.
  const PageStore::Options options{.identity = {.model_id = Text("model_id", model_id),
                                                .weights_digest = Text("weights_digest", weights_digest),
                                                .quantization = Text("content", content),
                                                .tokenizer_digest = "page keys, 256 bits"},
                                   .page_bytes = Whole<uint64_t>("page_bytes", page_bytes),
                                   .page_tokens = Whole<uint32_t>("page_tokens", page_tokens),
                                   .tokens_per_second = Real("tokens_per_second", tokens_per_second),
                                   .flops_per_token = Real("flops_per_token", flops_per_token),
                                   .slots = Whole<uint32_t>("slots", slots),
                                   .land = std::chrono::milliseconds(Whole<uint32_t>("land_ms", land_ms))};
  absl::StatusOr<std::unique_ptr<PageStore>> store = absl::UnknownError("");
  {
    nb::gil_scoped_release release;
    store = PageStore::Open(self.client, options);
  }
  Checked(engine::ToStatus(store.status()));
  return std::unique_ptr<PyPageStore>(new PyPageStore{Held<PageStore>(*std::move(store))});
}

std::vector<bool> Exists(const PyPageStore& self, const std::vector<nb::bytes>& keys) {
  const std::vector<PageKey> read = ReadKeys(keys);
  return self.open().WithoutGil([&](PageStore& store) { return store.Exists(read); });
}

// (outcome, reservation) per key; no reservation if there is nothing to publish.
nb::list Reserve(const PyPageStore& self, const std::vector<nb::bytes>& keys) {
  const std::vector<PageKey> read = ReadKeys(keys);
  const std::vector<Reservation> reservations =
      self.open().WithoutGil([&](PageStore& store) { return store.Reserve(read); });
  nb::list out;
  for (const Reservation& reservation : reservations) {
    const nb::object granted = reservation.granted() ? nb::cast(reservation) : nb::none();
    out.append(nb::make_tuple(std::string(Name(reservation.outcome)), granted));
  }
  return out;
}

std::vector<std::string> Publish(const PyPageStore& self, const std::vector<Reservation>& reservations,
                                 const std::vector<uint32_t>& slots) {
  CheckSlots(*self.open(), slots, reservations.size());
  const std::vector<PublishOutcome> outcomes =
      self.open().WithoutGil([&](PageStore& store) { return store.Publish(reservations, slots); });
  std::vector<std::string> names;
  for (const PublishOutcome outcome : outcomes) names.emplace_back(Name(outcome));
  return names;
}

// (reason of the miss or None, whether the slot is the caller's, tier of the hit) per key.
nb::list Get(const PyPageStore& self, const std::vector<nb::bytes>& keys, const std::vector<uint32_t>& slots) {
  const std::vector<PageKey> read = ReadKeys(keys);
  CheckSlots(*self.open(), slots, keys.size());
  const std::vector<PageStore::Landed> landed =
      self.open().WithoutGil([&](PageStore& store) { return store.Get(read, slots); });
  nb::list out;
  for (const PageStore::Landed& page : landed) {
    const bool hit = page.reason == MissReason::kNone;
    const nb::object missed = hit ? nb::none() : nb::cast(std::string(Name(page.reason)));
    const nb::object tier = hit ? nb::cast(std::string(Name(page.tier))) : nb::none();
    out.append(nb::make_tuple(missed, page.quiesced, tier));
  }
  return out;
}

}  // namespace

void BindPages(nb::module_& module) {
  nb::class_<Reservation>(module, "PageReservation");
  nb::class_<PyPageStore>(module, "PageStore")
      .def("exists", &Exists)
      .def("reserve", &Reserve)
      .def("publish", &Publish)
      .def("abandon",
           [](const PyPageStore& self, const std::vector<Reservation>& reservations) {
             self.open().WithoutGil([&](PageStore& store) {
               store.Abandon(reservations);
               return true;
             });
           })
      .def("get", &Get)
      .def("take_quiesced",
           [](const PyPageStore& self, uint32_t most) {
             return self.open().WithoutGil([most](PageStore& store) { return store.TakeQuiesced(most); });
           })
      .def("connected", [](const PyPageStore& self) { return self.open()->connected(); })
      .def("check_open", [](const PyPageStore& self) { self.open(); })
      .def("memory",
           [](const PyPageStore& self) {
             const PageStore& store = *self.open();
             const size_t shape[2] = {store.slots(), store.shape().slot_bytes()};
             return nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>>(store.slot(0), 2, shape, KeepMapped(store.region()));
           })
      .def("close", [](PyPageStore& self) { self.store.Close(nullptr); });
  nb::class_<PyPageClient>(module, "PageClient");
  module.def("open_pages", &Open, Any("client"), Any("model_id"), Any("weights_digest"), Any("content"),
             Any("page_bytes"), Any("page_tokens"), Any("tokens_per_second"), Any("flops_per_token"), Any("slots"),
             Any("land_ms"));
  module.def("connect_pages", &Connect, Any("rpc_socket"), Any("session_socket"), Any("name"), Any("timeout_ms"));
}

}  // namespace ashlar::python
