// The calls of ashlar.v1.Peer (ashlar/v1/peer.proto) behind its Greet, a row each, in its order: the daemons' service
// and client are made from this table.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

// ROW(name): the call's messages are Peer<name>Request and Peer<name>Reply of ashlar::v1. All are unary.
#define ASHLAR_PEER_CALLS(ROW) \
  ROW(Open)                    \
  ROW(Renew)                   \
  ROW(Close)

namespace ashlar::v1 {
#define ASHLAR_DECLARE(name) \
  class Peer##name##Request; \
  class Peer##name##Reply;
ASHLAR_PEER_CALLS(ASHLAR_DECLARE)
#undef ASHLAR_DECLARE
}  // namespace ashlar::v1

namespace ashlar {

enum class PeerCall : uint8_t {
#define ASHLAR_NAME(name) k##name,
  ASHLAR_PEER_CALLS(ASHLAR_NAME)
#undef ASHLAR_NAME
};

inline constexpr auto kPeerCallNames = std::to_array<absl::string_view>({
#define ASHLAR_NAME(name) #name,
    ASHLAR_PEER_CALLS(ASHLAR_NAME)
#undef ASHLAR_NAME
});

constexpr absl::string_view Name(PeerCall call) {
  return kPeerCallNames[static_cast<size_t>(call)];
}

}  // namespace ashlar
