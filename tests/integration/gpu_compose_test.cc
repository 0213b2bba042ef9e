// SPDX-License-Identifier: Apache-2.0
// The composition service for engines whose states are on a GPU: results equal the reference's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/dtype.h"
#include "kernels/gpu.h"
#include "kernels/kernels.h"
#include "kernels/layer_shape.h"
#include "tests/integration/content.h"
#include "tests/integration/corrupt.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kRunTokens = 12;
constexpr size_t kStateNumbers = size_t{kValueHeads} * kDk * kDv;
constexpr int64_t kKeys = int64_t{kKeyHeads} * kDk, kValues = int64_t{kValueHeads} * kDv;

struct GpuCase {
  const char* name;
  bool hbm;  // objects are on the GPU too
  DType dtype;
  double tolerance;  // relative to the largest number
};

// One call's memory, with the same layout on the GPU and here.
struct Places {
  size_t state = 0, exponents = 0, checkpoint = 0, checkpoint_exponents = 0, inputs = 0, out = 0, end = 0;
};

class ComposeOnGpu : public ::testing::TestWithParam<GpuCase> {
 protected:
  void SetUp() override {
    std::string why;
    gpu_ = kernels::FindGpu(0, &why);
    if (gpu_ == nullptr) GTEST_SKIP() << why;
    DaemonOptions options{.gpu = "gpu: {device: 0}\n", .program = GPU_ASHLARD};
    if (GetParam().hbm) options.gpu += "hbm: {capacity_bytes: 4MiB, arena_bytes: 2MiB}\n";
    daemon_ = std::make_unique<DaemonProcess>(options);
    engine_ = std::make_unique<TestEngine>(daemon_->client_options(), Shape{}, TestEngine::Memory::kGpuRegistered);
    engine_->PublishPrompt(prompt_);
    Place();
    kernels::ArenaError error;
    arena_ = gpu_->MakeArena(places_.end, &error);
    ASSERT_NE(arena_, nullptr) << error.message;
    auto region = engine_->client().RegisterGpuRegion(arena_->descriptor(), arena_->data(), arena_->bytes());
    ASSERT_TRUE(region.ok()) << region.status();
    region_ = *region;
    near_.resize(places_.end);
    std::uniform_real_distribution<float> uniform(-0.2f, 0.2f);
    for (size_t i = 0; i < kStateNumbers; ++i) SetNumber(places_.state, i, uniform(random_));
    auto* const inputs = reinterpret_cast<float*>(near_.data() + places_.inputs);
    for (size_t i = 0; i < (places_.out - places_.inputs) / sizeof(float); ++i) inputs[i] = -std::abs(uniform(random_));
    gpu_->CopyToDevice(region_.data(), near_.data(), near_.size());
  }

  void Place() {
    const auto take = [&](size_t bytes) {
      const size_t at = places_.end;
      places_.end += (bytes + 63) / 64 * 64;
      return at;
    };
    const size_t exponents = kValueHeads * sizeof(int32_t), state = kStateNumbers * ElementBytes(GetParam().dtype);
    places_.state = take(state);
    places_.exponents = take(exponents);
    places_.checkpoint = take(state);
    places_.checkpoint_exponents = take(exponents);
    places_.inputs = take(kRunTokens * Stride() * sizeof(float));
    places_.out = take(kRunTokens * kValues * sizeof(float));
  }
  static int64_t Stride() { return 2 * kKeys + kValues + 2 * int64_t{kValueHeads}; }

  void SetNumber(size_t place, size_t index, float number) {
    kernels::WriteElement(GetParam().dtype, near_.data() + place, static_cast<int64_t>(index), number);
  }

  RunningState StateAt(size_t place, size_t exponents) const {
    RunningState state{.data = region_.data() + place, .dtype = GetParam().dtype};
    if (state.dtype == DType::kF16) state.exponents = reinterpret_cast<int32_t*>(region_.data() + exponents);
    return state;
  }

  kernels::TokenInputs InputsAt(const std::byte* base) const {
    const auto* at = reinterpret_cast<const float*>(base + places_.inputs);
    const auto take = [&](int64_t floats) { return std::exchange(at, at + floats); };
    kernels::TokenInputs inputs{.tokens = kRunTokens};
    inputs.q = take(kKeys);
    inputs.k = take(kKeys);
    inputs.v = take(kValues);
    inputs.g = take(kValueHeads);
    inputs.beta = take(kValueHeads);
    inputs.q_stride = inputs.k_stride = inputs.v_stride = inputs.g_stride = inputs.beta_stride = Stride();
    return inputs;
  }

