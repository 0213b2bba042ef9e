// SPDX-License-Identifier: Apache-2.0
// Every linear family through a real daemon, its heads in mixed forms: the service advances with the bits
// of a process that has the kernels and maps the tuples, and both agree with the reference.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "client/engine/adapt_transitions.h"
#include "client/session/client.h"
#include "kernels/adaptive.h"
#include "kernels/host/thread_pool.h"
#include "kernels/testing/backends.h"
#include "kernels/testing/linear_inputs.h"
#include "kernels/testing/print.h"
#include "proto/tuple_parts.h"
#include "storage/testing/layer_of.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using kernels::testing::Dtypes;
using kernels::testing::Random;
using kernels::testing::States;
using kernels::testing::Tuple;
using storage::LayerOf;

constexpr uint64_t kPrefix = 4, kSegment = 8;
constexpr uint64_t kRegionBytes = 4 << 20;

// Wide enough for interiors of five tokens to be of low rank.
kernels::testing::Layer WideLayer(Random& random, Family family, StateOrder order) {
  for (;;) {
    const kernels::testing::Layer layer = kernels::testing::RandomLayer(random, family, order, 48, {});
    if (layer.shape().d_k >= 24) return layer;
  }
}

// One family: a random prompt whose interiors are published by an engine of this test.
class ServedFamily {
 public:
  ServedFamily(Client& client, Random& random, Family family, StateOrder order, Dtypes dtypes)
      : dtypes_(dtypes),
        prompt_(random, WideLayer(random, family, order), {.interiors = 3, .interior = 5}),
        layout_{.page_tokens = 16, .layers = {LayerOf(prompt_.shape, dtypes.state)}},
        region_(*client.HostRegion(kRegionBytes)),
        model_(*client.OpenModel({.model_id = "forms", .weights_digest = "w"}, layout_)) {
    // The service's inputs are at separate positions; the match's prompt only names the segments.
    for (uint64_t i = 0; i < kPrefix + kSegment * prompt_.tuples.size(); ++i) {
      tokens_.push_back(static_cast<int32_t>(random.Integer(0, 1 << 30)));
    }
    lengths_.assign(1 + prompt_.tuples.size(), kSegment);
    lengths_.front() = kPrefix;
    // For families without a smaller form, the test gives some heads one.
    stored_ = kernels::testing::Rounded(prompt_.tuples, dtypes_);
    for (Tuple& tuple : stored_) {
      if (linear().transition != TransitionForm::kDense) tuple.MakeZero(0);
    }
  }

  const LinearLayer& linear() const { return std::get<LinearLayer>(layout_.layers[0]); }

  void PublishAll() {
    for (size_t i = 0; i < stored_.size(); ++i) {
      const ObjectRun run{.tokens = std::span(tokens_).subspan(kPrefix + kSegment * i, kSegment)};
      const std::vector<Reservation> reservations = model_.Reserve({&run, 1});
      ASSERT_TRUE(reservations[0].granted());
      ASSERT_EQ(model_.Publish(reservations[0], Parts(i)), PublishOutcome::kPublished);
    }
  }

  void LookUp() {
    used_ = 0;
    views_.clear();
    segments_.clear();
    match_ = std::make_unique<Match>(model_.Lookup(Prompt{.tokens = tokens_, .segment_lengths = lengths_}));
    std::vector<LandSegment> tuples;
    for (uint32_t i = 1; i <= stored_.size(); ++i) tuples.push_back({.segment = i, .tuples_only = true});
    ASSERT_THAT(model_.Land(*match_, {}, tuples).Wait(kPatience), testing::Each(MissReason::kNone));
    for (size_t i = 0; i < stored_.size(); ++i) {
      ASSERT_NE(match_->tuples(i + 1), nullptr);
      views_.push_back((*match_->tuples(i + 1))[0].view);
      views_.back().position = stored_[i].position;
      segments_.push_back({static_cast<uint32_t>(i + 1), static_cast<uint64_t>(stored_[i].position)});
    }
  }
  TierKind tier() const { return match_->segments()[1].tier; }
  // Other exponents than random states have.
  void SetExponents() {
    for (size_t i = 0; i < stored_.size(); ++i) {
      for (int32_t h = 0; h < prompt_.shape.heads; ++h) stored_[i].states().SetExponent(h, 3 + h + static_cast<int>(i));
    }
  }
  void ExpectExponents() const {
    for (size_t i = 0; i < stored_.size(); ++i) {
      for (int32_t h = 0; h < prompt_.shape.heads; ++h) {
        EXPECT_EQ(views_[i].heads[h].state_exponent, stored_[i].states().exponent(h)) << "head " << h;
      }
    }
  }
  void Release() { match_.reset(); }

