// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/transport/ucx_settings.h"

#include <arpa/inet.h>
#include <ifaddrs.h>

#include <cstdlib>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace ashlar::daemon {
namespace {

struct Default {
  const char* name;  // without the prefix UCX_
  const char* value;
  bool fixed = false;
};

// TCP segments hold a whole piece of a transfer (kPieceBytes) with headers, so that a piece is received in one buffer
// and copied once. UCX 1.17 and later require full names of transports' settings.
constexpr unsigned kPrefixesSince = 17;

constexpr Default kDefaults[] = {
    // No shared memory between daemons: UCX does not support it together with error handling of peers.
    {"TLS", "", true},  // set by the caller
    // A piece is handled when it is complete; UCX does not write to targets.
    {"RNDV_THRESH", "inf", true},
    {"TCP_PUT_ENABLE", "n", true},
    {"TCP_TX_SEG_SIZE", "260k"},
    {"TCP_RX_SEG_SIZE", "260k"},
    {"TCP_MAX_IOV", "16"},
    {"MAX_EAGER_RAILS", "1"},
    // UCX logs a line or a stack trace for many peer messages, and peers must not fill the log.
    {"LOG_LEVEL", "FATAL"},
    // A restarted daemon gets its port back.
    {"TCP_CM_REUSEADDR", "y"},
    // Only the interface of the given address carries data. If the two sides differ in this, UCX waits without end.
    {"CM_USE_ALL_DEVICES", "n", true},
    {"TCP_KEEPIDLE", "5s"},
    {"TCP_KEEPINTVL", "2s"},
    {"TCP_KEEPCNT", "3"},
};

}  // namespace

std::string InterfaceOf(const std::string& address) {
  in_addr four{};
  in6_addr six{};
  const bool is_four = inet_pton(AF_INET, address.c_str(), &four) == 1;
  if (!is_four && inet_pton(AF_INET6, address.c_str(), &six) != 1) return "";
  if (is_four && (ntohl(four.s_addr) >> 24) == 127) return "lo";
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return "";
  std::string found;
  for (const ifaddrs* each = all; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != (is_four ? AF_INET : AF_INET6)) continue;
    const bool same = is_four
                          ? reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr.s_addr == four.s_addr
                          : IN6_ARE_ADDR_EQUAL(&reinterpret_cast<const sockaddr_in6*>(each->ifa_addr)->sin6_addr, &six);
    if (same) found = each->ifa_name;
  }
  freeifaddrs(all);
  return found;
}

namespace {

// Older releases list a transport's setting without the transport's name.
std::string NameInTable(const std::string& name) {
  unsigned major = 0, minor = 0, release = 0;
  ucp_get_version(&major, &minor, &release);
  if (major > 1 || minor >= kPrefixesSince) return name;
  return std::string(absl::StripPrefix(name, "TCP_"));
}

}  // namespace

absl::Status ApplyUcxSettings(const TransportOptions& options, const std::string& transports, ucp_config_t* config,
                              std::vector<UcxSetting>& in_force) {
  const auto set = [&](const std::string& name, const std::string& value, const char* from) {
    if (ucp_config_modify(config, NameInTable(name).c_str(), value.c_str()) != UCS_OK) {
      return absl::InvalidArgumentError(absl::StrCat("UCX_", name, ": UCX refuses ", value));
    }
    std::erase_if(in_force, [&](const UcxSetting& setting) { return setting.name == absl::StrCat("UCX_", name); });
    in_force.push_back({absl::StrCat("UCX_", name), value, from});
    return absl::OkStatus();
  };
  std::vector<Default> defaults(std::begin(kDefaults), std::end(kDefaults));
  defaults[0].value = transports.c_str();
  const std::string interface = options.expect_rdma ? "" : InterfaceOf(options.listen.host);
  if (!interface.empty()) defaults.push_back({"NET_DEVICES", interface.c_str()});
  for (const Default& each : defaults) {
    const char* environment = std::getenv(absl::StrCat("UCX_", each.name).c_str());
    const bool theirs = environment != nullptr && !each.fixed;
    if (absl::Status s = set(each.name, theirs ? environment : each.value, theirs ? "environment" : "ashlar");
        !s.ok()) {
      return s;
    }
  }
  for (const auto& [name, value] : options.ucx) {
    if (!absl::StartsWith(name, "UCX_"))
      return absl::InvalidArgumentError(
          absl::StrCat(name, ": not a UCX variable; expected a name that starts with UCX_"));
    for (const Default& each : defaults) {
      if (each.fixed && name.substr(4) == each.name) {
        return absl::InvalidArgumentError(absl::StrCat(name, ": the daemon sets this variable itself; remove it"));
      }
    }
    if (absl::Status s = set(name.substr(4), value, "configuration"); !s.ok()) return s;
  }
  return absl::OkStatus();
}

}  // namespace ashlar::daemon