  // prefix, run, segment, run, segment with a checkpoint, run.
  std::vector<AdvanceStep> Steps() const {
    std::vector<AdvanceStep> steps;
    uint64_t position = 0;
    for (uint32_t i = 0; i < prompt_.size(); ++i) {
      steps.push_back({.segment = LandSegment{i, position}});
      steps.push_back({.begin = 4 * int64_t{i}, .end = 4 * int64_t{i} + 3});
      position += prompt_[i].size();
    }
    steps[4].checkpoint = StateAt(places_.checkpoint, places_.checkpoint_exponents);
    return steps;
  }
  Composition Advance(const Match& match, std::vector<AdvanceStep> steps) {
    LayerAdvance advance{.layer = 2, .steps = steps, .region = region_};
    advance.state = StateAt(places_.state, places_.exponents);
    advance.inputs = InputsAt(region_.data());
    advance.out = reinterpret_cast<float*>(region_.data() + places_.out);
    advance.out_stride = kValues;
    return engine_->model().Advance(&match, advance);
  }
  // Returns the contents of the GPU's memory.
  std::vector<std::byte> There() const {
    std::vector<std::byte> bytes(near_.size());
    gpu_->CopyToHost(bytes.data(), region_.data(), bytes.size());
    return bytes;
  }

  // Does in `near_` what the call does on the GPU, in fp32 from the same numbers.
  void Expect(std::vector<float>& state, std::vector<float>& checkpoint) {
    std::vector<std::vector<float>> numbers;
    std::vector<std::vector<kernels::HeadTuple>> heads;
    std::vector<kernels::TupleView> views;
    for (size_t i = 0; i < prompt_.size(); ++i) {
      const ObjectKind kind = KindOfSegment(i);
      std::vector<kernels::HeadTuple>& tuple = heads.emplace_back(kValueHeads);
      const auto content = [&](PartForm form, size_t count) {
        numbers.emplace_back(count);
        Content(kind, prompt_[i], 2, form, 0).Write(numbers.back().data(), 0, count);
        return numbers.back().data();
      };
      const float* const states = content(PartForm::kState, kStateNumbers);
      const float* const transitions =
          i == 0 ? nullptr : content(PartForm::kTransitionDense, size_t{kValueHeads} * kDk * kDk);
      for (size_t head = 0; head < kValueHeads; ++head) {
        tuple[head] = {.form = i == 0 ? TransitionForm::kZero : TransitionForm::kDense,
                       .transition = i == 0 ? nullptr : transitions + head * kDk * kDk,
                       .state = states + head * kDk * kDv};
      }
    }
    for (const auto& tuple : heads) views.push_back({.heads = tuple.data()});
    const auto heads_of = [](std::vector<float>& all) {
      std::vector<void*> of;
      for (size_t head = 0; head < kValueHeads; ++head) of.push_back(all.data() + head * kDk * kDv);
      return of;
    };
    std::vector<void*> running = heads_of(state), kept = heads_of(checkpoint);
    const kernels::StateView keep{.heads = kept.data()};
    std::vector<kernels::SeamStep> steps;
    for (size_t i = 0; i < prompt_.size(); ++i) {
      steps.push_back({.interior = &views[i], .checkpoint = i == 2 ? &keep : nullptr});
      steps.push_back({.begin = 4 * static_cast<int64_t>(i), .end = 4 * static_cast<int64_t>(i) + 3});
    }
    const auto& linear = std::get<LinearLayer>(layout_.layers[2]);
    const auto queue = kernels::Reference().MakeQueue(nullptr);
    kernels::Reference()
        .AdvanceSeam({.shape = kernels::ShapeOf(linear),
                      .steps = steps,
                      .inputs = InputsAt(near_.data()),
                      .state = {.heads = running.data()},
                      .out = reinterpret_cast<float*>(near_.data() + places_.out),
                      .out_stride = kValues},
                     *queue)
        .Wait();
  }

