#include "tools/ashlarctl/redaction.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ashlar::ctl {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// As ashlarctl config answers: lists are written in blocks.
constexpr const char* kConfig = R"(listen:
  rpc_socket: "/run/ashlar/rpc.sock"
tenants:
  - name: "acme"
    uids:
      - 4711
      - 4712
    dram_bytes: 1024
cluster:
  node: "rack1-07"
  name: "quarry"
  control_address: "10.1.2.3:7461"
  peers:
    - node: "rack1-08"
      tenants:
        - "acme"
        - "umbrella"
  tls:
    spiffe_prefix: "spiffe://corp.internal/"
  etcd:
    endpoints:
      - "10.9.9.9:2379"
    user: "quarryman"
log:
  level: "info"
# UCX's settings that are in force:
# UCX_TLS=all (default)
)";

TEST(Redaction, NoNameOfAConfigurationStays) {
  Redaction redaction;
  const std::string text = redaction.Yaml(kConfig);
  for (const char* name :
       {"acme", "umbrella", "4711", "4712", "rack1", "quarry", "10.1.2.3", "10.9.9.9", "corp.internal"}) {
    EXPECT_THAT(text, Not(HasSubstr(name)));
  }
  for (const char* kept :
       {"/run/ashlar/rpc.sock", "dram_bytes: 1024", "tenant-2", "uid-2", "node-2", "level: info", "# UCX_TLS=all"}) {
    EXPECT_THAT(text, HasSubstr(kept));
  }
}

TEST(Redaction, AnAliasIsTheSameEverywhere) {
  Redaction redaction;
  nlohmann::json answer = {{"tenants", {{{"tenant", "umbrella"}}, {{"tenant", "acme"}}}},
                           {"sessions", {{{"uid", 4712}}}}};
  redaction.Apply(answer);
  const std::string acme = answer["tenants"][1]["tenant"], uid = answer["sessions"][0]["uid"];
  EXPECT_EQ(acme, "tenant-2");
  const std::string text = redaction.Yaml(kConfig);
  EXPECT_THAT(text, HasSubstr("name: " + acme));
  EXPECT_THAT(text, HasSubstr("- " + uid));
}

TEST(Redaction, WhatIsNoYamlIsLeftOut) {
  EXPECT_THAT(Redaction().Yaml("tenants: [acme\n: :"), Not(HasSubstr("acme")));
}

}  // namespace
}  // namespace ashlar::ctl