  // Counts the heads of all tuples that have a form.
  int Count(TransitionForm form) const {
    int count = 0;
    for (const kernels::TupleView& view : views_) {
      for (int32_t h = 0; h < prompt_.shape.heads; ++h) count += view.heads[h].form == form;
    }
    return count;
  }

  void ExpectComposes() {
    const RunningState state = PlaceState();
    std::vector<AdvanceStep> asked;
    for (const LandSegment& segment : segments_) asked.push_back({.segment = segment});
    const Composition done = model_.Advance(match_.get(), {.steps = asked, .region = region_, .state = state});
    ASSERT_EQ(done.reason(), MissReason::kNone);
    States own = prompt_.initial;
    kernels::ThreadPool pool(2);
    const auto queue = kernels::Host().MakeQueue(&pool);
    std::vector<kernels::SeamStep> steps;
    for (const kernels::TupleView& view : views_) steps.push_back({.interior = &view});
    kernels::Host().AdvanceSeam({.shape = prompt_.shape, .steps = steps, .state = own.View()}, *queue).Wait();
    ExpectBits(own, state);
    kernels::testing::Runner reference(kernels::Reference());
    const std::vector<Tuple> exact = Exact();
    const States truth =
        kernels::testing::Compose(reference, prompt_.shape, kernels::testing::Views(exact), prompt_.initial);
    EXPECT_LE(kernels::testing::RelativeError(own, truth), Accepted());
  }

  void ExpectAdvances() {
    const kernels::testing::Tokens inputs = prompt_.RunInputs();
    const RunningState state = PlaceState();
    const int64_t width = int64_t{prompt_.shape.heads} * prompt_.shape.d_v;
    auto* const out = reinterpret_cast<float*>(Take(inputs.count * width * sizeof(float)));
    std::memset(out, 0, inputs.count * width * sizeof(float));
    std::vector<AdvanceStep> asked;
    size_t interior = 0;
    for (const kernels::testing::Prompt::Part& part : prompt_.parts) {
      AdvanceStep step{.begin = part.begin, .end = part.end};
      if (part.interior) step.segment = segments_[interior++];
      if (part.interior || part.begin < part.end) asked.push_back(step);
    }
    const Composition done = model_.Advance(
        match_.get(),
        {.steps = asked, .region = region_, .state = state, .inputs = CopyIn(inputs), .out = out, .out_stride = width});
    ASSERT_EQ(done.reason(), MissReason::kNone);
    States own = prompt_.initial;
    std::vector<float> own_out(inputs.count * width);
    const auto queue = kernels::Host().MakeQueue(nullptr);
    kernels::Host()
        .AdvanceSeam({.shape = prompt_.shape,
                      .steps = prompt_.Steps(views_),
                      .inputs = inputs.View(),
                      .state = own.View(),
                      .out = own_out.data(),
                      .out_stride = width},
                     *queue)
        .Wait();
    ExpectBits(own, state);
    EXPECT_EQ(std::memcmp(out, own_out.data(), own_out.size() * sizeof(float)), 0);
  }

 private:
  std::byte* Take(uint64_t bytes) {
    std::byte* const at = region_.data() + used_;
    used_ += (bytes + 63) / 64 * 64;
    EXPECT_LE(used_, region_.size());
    return at;
  }