  // Returns a state's numbers as floats, whatever their type.
  std::vector<float> Numbers(const std::vector<std::byte>& bytes, size_t place, size_t exponents) const {
    std::vector<float> numbers(kStateNumbers);
    for (size_t i = 0; i < numbers.size(); ++i) {
      numbers[i] = kernels::ReadElement(GetParam().dtype, bytes.data() + place, static_cast<int64_t>(i));
      if (GetParam().dtype != DType::kF16) continue;
      int32_t exponent = 0;
      std::memcpy(&exponent, bytes.data() + exponents + i / (kDk * kDv) * sizeof exponent, sizeof exponent);
      numbers[i] = std::ldexp(numbers[i], exponent);
    }
    return numbers;
  }
  void ExpectNear(const std::vector<float>& found, const std::vector<float>& expected, double tolerance) const {
    double largest = 0;
    for (const float number : expected) largest = std::max(largest, std::abs(static_cast<double>(number)));
    ASSERT_GT(largest, 0);
    for (size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(found[i], expected[i], tolerance * largest) << i;
  }

  const uint32_t seed_ = std::random_device()();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, ::testing::Message() << "seed " << seed_};
  std::mt19937 random_{seed_};
  const std::vector<Tokens> prompt_ = MakePrompt(3, 3, 60);
  const kernels::Gpu* gpu_ = nullptr;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<TestEngine> engine_;
  Layout layout_;
  Places places_;
  std::unique_ptr<kernels::ArenaMemory> arena_;
  Region region_;
  std::vector<std::byte> near_;
};

using ComposeFromDram = ComposeOnGpu;

TEST_P(ComposeOnGpu, MatchesTheReference) {
  layout_ = engine_->Whole();
  const Match match = engine_->Lookup(prompt_);
  ASSERT_EQ(match.segments()[0].tier, GetParam().hbm ? TierKind::kHbm : TierKind::kDram);
  const Composition composition = Advance(match, Steps());
  ASSERT_EQ(composition.reason(), MissReason::kNone);
  const std::vector<std::byte> there = There();
  std::vector<float> state = Numbers(near_, places_.state, places_.exponents), checkpoint(kStateNumbers);
  Expect(state, checkpoint);
  const double tolerance = GetParam().tolerance;
  ExpectNear(Numbers(there, places_.state, places_.exponents), state, tolerance);
  ExpectNear(Numbers(there, places_.checkpoint, places_.checkpoint_exponents), checkpoint, tolerance);
  const auto outputs = [&](const std::vector<std::byte>& bytes) {
    const auto* const first = reinterpret_cast<const float*>(bytes.data() + places_.out);
    std::vector<float> rows;
    for (size_t token = 0; token < kRunTokens; ++token) {
      if (token % 4 < 3) rows.insert(rows.end(), first + token * kValues, first + (token + 1) * kValues);
    }
    return rows;
  };
  ExpectNear(outputs(there), outputs(near_), 1e-5);
}

TEST_P(ComposeFromDram, ACorruptTupleIsAMissAndChangesNothing) {
  const Match match = engine_->Lookup(prompt_);
  ASSERT_EQ(FlipInArenas(daemon_->pid(), engine_->StateOfHead(ObjectKind::kSegment, prompt_[1], 2, 0)), 1);
  const Composition composition = Advance(match, Steps());
  EXPECT_EQ(composition.reason(), MissReason::kChecksumFailed);
  EXPECT_THAT(composition.segments(), ElementsAre(MissReason::kNone, MissReason::kChecksumFailed, MissReason::kNone));
  EXPECT_EQ(There(), near_);
}

// Two regions: states in one, inputs in another, in host memory or on the GPU.
TEST_P(ComposeFromDram, AllPlacesAreInOneMemory) {
  const auto elsewhere = engine_->client().HostRegion(places_.end);
  ASSERT_TRUE(elsewhere.ok()) << elsewhere.status();
  const AdvanceStep run{.begin = 0, .end = 1};
  LayerAdvance advance{.layer = 2, .steps = {&run, 1}, .region = *elsewhere};
  advance.state = StateAt(places_.state, places_.exponents);
  advance.inputs = InputsAt(elsewhere->data());
  EXPECT_EQ(engine_->model().Advance(nullptr, advance).reason(), MissReason::kInvalidRequest);
  EXPECT_EQ(There(), near_);
}

INSTANTIATE_TEST_SUITE_P(Gpu, ComposeOnGpu,
                         testing::Values(GpuCase{"Dram", false, DType::kF32, 1e-5},
                                         GpuCase{"Hbm", true, DType::kF32, 1e-5},
                                         GpuCase{"HbmHalf", true, DType::kF16, 1e-3},
                                         GpuCase{"DramBf16", false, DType::kBF16, 1e-2}),
                         [](const auto& instance) { return std::string(instance.param.name); });
INSTANTIATE_TEST_SUITE_P(Gpu, ComposeFromDram, testing::Values(GpuCase{"F32", false, DType::kF32, 1e-5}),
                         [](const auto& instance) { return std::string(instance.param.name); });

}  // namespace
}  // namespace ashlar::integration
