// SPDX-License-Identifier: Apache-2.0
// The common fixture of the tests of decoding from buffers.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/testing/backends.h"
#include "kernels/testing/decoding_inputs.h"
#include "kernels/testing/print.h"

namespace ashlar::kernels::testing {

inline constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

// One request while it is decoded.
struct Session {
  // `initial` null: a context that was never flushed.
  Session(Random& random, const LinearShape& shape, DType buffer, int32_t slots, const TypedState* initial)
      : pages(random, shape, buffer, slots, static_cast<int32_t>(random.Integer(1, 20))) {
    if (initial != nullptr) state = *initial;
  }

  BufferedRequest View(bool flush = false) {
    return {.state = state ? state->View() : StateView{},
            .rounded = rounded ? rounded->View() : StateView{},
            .buffer = pages.View(filled),
            .flush = flush};
  }

  void MakeRounded(Runner& runner, const LinearShape& shape, DType dtype) {
    rounded = TypedState(shape, dtype);
    runner.Run(RebuildStateArgs{.shape = shape, .request = {.state = state->View()}, .target = rounded->View()});
  }

  std::optional<TypedState> state, rounded;
  SlotPages pages;
  int32_t filled = 0;
};

// One back end, one order.
class DecodingFixture : public ::testing::TestWithParam<std::tuple<Backend, StateOrder>> {
 protected:
  // Decodes one token of each session, tokens[i] of the layer's; returns their outputs.
  static std::vector<float> Step(Runner& runner, const DecodeLayer& layer, std::vector<Session>& sessions,
                                 const std::vector<int64_t>& tokens, const std::vector<bool>& flush) {
    const DecodeLayer inputs = layer.Gathered(tokens);
    std::vector<BufferedRequest> requests;
    for (size_t r = 0; r < sessions.size(); ++r) requests.push_back(sessions[r].View(flush[r]));
    std::vector<float> out(tokens.size() * static_cast<size_t>(layer.shape.heads * layer.shape.d_v));
    runner.Run(DecodeBufferedArgs{.shape = inputs.shape,
                                  .requests = requests,
                                  .inputs = inputs.View(0, inputs.count),
                                  .out = out.data(),
                                  .out_stride = int64_t{layer.shape.heads} * layer.shape.d_v});
    for (size_t r = 0; r < sessions.size(); ++r) {
      sessions[r].filled = flush[r] ? 0 : sessions[r].filled + 1;
      if (flush[r]) sessions[r].pages.Poison(0);
    }
    return out;
  }
  // For one session.
  std::vector<float> Step(const DecodeLayer& layer, Session& session, int64_t token, bool flush = false) {
    std::vector<Session> sessions = {session};
    std::vector<float> out = Step(runner_, layer, sessions, {token}, {flush});
    session = sessions[0];
    return out;
  }

  // The outputs of tokens [begin, begin + drafts), whose slots are filled but not in use yet.
  std::vector<float> Verify(const DecodeLayer& layer, Session& session, int64_t begin, int32_t drafts) {
    std::vector<float> out(static_cast<size_t>(drafts) * static_cast<size_t>(layer.shape.heads * layer.shape.d_v));
    const BufferedRequest request = session.View();
    runner_.Run(VerifyDraftsArgs{.shape = layer.shape,
                                 .requests = {&request, 1},
                                 .drafts = drafts,
                                 .inputs = layer.View(begin, begin + drafts),
                                 .out = out.data(),
                                 .out_stride = int64_t{layer.shape.heads} * layer.shape.d_v});
    return out;
  }

  // The state after the first `tokens` slots.
  std::vector<float> Rebuilt(const LinearShape& shape, Session& session, int32_t tokens) {
    TypedState target(shape, DType::kF32);
    runner_.Run(RebuildStateArgs{.shape = shape, .request = session.View(), .tokens = tokens, .target = target.View()});
    return target.Floats();
  }

  template <typename Fn>
  void ForEachFamily(int64_t tokens, const Fn& fn) {
    for (const Family family : kBufferedFamilies) {
      const DecodeLayer layer(random_, family, order_, tokens);
      SCOPED_TRACE(Name(family) + ", " + std::to_string(layer.shape.heads) + " heads of " +
                   std::to_string(layer.shape.key_heads) + ", d_k " + std::to_string(layer.shape.d_k) + ", d_v " +
                   std::to_string(layer.shape.d_v));
      fn(layer);
    }
  }
  template <typename Fn>
  void ForEachCase(int64_t tokens, const Fn& fn) {
    ForEachFamily(tokens, [&](const DecodeLayer& layer) {
      for (const DType state : kTypes) {
        for (const DType buffer : kTypes) {
          SCOPED_TRACE("state " + Name(state) + ", buffer " + Name(buffer));
          fn(layer, state, buffer);
        }
      }
    });
  }

  const StateOrder order_ = std::get<1>(GetParam());
  const uint64_t seed_ = FreshSeed();
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, "ASHLAR_SEED=" + std::to_string(seed_)};
  Random random_{seed_};
  Runner runner_{std::get<0>(GetParam())};
  Runner reference_{Reference()};
};

// Every back end except the reference with workers, which does not use them.
inline auto EveryDecoding() {
  std::vector<Backend> backends = Backends();
  std::erase_if(backends, [](const Backend& b) { return b.kernels == &Reference() && b.with_workers; });
  return ::testing::Combine(::testing::ValuesIn(backends),
                            ::testing::Values(StateOrder::kKeyFirst, StateOrder::kValueFirst));
}

inline constexpr auto kDecodingName = [](const auto& instance) {
  return ::testing::PrintToString(std::get<0>(instance.param)) + "_" + Name(std::get<1>(instance.param));
};

}  // namespace ashlar::kernels::testing
