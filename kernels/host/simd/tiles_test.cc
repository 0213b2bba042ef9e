// SPDX-License-Identifier: Apache-2.0
// Composition and attention on the CPU's matrix unit: long chains, which must stay as exact as fp32 vectors; sizes that
// leave tiles partly empty; and memory that ends right after the numbers.
#include "kernels/host/simd/tiles.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstring>

#include "kernels/testing/attention_inputs.h"
#include "kernels/testing/linear_fixture.h"

namespace ashlar::kernels::testing {
namespace {

class TilesTest : public ::testing::TestWithParam<std::tuple<Family, StateOrder>> {
 protected:
  void SetUp() override {
    if (!host::HasTiles()) GTEST_SKIP() << "this CPU has no matrix unit (AMX), or the kernel does not permit it";
  }
  void TearDown() override { host::AllowTiles(true); }

  Layer Draw(int32_t d_k, int32_t d_v, Character character) {
    const LinearShape shape = {.family = std::get<0>(GetParam()),
                               .heads = 2,
                               .key_heads = 1,
                               .d_k = d_k,
                               .d_v = d_v,
                               .order = std::get<1>(GetParam())};
    return Layer(random_, shape, character);
  }
  States ComposeOnVectors(const LinearShape& shape, std::span<const TupleView> chain, const States& initial) {
    host::AllowTiles(false);
    States state = Compose(host_, shape, chain, initial);
    host::AllowTiles(true);
    return state;
  }

