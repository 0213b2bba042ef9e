// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/redaction.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ashlar::ctl {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// As printed by ashlarctl config: lists are in block style.
constexpr const char* kConfig = R"(listen:
  rpc_socket: "/run/ashlar/rpc.sock"
  metrics_address: "10.4.4.4:9464"
events:
  zmq_address: "tcp://10.5.5.5:5557"
  zmq_replay_address: "tcp://10.6.6.6:5558"
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
    cert_file: "/etc/ashlar/tls/rack1-07.crt"
    key_file: "/etc/acme/ashlar-rack1-07.key"
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
  for (const char* name : {"acme", "umbrella", "4711", "4712", "rack1", "quarry", "10.1.2.3", "10.4.4.4", "10.5.5.5",
                           "10.6.6.6", "10.9.9.9", "corp.internal"}) {
    EXPECT_THAT(text, Not(HasSubstr(name)));
  }
  for (const char* kept :
       {"/run/ashlar/rpc.sock", "dram_bytes: 1024", "tenant-2", "uid-2", "node-2", "/etc/ashlar/tls/node-1.crt",
        "/etc/tenant-1/ashlar-node-1.key", "level: info", "# UCX_TLS=all"}) {
    EXPECT_THAT(text, HasSubstr(kept));
  }
}

TEST(Redaction, UsesTheSameAliasEverywhere) {
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

TEST(Redaction, ANameIsReplacedInsideOtherTexts) {
  Redaction redaction;
  nlohmann::json bundle = {{"a_first", {{"degraded", "/disks/n-1/acme: full; n-10 and acmeist stay"}}},
                           {"config", {{"yaml", "cluster:\n  node: n-1\nssd:\n  folder: /disks/n-1\n"}}},
                           {"stats", {{"tenants", {{{"tenant", "acme"}}, {{"tenant", "default"}}}}}},
                           {"uptime", 17},
                           {"text", "the default"}};
  redaction.Apply(bundle);
  EXPECT_EQ(bundle["a_first"]["degraded"], "/disks/node-1/tenant-1: full; n-10 and acmeist stay");
  EXPECT_THAT(bundle["config"]["yaml"].get<std::string>(), HasSubstr("folder: /disks/node-1"));
  EXPECT_EQ(bundle["uptime"], 17);
  EXPECT_EQ(bundle["text"], "the default") << "the daemon's own word";
}

// As in the answers of explain and models.
TEST(Redaction, NoNameOfAModelStays) {
  const auto differs = [](const char* field, const char* here, const char* there) {
    return nlohmann::json{{"other_namespace", {{"field", field}, {"requested_value", here}, {"other_value", there}}}};
  };
  nlohmann::json bundle = {
      {"last_misses",
       {differs("identity.model_id", R"("acme/secret")", R"("acme/older")"),
        differs("identity.weights_digest", R"("secret-v2")", R"("secret-v1")"),
        differs("identity.tokenizer_digest", R"("acme/secret 0f")", R"("acme/older 1e")"),
        differs("identity.lora", R"("")", R"("acme/adapter")"), differs("layout.page_tokens", "16", "32")}},
      {"models",
       {{{"model_id", "acme/secret"},
         {"weights_digest", "secret-v2"},
         {"tokenizer_digest", "acme/secret 0f"},
         {"lora", "acme/adapter"}}}}};
  Redaction().Apply(bundle);
  EXPECT_THAT(bundle.dump(), Not(HasSubstr("acme")));
  EXPECT_THAT(bundle.dump(), Not(HasSubstr("secret")));
  const auto at = [&](int miss, const char* name) { return bundle["last_misses"][miss]["other_namespace"][name]; };
  EXPECT_EQ(at(0, "requested_value"), bundle["models"][0]["model_id"]) << "the same wherever it occurs";
  EXPECT_NE(at(0, "requested_value"), at(0, "other_value"));
  EXPECT_EQ(at(1, "requested_value"), bundle["models"][0]["weights_digest"]);
  EXPECT_EQ(at(3, "requested_value"), "");
  EXPECT_EQ(at(3, "other_value"), bundle["models"][0]["lora"]);
  EXPECT_EQ(at(4, "other_value"), "32") << "no name";
}

TEST(Redaction, InvalidYamlIsOmitted) {
  EXPECT_THAT(Redaction().Yaml("tenants: [acme\n: :"), Not(HasSubstr("acme")));
}

}  // namespace
}  // namespace ashlar::ctl
