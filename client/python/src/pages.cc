// PageStore in Python: keys are bytes of 32, slots are numbers. ashlar/pages.py is what users call.
#include <nanobind/stl/shared_ptr.h>
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
};

// Slots of a call are checked here: they are numbers that Python counts.
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
      throw Refused("keys[" + std::to_string(i) + "]", std::to_string(keys[i].size()) + " bytes, not 32");
    }
    std::memcpy(read[i].bytes.data(), keys[i].c_str(), read[i].bytes.size());
  }
  return read;
}

void CheckSlots(const PageStore& store, const std::vector<uint32_t>& slots, size_t count) {
  if (slots.size() != count) throw Refused("slots", std::to_string(slots.size()) + ", not " + std::to_string(count));
  for (const uint32_t slot : slots) {
    if (slot >= store.slots()) throw Refused("slots", std::to_string(slot) + " does not exist");
  }
}

std::unique_ptr<PyPageClient> Connect(const std::string& rpc_socket, const std::string& session_socket,
                                      const std::string& name, uint32_t timeout_ms) {
  absl::StatusOr<std::unique_ptr<Client>> client = absl::UnknownError("");
  {
    nb::gil_scoped_release release;
    client = Client::Connect({.rpc_socket = rpc_socket,
                              .session_socket = session_socket,
                              .timeout = std::chrono::milliseconds(timeout_ms),
                              .name = name});
  }
  Checked(engine::ToStatus(client.status()));
  return std::make_unique<PyPageClient>(std::shared_ptr<Client>(*std::move(client)));
}

std::unique_ptr<PyPageStore> Open(const PyPageClient& self, const std::string& model_id,
                                  const std::string& weights_digest, const std::string& content, uint64_t page_bytes,
                                  uint32_t page_tokens, double tokens_per_second, uint32_t slots, uint32_t land_ms) {
  absl::StatusOr<std::unique_ptr<PageStore>> store = absl::UnknownError("");
  {
    nb::gil_scoped_release release;
    // No tokenizer gives such tokens: the identity says that they are keys, and of which pages.
    store = PageStore::Open(self.client, {.identity = {.model_id = model_id,
                                                       .weights_digest = weights_digest,
                                                       .quantization = content,
                                                       .tokenizer_digest = "page keys, 256 bits"},
                                          .page_bytes = page_bytes,
                                          .page_tokens = page_tokens,
                                          .tokens_per_second = tokens_per_second,
                                          .slots = slots,
                                          .land = std::chrono::milliseconds(land_ms)});
  }
  Checked(engine::ToStatus(store.status()));
  return std::unique_ptr<PyPageStore>(new PyPageStore{Held<PageStore>(*std::move(store))});
}

std::vector<bool> Exists(const PyPageStore& self, const std::vector<nb::bytes>& keys) {
  const std::vector<PageKey> read = ReadKeys(keys);
  return self.open().WithoutGil([&](PageStore& store) { return store.Exists(read); });
}

// (outcome, reservation) a key; no reservation where there is nothing to publish.
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

// (why it was missed or None, whether the slot is the caller's, the tier of a hit) a key.
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
    out.append(nb::make_tuple(missed, page.quiet, tier));
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
      .def("take_quiet",
           [](const PyPageStore& self, uint32_t most) {
             return self.open().WithoutGil([most](PageStore& store) { return store.TakeQuiet(most); });
           })
      .def("connected", [](const PyPageStore& self) { return self.open()->connected(); })
      .def("memory",
           [](nb::pointer_and_handle<PyPageStore> self) {
             const PageStore& store = *self.p->open();
             const size_t shape[2] = {store.slots(), store.shape().slot_bytes()};
             return nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>>(store.slot(0), 2, shape, self.h);
           })
      .def("close", [](PyPageStore& self) { self.store.Close(nullptr); });
  nb::class_<PyPageClient>(module, "PageClient")
      .def("open", &Open, nb::arg("model_id"), nb::arg("weights_digest"), nb::arg("content"), nb::arg("page_bytes"),
           nb::arg("page_tokens"), nb::arg("tokens_per_second"), nb::arg("slots"), nb::arg("land_ms"));
  module.def("connect_pages", &Connect, nb::arg("rpc_socket"), nb::arg("session_socket"), nb::arg("name"),
             nb::arg("timeout_ms"));
}

}  // namespace ashlar::python