  const uint64_t seed_ = FreshSeed();
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, "ASHLAR_SEED=" + std::to_string(seed_)};
  Random random_{seed_};
  Runner host_{Host()}, reference_{Reference()};
};

// Without decay no error is ever erased: omitted products would add up.
TEST_P(TilesTest, ComposeLongChainsAsExactlyAsVectors) {
  for (const int interiors : {64, 256}) {
    for (const Character character : {kPersistentSubspace, Character{Keys::kCorrelated, Decay::kSlow}}) {
      const Layer layer = Draw(64, 32, character);
      const Prompt prompt(random_, layer, {.interiors = interiors, .run = 0, .interior = 3, .last_run = 0});
      for (const Dtypes dtypes : kDtypes) {
        SCOPED_TRACE(::testing::Message() << layer << ", " << dtypes << ", interiors " << interiors);
        const std::vector<Tuple> tuples = Rounded(prompt.tuples, dtypes);
        const States start = prompt.initial.Rounded(prompt.shape, dtypes.running);
        const States expected = Compose(reference_, prompt.shape, Views(tuples), start);
        const double error = RelativeError(Compose(host_, prompt.shape, Views(tuples), start), expected);
        EXPECT_LE(error, Tolerance(dtypes, interiors));
        if (dtypes.running == DType::kF32) {
          EXPECT_LE(error, 1.5 * RelativeError(ComposeOnVectors(prompt.shape, Views(tuples), start), expected));
        }
      }
    }
  }
}

TEST_P(TilesTest, ComposeAnySize) {
  for (const auto& [d_k, d_v] : {std::pair{32, 32}, {33, 31}, {47, 65}, {64, 5}, {100, 96}, {128, 128}, {250, 40}}) {
    const Layer layer = Draw(d_k, d_v, {Keys::kCorrelated, Decay::kSlow});
    const Prompt prompt(random_, layer, {.interiors = 4, .run = 0, .interior = 20, .last_run = 0});
    for (const Dtypes dtypes : kDtypes) {
      SCOPED_TRACE(::testing::Message() << layer << ", " << dtypes);
      std::vector<Tuple> tuples = Rounded(prompt.tuples, dtypes);
      tuples[1].MakeZero(0);
      const States start = prompt.initial.Rounded(prompt.shape, dtypes.running);
      const double tolerance = Tolerance(dtypes, 4);
      EXPECT_LE(RelativeError(Compose(host_, prompt.shape, Views(tuples), start),
                              Compose(reference_, prompt.shape, Views(tuples), start)),
                tolerance);
      const Tuple tuple = ComposeTuples(host_, prompt.shape, Views(tuples), dtypes);
      const Tuple expected = ComposeTuples(reference_, prompt.shape, Views(tuples), dtypes);
      EXPECT_LE(TransitionError(tuple, expected, tolerance), 1);
      EXPECT_LE(RelativeError(tuple.states(), expected.states()), tolerance);
    }
  }
}

// Otherwise the tests above would have compared vectors.
TEST_P(TilesTest, AreUsed) {
  const Layer layer = Draw(64, 64, {});
  const Prompt prompt(random_, layer, {.interiors = 8, .run = 0, .interior = 20, .last_run = 0});
  const std::vector<TupleView> chain = Views(prompt.tuples);
  const States on_tiles = Compose(host_, prompt.shape, chain, prompt.initial);
  const States on_vectors = ComposeOnVectors(prompt.shape, chain, prompt.initial);
  const double difference = RelativeError(on_tiles, on_vectors);
  EXPECT_GT(difference, 0);
  EXPECT_LE(difference, kTolerance);
}

// Composition alone may store its panels differently than composition between runs.
TEST_P(TilesTest, GiveTheSameBitsWithoutAndBetweenRuns) {
  const Layer layer = Draw(64, 96, {});
  const Prompt prompt(random_, layer, {.interiors = 5, .run = 0, .interior = 20, .last_run = 0});
  const std::vector<TupleView> chain = Views(prompt.tuples);
  const States composed = Compose(host_, prompt.shape, chain, prompt.initial);
  std::vector<SeamStep> steps;
  for (const TupleView& interior : chain) steps.push_back({.interior = &interior});
  States advanced = prompt.initial;
  host_.Run(AdvanceSeamArgs{.shape = prompt.shape, .steps = steps, .state = advanced.View()});
  EXPECT_EQ(RelativeError(composed, advanced), 0);
}

// Memory whose last byte is the last one that may be read.
class EndOfMemory {
 public:
  explicit EndOfMemory(size_t bytes) : page_(static_cast<size_t>(getpagesize())) {
    length_ = (bytes + page_ - 1) / page_ * page_ + page_;
    memory_ =
        static_cast<std::byte*>(mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_NE(memory_, MAP_FAILED);
    EXPECT_EQ(mprotect(memory_ + length_ - page_, page_, PROT_NONE), 0);
    data_ = memory_ + length_ - page_ - bytes;
  }
  ~EndOfMemory() { munmap(memory_, length_); }
  EndOfMemory(const EndOfMemory&) = delete;
  EndOfMemory& operator=(const EndOfMemory&) = delete;

  void* Copy(const void* from, size_t bytes) { return std::memcpy(data_, from, bytes); }

 private:
  const size_t page_;
  size_t length_;
  std::byte *memory_, *data_;
};

TEST_P(TilesTest, ReadNothingBeyondTheirMemory) {
  for (const auto& [d_k, d_v] : {std::pair{64, 64}, {64, 40}, {40, 64}, {33, 32}}) {
    const Layer layer = Draw(d_k, d_v, {});
    const Prompt prompt(random_, layer, {.interiors = 1, .run = 0, .interior = 20, .last_run = 0});
    for (const Dtypes dtypes :
         {Dtypes{}, Dtypes{DType::kF16, DType::kF16, DType::kF32}, Dtypes{DType::kBF16, DType::kBF16, DType::kF32}}) {
      SCOPED_TRACE(::testing::Message() << layer << ", " << dtypes);
      const std::vector<Tuple> tuples = Rounded(prompt.tuples, dtypes);
      TupleView view = Views(tuples).front();
      std::vector<HeadTuple> heads(view.heads, view.heads + prompt.shape.heads);
      const size_t transition = static_cast<size_t>(d_k * d_k) * ElementBytes(dtypes.transition);
      const size_t state = static_cast<size_t>(d_k * d_v) * ElementBytes(dtypes.state);
      std::vector<std::unique_ptr<EndOfMemory>> ends;
      for (HeadTuple& head : heads) {
        ASSERT_EQ(head.form, TransitionForm::kDense);
        ends.push_back(std::make_unique<EndOfMemory>(transition));
        head.transition = ends.back()->Copy(head.transition, transition);
        ends.push_back(std::make_unique<EndOfMemory>(state));
        head.state = ends.back()->Copy(head.state, state);
      }
      view.heads = heads.data();
      EXPECT_LE(RelativeError(Compose(host_, prompt.shape, {&view, 1}, prompt.initial),
                              Compose(reference_, prompt.shape, {&view, 1}, prompt.initial)),
                Tolerance(dtypes, 1));
    }
  }
}

int NansOf(const States& states) {
  int nans = 0;
  for (int32_t head = 0; head < states.heads(); ++head) {
    for (const double value : states.Values(head)) nans += std::isnan(value) ? 1 : 0;
  }
  return nans;
}

// Includes NaNs whose bits are all ones, as GPUs write them: plain rounding to fewer bits would make them zero.
TEST_P(TilesTest, SeeEveryNan) {
  const Layer layer = Draw(64, 40, {});
  const Prompt prompt(random_, layer, {.interiors = 2, .run = 0, .interior = 20, .last_run = 0});
  for (const Dtypes dtypes :
       {Dtypes{}, Dtypes{DType::kF16, DType::kF32, DType::kF32}, Dtypes{DType::kBF16, DType::kF32, DType::kF32}}) {
    const std::vector<Tuple> tuples = Rounded(prompt.tuples, dtypes);
    for (const bool in_state : {false, true}) {
      SCOPED_TRACE(::testing::Message() << layer << ", " << dtypes << ", in the "
                                        << (in_state ? "state" : "transition"));
      std::vector<TupleView> chain = Views(tuples);
      std::vector<HeadTuple> heads(chain[1].heads, chain[1].heads + prompt.shape.heads);
      std::vector<std::byte> transition(static_cast<size_t>(64 * 64) * ElementBytes(dtypes.transition));
      std::memcpy(transition.data(), heads[0].transition, transition.size());
      States start = prompt.initial;
      std::memset(in_state ? start.data(0) : transition.data(), 0xff,
                  in_state ? sizeof(float) : ElementBytes(dtypes.transition));
      heads[0].transition = transition.data();
      chain[1].heads = heads.data();
      const int expected = NansOf(Compose(reference_, prompt.shape, chain, start));
      EXPECT_GT(expected, 0);
      EXPECT_EQ(NansOf(Compose(host_, prompt.shape, chain, start)), expected);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Every, TilesTest,
                         ::testing::Combine(::testing::ValuesIn(FamiliesThat(kErasing)),
                                            ::testing::Values(StateOrder::kKeyFirst, StateOrder::kValueFirst)),
                         [](const auto& instance) {
                           return std::string(Name(std::get<0>(instance.param))) + "_" +
                                  Name(std::get<1>(instance.param));
                         });

// Enough queries that tiles pay, with full and half panels.
TEST(AttentionOnTiles, AgreesWithTheReference) {
  if (!host::HasTiles()) GTEST_SKIP() << "this CPU has no matrix unit (AMX), or the kernel does not permit it";
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ASHLAR_SEED=" + std::to_string(seed));
  Random random(seed);
  Runner host(Host()), reference(Reference());
  for (const RowFormat format : kRowFormats) {
    for (const AttentionKind kind : {AttentionKind::kGqa, AttentionKind::kMla}) {
      for (const int32_t rows : {16, 24, 32, 48, 64, 90}) {
        AttentionCase what = RandomCase(random, kind, format, 1'000'003);
        what.shape.query_heads = what.shape.kv_heads * (rows % 8 == 0 ? rows / 8 : rows);
        what.queries.assign(rows % 8 == 0 ? 8 : 1, 0);
        const SpanPlace& last = what.spans.back();
        for (int64_t& query : what.queries) query = last.position + last.tokens - random.Integer(0, 20);
        const AttentionContext context(random, what);
        for (const Stand stand : kStands) {
          SCOPED_TRACE(NameOf(stand) + ", " + Describe(what));
          EXPECT_LE(LargestError(what.shape, context.Run(host, stand), context.Run(reference, stand)), 1e-5);
        }
      }
    }
  }
}

TEST(AttentionOnTiles, SeesEveryNan) {
  if (!host::HasTiles()) GTEST_SKIP() << "this CPU has no matrix unit (AMX), or the kernel does not permit it";
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ASHLAR_SEED=" + std::to_string(seed));
  Random random(seed);
  Runner host(Host()), reference(Reference());
  for (const RowFormat format : kRowFormats) {
    for (const bool in_keys : {false, true}) {
      AttentionCase what = RandomCase(random, AttentionKind::kGqa, format, 0);
      what.shape.kv_heads = 1;
      what.shape.query_heads = 16;
      what.shape.window = 0;
      what.spans = {{.tokens = 50}};
      what.queries = {49, 20};
      const AttentionContext context(random, what);
      const KeySpan span = context.Spans(Stand::kLanded)[0];
      const PagedSlots& slots = in_keys ? span.keys : span.values;
      const int64_t slot = span.first_slot + 30;
      const int64_t element = slots.page_table[slot / slots.page_tokens] * slots.page_stride +
                              slot % slots.page_tokens * slots.token_stride;
      const auto bytes = static_cast<int64_t>(ElementBytes(format.dtype));
      std::memset(static_cast<std::byte*>(slots.base) + element * bytes, 0xff, static_cast<size_t>(bytes));
      SCOPED_TRACE(Describe(what) + (in_keys ? ", in a key" : ", in a value"));
      const Attended actual = context.Run(host, Stand::kLanded), expected = context.Run(reference, Stand::kLanded);
      EXPECT_TRUE(std::isnan(expected.out[0]));
      for (size_t i = 0; i < static_cast<size_t>(what.shape.OutDim()); ++i) {
        ASSERT_EQ(std::isnan(actual.out[i]), std::isnan(expected.out[i])) << "output " << i;
      }
    }
  }
}

TEST(AttentionOnTiles, IsUsedForSixteenRows) {
  if (!host::HasTiles()) GTEST_SKIP() << "this CPU has no matrix unit (AMX), or the kernel does not permit it";
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ASHLAR_SEED=" + std::to_string(seed));
  Random random(seed);
  Runner host(Host());
  AttentionCase what = RandomCase(random, AttentionKind::kGqa, {}, 0);
  what.shape.kv_heads = 1;
  what.shape.window = 0;
  what.spans = {{.tokens = 100}};
  for (const int32_t rows : {15, 16}) {
    what.shape.query_heads = rows;
    what.queries = {99};
    const AttentionContext context(random, what);
    const Attended on_tiles = context.Run(host, Stand::kLanded);
    host::AllowTiles(false);
    const Attended on_vectors = context.Run(host, Stand::kLanded);
    host::AllowTiles(true);
    EXPECT_EQ(on_tiles.out == on_vectors.out, rows == 15);
  }
}

}  // namespace
}  // namespace ashlar::kernels::testing
