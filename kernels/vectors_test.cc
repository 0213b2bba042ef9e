// SPDX-License-Identifier: Apache-2.0
// Independent vectors (testdata/vectors.json), computed in fp64 by plain loops that share no code with this project:
// every back end reproduces them.
//
// - `linear`: single heads of eight families: inputs per token (mamba: `B`, `x`, `dt`, `A`; its `q` is C),
//   `initial_state`, each segment's transition `T` (acts from the left) and end state `S` from zero, `final_state`, and
//   `outputs_q_dot_S` per token. Matrices are [d_k][d_v], transitions [d_k][d_k] (mamba1: elementwise, [d_k][d_v]).
// - `rope`: both pair styles, full and partial: keys unrotated, zero-based and landed at two starts, values, and one
//   query's attention output.
// - `placement`: unused.
#include "kernels/testing/vectors.h"

#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

namespace ashlar::kernels::testing {
namespace {

using nlohmann::json;

constexpr char kVectorsPath[] = ASHLAR_KERNELS_DIR "/testdata/vectors.json";

std::string Text() {
  std::ifstream file(kVectorsPath);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

VectorsFile Parse(const std::string& text) {
  std::variant<VectorsFile, std::string> parsed = ParseVectors(text);
  if (const auto* error = std::get_if<std::string>(&parsed)) {
    ADD_FAILURE() << *error;
    return {};
  }
  return std::get<VectorsFile>(std::move(parsed));
}

class VectorsTest : public ::testing::TestWithParam<const Kernels*> {};

TEST_P(VectorsTest, AreReproduced) {
  const VectorsFile file = Parse(Text());
  std::set<Family> families;
  for (const LinearVector& vector : file.linear) families.insert(vector.family);
  EXPECT_EQ(families.size(), 8u);
  EXPECT_EQ(file.rope.size(), 4u) << "both styles, full and partial";
  std::set<std::string> operations;
  for (const VectorCheck& check : CheckVectors(file, *GetParam())) {
    EXPECT_LE(check.error, check.bound) << check.operation << ", " << check.what << ": " << check.vectors;
    operations.insert(check.operation);
  }
  EXPECT_EQ(operations, (std::set<std::string>{"Capture", "Compose", "ComposeTransitions", "AdvanceSeam", "RotateKeys",
                                               "Land", "AttendLanded", "AttendUnrotated", "AttendRotatedQuery"}));
}

INSTANTIATE_TEST_SUITE_P(Every, VectorsTest, ::testing::ValuesIn(Available().begin(), Available().end()),
                         [](const auto& instance) { return std::string(instance.param->name()); });

// Every number used by the checks is compared: an error of a tenth is detected.
TEST(VectorsCheckTest, DetectsWrongNumbers) {
  const json clean = json::parse(Text());
  const auto fails = [&](const std::function<void(json&)>& change) {
    json changed = clean;
    change(changed);
    int failures = 0;
    for (const VectorCheck& check : CheckVectors(Parse(changed.dump()), Reference())) failures += !check.passes();
    return failures;
  };
  const auto spoil = [](json& number) { number = number.get<double>() + 0.1; };
  EXPECT_EQ(fails([](json&) {}), 0);
  for (size_t head = 0; head < clean["linear"].size(); ++head) {
    SCOPED_TRACE(clean["linear"][head]["family"].get<std::string>() + ", head " + std::to_string(head));
    EXPECT_GT(fails([&](json& file) { spoil(file["linear"][head]["final_state"][2][1]); }), 0);
    EXPECT_GT(fails([&](json& file) { spoil(file["linear"][head]["initial_state"][0][0]); }), 0);
    EXPECT_GT(fails([&](json& file) { spoil(file["linear"][head]["outputs_q_dot_S"][25][3]); }), 0);
    EXPECT_GT(fails([&](json& file) { spoil(file["linear"][head]["segments"][1]["T"][3][3]); }), 0);
    EXPECT_GT(fails([&](json& file) { spoil(file["linear"][head]["segments"][2]["S"][5][0]); }), 0);
  }
  for (size_t i = 0; i < clean["rope"].size(); ++i) {
    SCOPED_TRACE("rope " + std::to_string(i));
    EXPECT_GT(fails([&](json& file) { spoil(file["rope"][i]["attention_output"][4]); }), 0);
    EXPECT_GT(fails([&](json& file) { spoil(file["rope"][i]["landed_keys"]["1000003"][6][1]); }), 0);
    EXPECT_GT(fails([&](json& file) { spoil(file["rope"][i]["unrotated_keys"][6][0]); }), 0);
    EXPECT_GT(fails([&](json& file) { spoil(file["rope"][i]["values"][6][0]); }), 0);
    EXPECT_GT(fails([&](json& file) { file["rope"][i]["query_position"] = 1'000'021; }), 0);
  }
}

// A transition that a file calls vanished must be zero; any remainder is an error.
TEST(VectorsCheckTest, DetectsARemainderOfAVanishedTransition) {
  json file = json::parse(Text());
  for (json& head : file["linear"]) {
    for (json& row : head["segments"][1]["T"]) {
      for (json& number : row) number = 0.0;
    }
  }
  std::set<std::string> families;
  for (const VectorCheck& check : CheckVectors(Parse(file.dump()), Reference())) {
    if (check.operation != "Capture" || check.what != "transitions") continue;
    EXPECT_FALSE(check.passes()) << check.vectors;
    families.insert(check.vectors.substr(0, check.vectors.find(',')));
  }
  EXPECT_EQ(families.size(), 8u);
}

// A file may hold one family, heads of any number and size, or only keys.
TEST(VectorsCheckTest, AcceptsPartialFiles) {
  const json clean = json::parse(Text());
  for (const json& head : clean["linear"]) {
    const VectorsFile one = Parse(json{{"linear", {head}}}.dump());
    const std::vector<VectorCheck> checks = CheckVectors(one, Reference());
    EXPECT_FALSE(checks.empty());
    for (const VectorCheck& check : checks) EXPECT_TRUE(check.passes()) << check.vectors << ", " << check.what;
  }
  const VectorsFile keys = Parse(json{{"rope", {clean["rope"][1]}}, {"linear", json::array()}}.dump());
  EXPECT_TRUE(keys.linear.empty());
  for (const VectorCheck& check : CheckVectors(keys, Reference())) EXPECT_TRUE(check.passes()) << check.what;
}

struct Damage {
  const char* error;
  std::function<void(json&)> change;
};

TEST(VectorsFileTest, NamesTheFieldThatIsWrong) {
  const Damage damages[] = {
      {"file: neither linear nor rope",
       [](json& file) {
         file.erase("linear");
         file.erase("rope");
       }},
      {"linear: not an array", [](json& file) { file["linear"] = 3; }},
      {"linear[0].family: unknown", [](json& file) { file["linear"][0]["family"] = "transformer"; }},
      {"linear[1].d_k: not an integer of 1 … 256", [](json& file) { file["linear"][1]["d_k"] = 257; }},
      {"linear[1].d_v: not an integer", [](json& file) { file["linear"][1]["d_v"] = 3.5; }},
      {"linear[2].tokens: missing", [](json& file) { file["linear"][2].erase("tokens"); }},
      {"linear[2].tokens[4].k: not an array of 6", [](json& file) { file["linear"][2]["tokens"][4]["k"].erase(0); }},
      {"linear[4].tokens[3].dt: not a number", [](json& file) { file["linear"][4]["tokens"][3]["dt"] = "slow"; }},
      {"linear[0].tokens[9]: decays otherwise", [](json& file) { file["linear"][0]["tokens"][9]["log_decay"] = -1; }},
      {"linear[12].initial_state[5][0]: not a number",
       [](json& file) { file["linear"][12]["initial_state"][5][0] = nullptr; }},
      {"linear[12].segments: do not have", [](json& file) { file["linear"][12]["segments"][1]["tokens"] = 1; }},
      {"linear[6].segments[0].T[0]: not an array of 4",
       [](json& file) { file["linear"][6]["segments"][0]["T"][0].push_back(1); }},
      {"rope[0].style: neither", [](json& file) { file["rope"][0]["style"] = "spiral"; }},
      {"rope[1].rotary_dim: odd", [](json& file) { file["rope"][1]["rotary_dim"] = 3; }},
      {"rope[2].freqs: not an array of 4", [](json& file) { file["rope"][2]["freqs"].push_back(1); }},
      {"rope[3].landed_keys.17: missing", [](json& file) { file["rope"][3]["starts"].push_back(17); }},
      {"rope[3].values: not an array of 7", [](json& file) { file["rope"][3]["values"].erase(0); }},
  };
  for (const Damage& damage : damages) {
    json file = json::parse(Text());
    damage.change(file);
    const std::variant<VectorsFile, std::string> parsed = ParseVectors(file.dump());
    const auto* error = std::get_if<std::string>(&parsed);
    ASSERT_NE(error, nullptr) << damage.error;
    EXPECT_EQ(error->rfind(damage.error, 0), 0u) << *error << " where it should be " << damage.error;
  }
  EXPECT_EQ(std::get<std::string>(ParseVectors("{\"linear\": [")), "file: not JSON");
  EXPECT_EQ(std::get<std::string>(ParseVectors("[]")), "file: neither linear nor rope");
}

}  // namespace
}  // namespace ashlar::kernels::testing