  // Tuple `i` as an engine would hold it: dense transitions adapted, others unchanged, head by head.
  PublishParts Parts(size_t i) {
    const Tuple& tuple = stored_[i];
    const kernels::TupleView view = tuple.View();
    const uint32_t heads = linear().value_heads;
    const uint64_t state_bytes = tuple.states().count() * ElementBytes(dtypes_.state);
    std::byte* const states = Take(heads * state_bytes);
    for (uint32_t h = 0; h < heads; ++h) std::memcpy(states + h * state_bytes, view.heads[h].state, state_bytes);
    int32_t* exponents = nullptr;
    if (dtypes_.state == DType::kF16) {
      exponents = reinterpret_cast<int32_t*>(Take(heads * sizeof(int32_t)));
      for (uint32_t h = 0; h < heads; ++h) exponents[h] = view.heads[h].state_exponent;
    }
    PublishParts parts{.region = region_};
    parts.linear.push_back({.state = states, .state_exponents = exponents});
    const uint64_t unit = TransitionBytes(TupleShapeOf(linear()), linear().state_dtype, linear().transition);
    std::byte* const transitions = Take(heads * unit);
    if (linear().transition == TransitionForm::kDense) {
      const uint64_t numbers = uint64_t{linear().d_k} * linear().d_k;
      std::vector<float> computed(heads * numbers);
      for (uint32_t h = 0; h < heads; ++h) {
        std::memcpy(computed.data() + h * numbers, prompt_.tuples[i].View().heads[h].transition,
                    numbers * sizeof(float));
      }
      const DenseTransitions dense{.computed = computed.data(), .stored = transitions};
      parts.runs = AdaptTransitions(layout_, kSegment, {&dense, 1}, Epsilon(), nullptr);
      return parts;
    }
    parts.runs.push_back({.heads = {.heads = 1, .form = TransitionForm::kZero}});
    if (heads == 1) return parts;
    parts.runs.push_back(
        {.heads = {.first_head = 1, .heads = heads - 1, .form = linear().transition}, .units = transitions});
    for (uint32_t h = 1; h < heads; ++h) std::memcpy(transitions + (h - 1) * unit, view.heads[h].transition, unit);
    return parts;
  }

  double Epsilon() const { return dtypes_.state == DType::kF32 ? 1e-6 : kernels::kDefaultEpsilon; }
  double Accepted() const {
    return kernels::testing::Tolerance(dtypes_, 3) +
           (linear().transition == TransitionForm::kDense ? 10 * Epsilon() : 0);
  }
  // The tuples before they were rounded, except for the parts that the test set to zero.
  std::vector<Tuple> Exact() const {
    std::vector<Tuple> exact = prompt_.tuples;
    for (Tuple& tuple : exact) {
      if (linear().transition != TransitionForm::kDense) tuple.MakeZero(0);
    }
    return exact;
  }

  RunningState PlaceState() {
    const uint64_t bytes = prompt_.initial.count() * sizeof(float);
    const RunningState state{.data = Take(prompt_.shape.heads * bytes)};
    for (int32_t h = 0; h < prompt_.shape.heads; ++h)
      std::memcpy(state.data + h * bytes, prompt_.initial.data(h), bytes);
    return state;
  }

  kernels::TokenInputs CopyIn(const kernels::testing::Tokens& tokens) {
    kernels::TokenInputs inputs = tokens.View();
    const auto copy = [&](const std::vector<float>& from, const float*& to) {
      if (from.empty()) return;
      std::byte* const at = Take(from.size() * sizeof(float));
      std::memcpy(at, from.data(), from.size() * sizeof(float));
      to = reinterpret_cast<const float*>(at);
    };
    copy(tokens.q, inputs.q);
    copy(tokens.k, inputs.k);
    copy(tokens.v, inputs.v);
    copy(tokens.g, inputs.g);
    copy(tokens.beta, inputs.beta);
    return inputs;
  }

