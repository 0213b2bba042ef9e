// SPDX-License-Identifier: Apache-2.0
// Decoding from buffers: every back end against the recurrence over the same tokens, and against the reference.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <optional>

#include "kernels/testing/decoding_fixture.h"

namespace ashlar::kernels::testing {
namespace {

using DecodingTest = DecodingFixture;
INSTANTIATE_TEST_SUITE_P(Every, DecodingTest, EveryDecoding(), kDecodingName);

// Several requests, each flushed at different times: outputs and final states equal the recurrence's, and buffers equal
// the reference's.
TEST_P(DecodingTest, DecodesLikeTheRecurrence) {
  constexpr int64_t kRequests = 2, kSteps = 20;
  ForEachCase(kRequests * kSteps, [&](const DecodeLayer& layer, DType state_type, DType buffer_type) {
    std::vector<Session> sessions;
    std::vector<RecurrentPass> passes;
    for (int64_t r = 0; r < kRequests; ++r) {
      const TypedState initial(layer.shape, state_type, random_);
      sessions.emplace_back(random_, layer.shape, buffer_type, kSteps, &initial);
      passes.emplace_back(layer, r * kSteps, (r + 1) * kSteps, &initial);
    }
    std::vector<Session> expected = sessions;
    std::vector<std::vector<float>> outs(kRequests);
    std::vector<int> flushes(kRequests);
    const size_t out_floats = static_cast<size_t>(layer.shape.heads * layer.shape.d_v);
    for (int64_t step = 0; step < kSteps; ++step) {
      std::vector<bool> flush;
      std::vector<int64_t> tokens;
      for (int64_t r = 0; r < kRequests; ++r) {
        flush.push_back(random_.Integer(0, 6) == 0);
        flushes[r] += flush.back() ? 1 : 0;
        tokens.push_back(r * kSteps + step);
      }
      const std::vector<float> out = Step(runner_, layer, sessions, tokens, flush);
      const std::vector<float> expected_out = Step(reference_, layer, expected, tokens, flush);
      // Both round u, but a number near the middle of two may round either way.
      EXPECT_LE(Distance(out, expected_out), DecodeTolerance(state_type, buffer_type, 1));
      for (int64_t r = 0; r < kRequests; ++r) {
        outs[r].insert(outs[r].end(), out.begin() + r * out_floats, out.begin() + (r + 1) * out_floats);
      }
    }
    for (int64_t r = 0; r < kRequests; ++r) {
      const double tolerance = DecodeTolerance(state_type, buffer_type, flushes[r]);
      EXPECT_LE(Distance(outs[r], passes[r].out), tolerance);
      EXPECT_LE(Distance(Rebuilt(layer.shape, sessions[r], sessions[r].filled), passes[r].states.back()), tolerance);
      EXPECT_EQ(sessions[r].filled, expected[r].filled);
      EXPECT_LE(Distance(sessions[r].pages.Floats(sessions[r].filled), expected[r].pages.Floats(expected[r].filled)),
                DecodeTolerance(state_type, buffer_type, 1));
    }
  });
}

// Without a buffer: filled = 0 and flush, planes null.
TEST_P(DecodingTest, RecurrentDecodingNeedsNoBuffer) {
  ForEachFamily(8, [&](const DecodeLayer& layer) {
    TypedState state(layer.shape, DType::kF32, random_);
    const RecurrentPass pass(layer, 0, 8, &state);
    const BufferedRequest request{.state = state.View(), .flush = true};
    std::vector<float> out(pass.out.size());
    const int64_t token_floats = int64_t{layer.shape.heads} * layer.shape.d_v;
    for (int64_t t = 0; t < 8; ++t) {
      runner_.Run(DecodeBufferedArgs{.shape = layer.shape,
                                     .requests = {&request, 1},
                                     .inputs = layer.View(t, t + 1),
                                     .out = out.data() + t * token_floats,
                                     .out_stride = token_floats});
    }
    EXPECT_LE(Distance(out, pass.out), 1e-5);
    EXPECT_LE(Distance(state.Floats(), pass.states.back()), 1e-5);
  });
}

// m drafts at once equal m steps of the recurrence, without changing the state. Rejected drafts have no effect, however
// many drafts are accepted.
TEST_P(DecodingTest, VerifiesDraftsAndErasesTheRejected) {
  ForEachCase(40, [&](const DecodeLayer& layer, DType state_type, DType buffer_type) {
    const TypedState initial(layer.shape, state_type, random_);
    Session session(random_, layer.shape, buffer_type, 40, &initial);
    const auto before = static_cast<int32_t>(random_.Integer(0, 9));
    for (int32_t t = 0; t < before; ++t) Step(layer, session, t);
    const int32_t drafts = std::array{1, 2, 3, 4, 7, kMaxDrafts}[random_.Integer(0, 5)];
    const std::vector<float> out = Verify(layer, session, before, drafts);
    const double tolerance = DecodeTolerance(state_type, buffer_type, 1);
    const RecurrentPass pass(layer, 0, before + drafts, &initial);
    const auto first = pass.out.begin() + before * layer.shape.heads * layer.shape.d_v;
    EXPECT_LE(Distance(out, {first, pass.out.end()}), tolerance) << drafts << " drafts behind " << before;
    EXPECT_EQ(session.state->bytes(), initial.bytes());

    for (int32_t accepted = 0; accepted <= drafts; accepted += accepted < 2 ? 1 : 3) {
      Session next = session;
      next.filled += accepted;
      // Other tokens than the rejected ones: the last ones of the layer, and a flush at the end.
      std::vector<int64_t> tokens(static_cast<size_t>(before + accepted));
      std::iota(tokens.begin(), tokens.end(), 0);
      for (int64_t t = 36; t < 40; ++t) {
        tokens.push_back(t);
        Step(layer, next, t, t == 39);
      }
      const DecodeLayer accepted_layer = layer.Gathered(tokens);
      const RecurrentPass accepted_pass(accepted_layer, 0, accepted_layer.count, &initial);
      EXPECT_LE(Distance(next.state->Floats(), accepted_pass.states.back()), tolerance) << accepted << " accepted";
    }
  });
}

// Drafts of several requests with buffers of different lengths, one of them without a state.
TEST_P(DecodingTest, VerifiesSeveralRequests) {
  constexpr int32_t kDrafts = 4;
  ForEachFamily(3 * 10, [&](const DecodeLayer& layer) {
    std::vector<Session> sessions;
    std::vector<BufferedRequest> requests;
    std::vector<int64_t> tokens;
    std::vector<float> expected;
    for (int32_t r = 0; r < 3; ++r) {
      const TypedState initial(layer.shape, DType::kF32, random_);
      sessions.emplace_back(random_, layer.shape, DType::kF32, 10, r == 1 ? nullptr : &initial);
      for (int32_t t = 0; t < 3 * r; ++t) Step(layer, sessions.back(), r * 10 + t);
      for (int32_t t = 0; t < kDrafts; ++t) tokens.push_back(r * 10 + 3 * r + t);
      const RecurrentPass pass(layer, r * 10, r * 10 + 3 * r + kDrafts, r == 1 ? nullptr : &initial);
      expected.insert(expected.end(), pass.out.begin() + 3 * r * layer.shape.heads * layer.shape.d_v, pass.out.end());
    }
    for (Session& session : sessions) requests.push_back(session.View());
    const DecodeLayer inputs = layer.Gathered(tokens);
    std::vector<float> out(expected.size());
    runner_.Run(VerifyDraftsArgs{.shape = layer.shape,
                                 .requests = requests,
                                 .drafts = kDrafts,
                                 .inputs = inputs.View(0, inputs.count),
                                 .out = out.data(),
                                 .out_stride = int64_t{layer.shape.heads} * layer.shape.d_v});
    EXPECT_LE(Distance(out, expected), 1e-5);
  });
}

TEST_P(DecodingTest, RebuildsTheStateAtEveryPosition) {
  constexpr int32_t kSlots = 13;
  ForEachCase(kSlots, [&](const DecodeLayer& layer, DType state_type, DType buffer_type) {
    const TypedState initial(layer.shape, state_type, random_);
    Session session(random_, layer.shape, buffer_type, kSlots, &initial);
    for (int64_t t = 0; t < kSlots; ++t) Step(layer, session, t);
    const RecurrentPass pass(layer, 0, kSlots, &initial);
    for (int32_t t = 0; t <= kSlots; ++t) {
      EXPECT_LE(Distance(Rebuilt(layer.shape, session, t), pass.states[t]),
                DecodeTolerance(DType::kF32, buffer_type, 0))
          << t << " of " << kSlots;
    }
    // In place, and the following steps start from there.
    BufferedRequest request = session.View();
    runner_.Run(RebuildStateArgs{.shape = layer.shape, .request = request, .tokens = 7, .target = request.state});
    EXPECT_LE(Distance(session.state->Floats(), pass.states[7]), DecodeTolerance(state_type, buffer_type, 1));
    session.filled = 0;
    for (int64_t t = 7; t < kSlots; ++t) Step(layer, session, t);
    EXPECT_LE(Distance(Rebuilt(layer.shape, session, session.filled), pass.states.back()),
              DecodeTolerance(state_type, buffer_type, 1));
  });
}

// Without a state: all of a short context stays in its buffer. Then its first state is built.
TEST_P(DecodingTest, DecodesFromKeysAndWritesAlone) {
  constexpr int64_t kContext = 70, kTokens = kContext + 5;  // longer than the part that is held as fp32 at a time
  ForEachFamily(kTokens, [&](const DecodeLayer& layer) {
    for (const DType buffer_type : {DType::kF32, DType::kF16}) {
      SCOPED_TRACE("buffer " + Name(buffer_type));
      Session session(random_, layer.shape, buffer_type, kTokens, nullptr);
      std::vector<float> out;
      for (int64_t t = 0; t < kContext; ++t) {
        const std::vector<float> token = Step(layer, session, t);
        out.insert(out.end(), token.begin(), token.end());
      }
      session.state = TypedState(layer.shape, DType::kF32);
      BufferedRequest request = session.View();
      request.state = {};
      runner_.Run(RebuildStateArgs{
          .shape = layer.shape, .request = request, .tokens = session.filled, .target = session.state->View()});
      session.filled = 0;
      for (int64_t t = kContext; t < kTokens; ++t) {
        const std::vector<float> token = Step(layer, session, t, t + 1 == kTokens);
        out.insert(out.end(), token.begin(), token.end());
      }
      const RecurrentPass pass(layer, 0, kTokens, nullptr);
      const double tolerance = DecodeTolerance(DType::kF32, buffer_type, 0);
      EXPECT_LE(Distance(out, pass.out), tolerance);
      EXPECT_LE(Distance(session.state->Floats(), pass.states.back()), tolerance);
    }
  });
}

// Buffers that are longer than the part held as fp32 at a time, and just not longer.
TEST_P(DecodingTest, FlushesLongBuffers) {
  ForEachFamily(131, [&](const DecodeLayer& layer) {
    for (const int64_t tokens : {65, 66, 131}) {
      const TypedState initial(layer.shape, DType::kF32, random_);
      Session session(random_, layer.shape, DType::kF32, 131, &initial);
      for (int64_t t = 0; t < tokens; ++t) Step(layer, session, t, t + 1 == tokens);
      const RecurrentPass pass(layer, 0, tokens, &initial);
      EXPECT_LE(Distance(session.state->Floats(), pass.states.back()), 1e-5) << tokens;

      Session rounded(random_, layer.shape, DType::kF32, 131, &initial);
      rounded.MakeRounded(runner_, layer.shape, DType::kF16);
      for (int64_t t = 0; t < tokens; ++t) Step(layer, rounded, t, t + 1 == tokens);
      EXPECT_LE(Distance(rounded.state->Floats(), pass.states.back()), DecodeTolerance(DType::kF16, DType::kF32, 1));
      EXPECT_LE(Distance(rounded.rounded->Floats(), rounded.state->Floats()), UnitRoundoff(DType::kF16)) << tokens;
    }
  });
}

// fp32 states with a rounded copy: outputs equal the recurrence's to within one rounding, however often the state is
// flushed; a flush renews the copy, and nothing else changes either.
TEST_P(DecodingTest, ReadsRoundedCopies) {
  constexpr int32_t kTokens = 24, kDrafts = 4;
  ForEachFamily(kTokens, [&](const DecodeLayer& layer) {
    for (const DType rounded_type : {DType::kF16, DType::kBF16}) {
      SCOPED_TRACE("copies of " + Name(rounded_type));
      const TypedState initial(layer.shape, DType::kF32, random_);
      Session session(random_, layer.shape, DType::kF16, kTokens, &initial);
      session.MakeRounded(runner_, layer.shape, rounded_type);
      const RecurrentPass pass(layer, 0, kTokens, &initial);
      const double tolerance = DecodeTolerance(rounded_type, DType::kF16, 1);
      const auto expect_outputs = [&](const std::vector<float>& out, int64_t begin) {
        const auto first = pass.out.begin() + begin * layer.shape.heads * layer.shape.d_v;
        EXPECT_LE(Distance(out, {first, first + static_cast<int64_t>(out.size())}), tolerance) << "token " << begin;
      };
      for (int64_t t = 0; t < kTokens - kDrafts; ++t) {
        const bool flush = random_.Integer(0, 3) == 0;
        const auto state = session.state->bytes(), rounded = session.rounded->bytes();
        expect_outputs(Step(layer, session, t, flush), t);
        EXPECT_EQ(session.state->bytes() == state, !flush);
        if (!flush) {
          EXPECT_EQ(session.rounded->bytes(), rounded);
          continue;
        }
        Session again = session;
        again.MakeRounded(runner_, layer.shape, rounded_type);
        EXPECT_EQ(session.rounded->bytes(), again.rounded->bytes());
        EXPECT_LE(Distance(session.state->Floats(), pass.states[t + 1]), tolerance);
      }
      expect_outputs(Verify(layer, session, kTokens - kDrafts, kDrafts), kTokens - kDrafts);
    }
  });
}

// Requests with copies of either type, and without, together in one call, each flushed at different times.
TEST_P(DecodingTest, DecodesWithAndWithoutCopiesTogether) {
  constexpr int64_t kRequests = 5, kSteps = 10;
  constexpr std::optional<DType> kCopies[kRequests] = {DType::kF16, std::nullopt, DType::kF16, DType::kBF16,
                                                       DType::kF16};
  ForEachFamily(kRequests * kSteps, [&](const DecodeLayer& layer) {
    std::vector<Session> sessions;
    std::vector<RecurrentPass> passes;
    for (int64_t r = 0; r < kRequests; ++r) {
      const TypedState initial(layer.shape, DType::kF32, random_);
      sessions.emplace_back(random_, layer.shape, DType::kF32, kSteps, &initial);
      if (kCopies[r]) sessions.back().MakeRounded(runner_, layer.shape, *kCopies[r]);
      passes.emplace_back(layer, r * kSteps, (r + 1) * kSteps, &initial);
    }
    const size_t out_floats = static_cast<size_t>(layer.shape.heads * layer.shape.d_v);
    std::vector<std::vector<float>> outs(kRequests);
    for (int64_t step = 0; step < kSteps; ++step) {
      std::vector<bool> flush;
      std::vector<int64_t> tokens;
      for (int64_t r = 0; r < kRequests; ++r) {
        flush.push_back(random_.Integer(0, 2) == 0);
        tokens.push_back(r * kSteps + step);
      }
      const std::vector<float> out = Step(runner_, layer, sessions, tokens, flush);
      for (int64_t r = 0; r < kRequests; ++r) {
        outs[r].insert(outs[r].end(), out.begin() + r * out_floats, out.begin() + (r + 1) * out_floats);
        if (!flush[r] || !kCopies[r]) continue;
        EXPECT_LE(Distance(sessions[r].rounded->Floats(), sessions[r].state->Floats()), UnitRoundoff(*kCopies[r])) << r;
      }
    }
    for (int64_t r = 0; r < kRequests; ++r) {
      EXPECT_LE(Distance(outs[r], passes[r].out), DecodeTolerance(kCopies[r].value_or(DType::kF32), DType::kF32, 1))
          << r;
    }
  });
}

// Tokens that do not flush read the copy, not the state; tokens that flush read the state.
TEST_P(DecodingTest, ReadsTheStateOnlyToFlush) {
  ForEachFamily(1, [&](const DecodeLayer& layer) {
    const TypedState initial(layer.shape, DType::kF32, random_), other(layer.shape, DType::kF32, random_);
    const auto decode = [&](const TypedState& state, const TypedState& rounded_from, bool flush) {
      Session session(random_, layer.shape, DType::kF32, 1, &rounded_from);
      session.MakeRounded(runner_, layer.shape, DType::kBF16);
      session.state = state;
      return Step(layer, session, 0, flush);
    };
    EXPECT_EQ(decode(other, initial, false), decode(initial, initial, false));
    EXPECT_EQ(decode(initial, other, true), decode(initial, initial, true));
    EXPECT_GT(Distance(decode(initial, other, false), decode(initial, initial, false)), 0.1);
  });
}

// Decay that leaves nothing of a token before the next one: no product of it with its inverse may be formed.
TEST_P(DecodingTest, SurvivesStrongDecay) {
  for (const Family family : {Family::kGdn, Family::kGla, Family::kKda, Family::kMamba2}) {
    for (const float strong : {-60.0f, -500.0f, -INFINITY}) {
      SCOPED_TRACE(Name(family) + ", log decay " + std::to_string(strong));
      DecodeLayer layer(random_, family, order_, 20);
      for (size_t i = 0; i < layer.g.size(); i += 3) layer.g[i] = std::isnan(layer.g[i]) ? layer.g[i] : strong;
      for (size_t i = 0; family == Family::kMamba2 && i < layer.table.size(); i += 2) layer.table[i] = strong;
      const TypedState initial(layer.shape, DType::kF32, random_);
      Session session(random_, layer.shape, DType::kF32, 20, &initial);
      std::vector<float> out;
      for (int64_t t = 0; t < 16; ++t) {
        const std::vector<float> token = Step(layer, session, t, t == 11);
        out.insert(out.end(), token.begin(), token.end());
      }
      const std::vector<float> drafts = Verify(layer, session, 16, 4);
      out.insert(out.end(), drafts.begin(), drafts.end());
      EXPECT_LE(Distance(out, RecurrentPass(layer, 0, 20, &initial).out), 1e-5);
    }
  }
}

// States are converted bit by bit: all 16-bit numbers, and every case of rounding.
TEST_P(DecodingTest, ConvertsStatesToTheBit) {
  LinearShape shape{.family = Family::kDeltanet, .heads = 1, .key_heads = 1, .d_k = 256, .d_v = 256, .order = order_};
  for (const DType type : {DType::kF16, DType::kBF16}) {
    SCOPED_TRACE(Name(type));
    std::vector<uint16_t> stored(256 * 256), rounded(stored.size());
    std::iota(stored.begin(), stored.end(), 0);
    std::vector<float> floats(stored.size());
    int32_t exponent = 0;
    void *stored_head = stored.data(), *float_head = floats.data(), *rounded_head = rounded.data();
    const auto convert = [&](const StateView& from, const StateView& to) {
      runner_.Run(RebuildStateArgs{.shape = shape, .request = {.state = from}, .tokens = 0, .target = to});
    };
    int32_t* const exponents = type == DType::kF16 ? &exponent : nullptr;
    convert({&stored_head, type, exponents}, {&float_head, DType::kF32});
    for (size_t i = 0; i < stored.size(); ++i) {
      const float expected = ReadElement(type, stored.data(), static_cast<int64_t>(i));
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(floats[i])) << i;
      } else {
        ASSERT_EQ(floats[i], expected) << i;
      }
    }
    for (size_t i = 0; i < floats.size(); ++i) {
      // Within a type's range, below it, and half-way between two of its numbers.
      const float magnitude =
          std::ldexp(static_cast<float>(random_.Uniform(1, 2)), static_cast<int>(random_.Integer(-28, 14)));
      const float number = i % 2 == 0 ? magnitude : -magnitude;
      floats[i] = i % 3 == 0 ? std::ldexp(std::nearbyint(std::ldexp(number, 12)), -12) : number;
    }
    convert({&float_head, DType::kF32}, {&rounded_head, type, exponents});
    EXPECT_EQ(exponent, 0);
    for (size_t i = 0; i < floats.size(); ++i) {
      uint16_t expected;
      WriteElement(type, &expected, 0, floats[i]);
      ASSERT_EQ(rounded[i], expected) << floats[i];
    }
  }
}

// States that exceed fp16's range get the smallest exponent that holds them.
TEST_P(DecodingTest, ScalesStatesOfFp16) {
  DecodeLayer layer(random_, Family::kRetnet, order_, 1);
  TypedState state(layer.shape, DType::kF32, random_), target(layer.shape, DType::kF16);
  const std::vector<float> ones(static_cast<size_t>(layer.shape.d_k * layer.shape.d_v), 1.0f);
  for (const auto& [largest, exponent] : std::vector<std::pair<float, int32_t>>{
           {0, 0}, {32768, 0}, {std::nextafter(32768.0f, 1e9f), 1}, {65536, 1}, {70000, 2}, {3e6f, 7}}) {
    static_cast<float*>(state.View().heads[0])[3] = largest;
    runner_.Run(RebuildStateArgs{.shape = layer.shape, .request = {.state = state.View()}, .target = target.View()});
    EXPECT_EQ(target.View().exponents[0], exponent) << largest;
    EXPECT_LE(Distance(target.Floats(), state.Floats()), UnitRoundoff(DType::kF16)) << largest;
  }
}

}  // namespace
}  // namespace ashlar::kernels::testing