  void ExpectBits(const States& own, const RunningState& daemons) const {
    const uint64_t bytes = own.count() * sizeof(float);
    for (int32_t h = 0; h < prompt_.shape.heads; ++h) {
      EXPECT_EQ(std::memcmp(own.data(h), daemons.data + h * bytes, bytes), 0) << "head " << h;
    }
  }

  const Dtypes dtypes_;
  const kernels::testing::Prompt prompt_;
  const Layout layout_;
  const Region region_;
  Model model_;
  std::vector<int32_t> tokens_;
  std::vector<uint64_t> lengths_;
  std::vector<Tuple> stored_;
  uint64_t used_ = 0;
  std::unique_ptr<Match> match_;
  std::vector<kernels::TupleView> views_;
  std::vector<LandSegment> segments_;
};

TEST(Forms, EveryFamilyIsServedWithTheKernelsBits) {
  const auto seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Random random(seed);
  DaemonProcess daemon;
  const auto client = Client::Connect(daemon.client_options());
  ASSERT_TRUE(client.ok()) << client.status();
  using enum DType;
  int zero = 0, low_rank = 0, dense = 0;
  for (const Family name : kernels::testing::kFamilies) {
    for (const Dtypes dtypes : {Dtypes{}, Dtypes{kF16, kF16}, Dtypes{kF16, kBF16}}) {
      SCOPED_TRACE(testing::Message() << kernels::testing::Name(name) << " " << dtypes);
      const auto order = static_cast<StateOrder>(random.Integer(1, 2));
      ServedFamily family(**client, random, name, order, dtypes);
      ASSERT_NO_FATAL_FAILURE(family.PublishAll());
      ASSERT_NO_FATAL_FAILURE(family.LookUp());
      zero += family.Count(TransitionForm::kZero);
      low_rank += family.Count(TransitionForm::kLowRank);
      dense += family.Count(TransitionForm::kDense);
      ASSERT_NO_FATAL_FAILURE(family.ExpectComposes());
      ASSERT_NO_FATAL_FAILURE(family.ExpectAdvances());
    }
  }
  EXPECT_GT(zero, 0);
  EXPECT_GT(low_rank, 0);
  EXPECT_GT(dense, 0);
}

// fp16 states have exponents, which are promoted with them.
TEST(Forms, AreLoadedFromDiskWithTheirExponents) {
  const auto seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Random random(seed);
  DaemonProcess daemon({.dram = "512MiB", .ssd = "512MiB", .admission = "all", .drain_seconds = 30});
  const auto client = Client::Connect(daemon.client_options());
  ASSERT_TRUE(client.ok()) << client.status();
  using enum DType;
  std::vector<std::unique_ptr<ServedFamily>> families;
  for (const Family name : kernels::testing::kFamilies) {
    families.push_back(
        std::make_unique<ServedFamily>(**client, random, name, StateOrder::kKeyFirst, Dtypes{kF16, kF16}));
    families.back()->SetExponents();
    ASSERT_NO_FATAL_FAILURE(families.back()->PublishAll());
  }
  // These prompts are promoted first, so that the rest is late.
  const Shape large{.layers = 12, .kv_heads = 8, .key_dim = 128, .value_dim = 128};
  const auto before = [](size_t family) { return MakePrompt(family, 2, 240); };
  for (size_t i = 0; i < families.size(); ++i) {
    TestEngine(daemon.client_options(), large).PublishPrompt(before(i));
  }
  for (int times = 0; times < 3; ++times) {
    ASSERT_EQ(daemon.Terminate(), 0);
    daemon.Start();
    ASSERT_TRUE(Eventually([&] { return (*client)->connected(); }));
    TestEngine engine(daemon.client_options(), large);
    for (size_t i = 0; i < families.size(); ++i) {
      const Match ahead = engine.Lookup(before(i));
      EXPECT_EQ(ahead.segments()[0].tier, TierKind::kSsd);
      ASSERT_NO_FATAL_FAILURE(families[i]->LookUp());
      EXPECT_EQ(families[i]->tier(), TierKind::kSsd);
      families[i]->ExpectExponents();
      families[i]->Release();
    }
  }
}

}  // namespace
}  // namespace ashlar::integration
