// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/test_engine.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>

#include "kernels/kernels.h"
#include "kernels/layer_shape.h"
#include "tests/integration/content.h"
#include "tests/integration/daemon_process.h"

namespace ashlar::integration {
namespace {

constexpr uint32_t kHead = 4, kTail = 3;
constexpr uint32_t kRotaryDim = 16;
constexpr uint64_t kSourcePosition = 7;  // position of a run's token 0 when it is published; not on a page boundary

struct Interior {
  uint64_t first, tokens;
};
Interior InteriorOf(ObjectKind kind, const Tokens& run) {
  if (kind == ObjectKind::kCheckpoint) return {0, run.size()};
  return {kHead, run.size() - kHead - kTail};
}

int SealedMemfd(uint64_t bytes) {
  const int fd = ::memfd_create("test-engine", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  EXPECT_EQ(::ftruncate(fd, static_cast<off_t>(bytes)), 0);
  EXPECT_EQ(::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
  return fd;
}

}  // namespace

Tokens MakeRun(uint64_t seed, size_t tokens) {
  Tokens run(tokens);
  for (size_t i = 0; i < tokens; ++i) run[i] = static_cast<int32_t>(Mix(seed * 1'000'003 + i) % 50'000);
  return run;
}

std::vector<Tokens> MakePrompt(uint64_t seed, size_t segments, size_t tokens) {
  std::vector<Tokens> prompt;
  for (size_t i = 0; i < segments; ++i) prompt.push_back(MakeRun(seed * 1'000 + i, tokens));
  return prompt;
}

TestEngine::TestEngine(ClientOptions options, const Shape& shape, Memory memory) : shape_(shape) {
  std::string why;
  if (memory == Memory::kGpuRegistered) options.gpu = kernels::FindGpu(shape_.gpu, &why);
  MakeLayout();
  Place();
  absl::StatusOr<std::unique_ptr<Client>> client;
  // The session slot of a client that has just disconnected may not be free yet.
  Eventually([&] { return !absl::IsResourceExhausted((client = Client::Connect(options)).status()); });
  EXPECT_TRUE(client.ok()) << client.status();
  client_ = *std::move(client);
  absl::StatusOr<Region> region = MakeRegion(memory);
  EXPECT_TRUE(region.ok()) << region.status();
  region_ = *std::move(region);
  if (region_.memory() == kernels::MemoryKind::kDevice) near_ = std::make_unique<std::byte[]>(region_.size());
  const Shard shard{.tensor_parallel_rank = shape_.shard.rank, .tensor_parallel_size = shape_.shard.size};
  auto model =
      client_->OpenModel(identity(), Whole(), shard, {.tokens_per_second = shape_.tokens_per_second}, shape_.prefixes);
  EXPECT_TRUE(model.ok()) << model.status();
  model_ = std::make_unique<Model>(*std::move(model));
  const absl::Status declared = model_->DeclarePages(region_, pages_);
  EXPECT_TRUE(declared.ok()) << declared;
}

absl::StatusOr<Region> TestEngine::MakeRegion(Memory memory) {
  if (memory == Memory::kHosted) return client_->HostRegion(bytes_);
  if (memory == Memory::kRegistered || memory == Memory::kTouched) {
    const int fd = SealedMemfd(bytes_);
    const bool taken = memory != Memory::kTouched || ::fallocate(fd, 0, 0, static_cast<off_t>(bytes_)) == 0;
    EXPECT_TRUE(taken);
    absl::StatusOr<Region> region = client_->RegisterRegion(fd, bytes_);
    ::close(fd);
    return region;
  }
  std::string why;
  const kernels::Gpu* const gpu = kernels::FindGpu(shape_.gpu, &why);
  if (gpu == nullptr) return absl::FailedPreconditionError(why);
  kernels::ArenaError error;
  gpu_memory_ = gpu->MakeArena(bytes_, &error);
  if (gpu_memory_ == nullptr) return absl::ResourceExhaustedError(error.message);
  return client_->RegisterGpuRegion(gpu_memory_->descriptor(), gpu_memory_->data(), gpu_memory_->bytes());
}

void TestEngine::Push() const {
  std::string why;
  if (near_ == nullptr) return;
  kernels::FindGpu(shape_.gpu, &why)->CopyToDevice(region_.data(), near_.get(), region_.size());
}
void TestEngine::Pull() const {
  std::string why;
  if (near_ == nullptr) return;
  kernels::FindGpu(shape_.gpu, &why)->CopyToHost(near_.get(), region_.data(), region_.size());
}

void TestEngine::MakeLayout() {
  layout_ = {.page_tokens = kPageTokens, .head = kHead, .tail = kTail, .layers = {}};
  Rope rope{.kind = RopeStyle::kHalfSplit, .rotary_dim = kRotaryDim, .scale = 1.0, .frequencies = {}};
  for (uint32_t i = 0; i < kRotaryDim / 2; ++i) {
    rope.frequencies.push_back(std::pow(10'000.0, -2.0 * i / kRotaryDim));
  }
  for (uint32_t i = 0; i < shape_.layers; ++i) {
    layout_.layers.push_back(LinearLayer{.key_heads = kKeyHeads,
                                         .value_heads = kValueHeads,
                                         .d_k = kDk,
                                         .d_v = kDv,
                                         .decay_table = {},
                                         .conv_channels = kChannels,
                                         .conv_kernel = kConvKernel,
                                         .rope = {}});
    layout_.layers.push_back(AttentionLayer{
        .kv_heads = shape_.kv_heads, .key_dim = shape_.key_dim, .value_dim = shape_.value_dim, .rope = rope});
  }
}

Layout TestEngine::Whole() const {
  Layout whole = layout_;
  for (Layer& layer : whole.layers) {
    if (auto* linear = std::get_if<LinearLayer>(&layer)) {
      linear->key_heads *= shape_.shard.size;
      linear->value_heads *= shape_.shard.size;
      linear->conv_channels *= shape_.shard.size;
    } else {
      std::get<AttentionLayer>(layer).kv_heads *= shape_.shard.size;
    }
  }
  return whole;
}

uint64_t TestEngine::RowFloats() const {
  return uint64_t{shape_.kv_heads} * (uint64_t{shape_.key_dim} + shape_.value_dim);
}

// One token's keys and values of a layer are adjacent. The first half of the pages is for publishing, the other for
// landing, and the tables list each in random order.
void TestEngine::Place() {
  const uint32_t half = shape_.tokens / kPageTokens + 1;
  const uint64_t token_stride = RowFloats() * sizeof(float);
  pages_ = {.page_tokens = kPageTokens, .pages = 2 * half, .layers = {}};
  uint64_t end = 0;
  for (uint32_t i = 0; i < shape_.layers; ++i) {
    pages_.layers.push_back({.layer = 2 * i + 1,
                             .key_offset = end,
                             .value_offset = end + uint64_t{shape_.kv_heads} * shape_.key_dim * sizeof(float),
                             .page_stride = kPageTokens * token_stride,
                             .token_stride = token_stride,
                             .key_head_stride = shape_.key_dim * sizeof(float),
                             .value_head_stride = shape_.value_dim * sizeof(float)});
    end += 2 * half * kPageTokens * token_stride;
  }
  const auto tensor = [&](uint64_t floats) {
    const uint64_t begin = end;
    end += floats * sizeof(float);
    return reinterpret_cast<const std::byte*>(begin);
  };
  for (uint32_t i = 0; i < shape_.layers * std::max(shape_.captures, 1u); ++i) {
    tensors_.push_back({.layer = 2 * (i % shape_.layers),
                        .transition = tensor(kValueHeads * kDk * kDk),
                        .state = tensor(kValueHeads * kDk * kDv),
                        .conv_tail = tensor((kConvKernel - 1) * kChannels)});
  }
  bytes_ = end;
  source_table_.resize(half);
  target_table_.resize(half);
  std::iota(source_table_.begin(), source_table_.end(), 0);
  std::iota(target_table_.begin(), target_table_.end(), static_cast<int32_t>(half));
  std::mt19937 random(half);
  std::shuffle(source_table_.begin(), source_table_.end(), random);
  std::shuffle(target_table_.begin(), target_table_.end(), random);
}

float* TestEngine::Row(std::span<const int32_t> table, uint32_t attention, uint64_t position) const {
  const PagedLayer& layer = pages_.layers[attention];
  const uint64_t offset = layer.key_offset + table[position / kPageTokens] * layer.page_stride +
                          position % kPageTokens * layer.token_stride;
  return reinterpret_cast<float*>(near() + offset);
}

namespace {

std::pair<Tokens, std::vector<uint64_t>> Joined(const std::vector<Tokens>& segments) {
  Tokens tokens;
  std::vector<uint64_t> lengths;
  for (const Tokens& segment : segments) {
    tokens.insert(tokens.end(), segment.begin(), segment.end());
    lengths.push_back(segment.size());
  }
  return {tokens, lengths};
}

}  // namespace

Match TestEngine::Lookup(const std::vector<Tokens>& segments) {
  const auto [tokens, lengths] = Joined(segments);
  return model_->Lookup(Prompt{tokens, lengths});
}

MatchAndLanding TestEngine::LookupAndLand(const std::vector<Tokens>& segments) {
  const auto [tokens, lengths] = Joined(segments);
  return model_->LookupAndLand(Prompt{tokens, lengths}, target_table_);
}

Reservation TestEngine::Reserve(ObjectKind kind, const Tokens& run) {
  const ObjectRun object{kind, run};
  return model_->Reserve(std::span(&object, 1)).front();
}

PublishParts TestEngine::Compute(ObjectKind kind, const Tokens& run) {
  PublishParts parts{.linear = {},
                     .region = region_,
                     .page_table = source_table_,
                     .first_position = kSourcePosition,
                     .provenance = Provenance::kExact};
  for (const PublishParts::Linear& at : std::span(tensors_).first(shape_.layers)) {
    const auto write = [&](const std::byte* offset, PartForm form, uint64_t floats) -> const std::byte* {
      const auto place = reinterpret_cast<uintptr_t>(offset);
      Content(kind, run, at.layer, form, shape_.shard.rank).Write(reinterpret_cast<float*>(near() + place), 0, floats);
      return region_.data() + place;
    };
    PublishParts::Linear tensors{.layer = at.layer};
    if (kind == ObjectKind::kSegment) {
      tensors.transition = write(at.transition, PartForm::kTransitionDense, kValueHeads * kDk * kDk);
    }
    tensors.state = write(at.state, PartForm::kState, kValueHeads * kDk * kDv);
    tensors.conv_tail = write(at.conv_tail, PartForm::kConvTail, (kConvKernel - 1) * kChannels);
    parts.linear.push_back(tensors);
  }
  const uint64_t key_floats = uint64_t{shape_.kv_heads} * shape_.key_dim;
  const uint64_t value_floats = uint64_t{shape_.kv_heads} * shape_.value_dim;
  for (uint32_t i = 0; i < shape_.layers; ++i) {
    const Content keys(kind, run, 2 * i + 1, PartForm::kKeys, shape_.shard.rank),
        values(kind, run, 2 * i + 1, PartForm::kValues, shape_.shard.rank);
    for (uint64_t token = 0; token < run.size(); ++token) {
      float* row = Row(source_table_, i, kSourcePosition + token);
      keys.Write(row, token * key_floats, key_floats);
      values.Write(row + key_floats, token * value_floats, value_floats);
    }
  }
  Push();
  return parts;
}

void TestEngine::Publish(ObjectKind kind, const Tokens& run) {
  const Reservation reservation = Reserve(kind, run);
  ASSERT_EQ(reservation.outcome, ReserveOutcome::kGranted) << Name(reservation.outcome);
  const PublishOutcome outcome = model_->Publish(reservation, Compute(kind, run));
  ASSERT_EQ(outcome, PublishOutcome::kPublished) << Name(outcome);
}

void TestEngine::PublishPrompt(const std::vector<Tokens>& segments) {
  for (size_t i = 0; i < segments.size(); ++i) Publish(KindOfSegment(i), segments[i]);
}

Landing TestEngine::Land(const Match& match, const std::vector<Tokens>& segments) {
  std::vector<LandSegment> asked;
  uint64_t position = 0;
  for (uint32_t i = 0; i < segments.size(); ++i) {
    asked.push_back({i, position});
    position += segments[i].size();
  }
  return model_->Land(match, target_table_, asked);
}

void TestEngine::FillTargets(std::byte value) {
  const uint64_t half = target_table_.size();
  for (const PagedLayer& layer : pages_.layers) {
    std::memset(near() + layer.key_offset + half * layer.page_stride, static_cast<int>(value),
                half * layer.page_stride);
  }
  Push();
}

bool TestEngine::TargetsAre(std::byte value) const {
  Pull();
  const uint64_t half = target_table_.size();
  return std::all_of(pages_.layers.begin(), pages_.layers.end(), [&](const PagedLayer& layer) {
    const std::byte* begin = near() + layer.key_offset + half * layer.page_stride;
    return *begin == value && std::memcmp(begin, begin + 1, half * layer.page_stride - 1) == 0;
  });
}

void TestEngine::ExpectLanded(ObjectKind kind, const Tokens& run, uint64_t first_position, std::byte around,
                              int64_t rotary_shift) const {
  Pull();
  const auto [first, tokens] = InteriorOf(kind, run);
  const uint64_t key_floats = uint64_t{shape_.kv_heads} * shape_.key_dim;
  const uint64_t value_floats = uint64_t{shape_.kv_heads} * shape_.value_dim;
  const auto queue = kernels::Reference().MakeQueue(nullptr);
  std::vector<float> keys(tokens * key_floats), values(value_floats);
  const std::vector<std::byte> untouched(RowFloats() * sizeof(float), around);
  for (uint32_t i = 0; i < shape_.layers; ++i) {
    const uint32_t layer = 2 * i + 1;
    const Content value_content(kind, run, layer, PartForm::kValues, shape_.shard.rank);
    Content(kind, run, layer, PartForm::kKeys, shape_.shard.rank).Write(keys.data(), first * key_floats, keys.size());
    kernels::RotateKeysArgs rotate{
        .rotation = kernels::RotationOf(std::get<AttentionLayer>(layout_.layers[layer]).rope),
        .delta = static_cast<int64_t>(first_position) + rotary_shift,
        .rows = static_cast<int64_t>(tokens * shape_.kv_heads),
        .dim = static_cast<int32_t>(shape_.key_dim),
        .source = keys.data(),
        .target = keys.data()};
    kernels::Reference().RotateKeys(rotate, *queue).Wait();
    for (uint64_t token = 0; token < run.size(); ++token) {
      const float* row = Row(target_table_, i, first_position + token);
      if (token < first || token >= first + tokens) {
        ASSERT_EQ(std::memcmp(row, untouched.data(), untouched.size()), 0) << "seam token " << token << " was written";
        continue;
      }
      value_content.Write(values.data(), token * value_floats, value_floats);
      ASSERT_EQ(std::memcmp(row + key_floats, values.data(), value_floats * sizeof(float)), 0)
          << "values of token " << token << ", layer " << layer;
      for (uint64_t k = 0; k < key_floats; ++k) {
        ASSERT_NEAR(row[k], keys[(token - first) * key_floats + k], 1e-6) << "keys of token " << token;
      }
    }
  }
}

void TestEngine::ExpectTuples(const Match& match, size_t segment, const Tokens& run) const {
  ASSERT_NE(match.tuples(segment), nullptr);
  ASSERT_EQ(match.tuples(segment)->size(), layout_.layers.size());
  for (uint32_t layer = 0; layer < layout_.layers.size(); layer += 2) ExpectTuple(match, segment, run, layer);
}

void TestEngine::ExpectTuple(const Match& match, size_t segment, const Tokens& run, uint32_t layer) const {
  const ObjectKind kind = KindOfSegment(segment);
  ASSERT_NE(match.tuples(segment), nullptr);
  const MappedTuple& tuple = (*match.tuples(segment))[layer];
  const auto expect = [&](PartForm form, uint64_t first, const void* mapped, uint64_t floats) {
    std::vector<float> content(floats);
    Content(kind, run, layer, form, shape_.shard.rank).Write(content.data(), first, floats);
    std::vector<float> copy;
    if (tuple.memory == kernels::MemoryKind::kDevice) {
      std::string why;
      copy.resize(floats);
      kernels::FindGpu(shape_.gpu, &why)->CopyToHost(copy.data(), mapped, floats * sizeof(float));
      mapped = copy.data();
    }
    ASSERT_EQ(std::memcmp(mapped, content.data(), floats * sizeof(float)), 0) << "layer " << layer << " " << Name(form);
  };
  const kernels::HeadTuple* heads = tuple.view.heads;
  for (uint32_t head = 0; head < kValueHeads; ++head) {
    ASSERT_EQ(heads[head].form == TransitionForm::kDense, kind == ObjectKind::kSegment);
    expect(PartForm::kState, head * kDk * kDv, heads[head].state, kDk * kDv);
    if (kind != ObjectKind::kSegment) continue;
    expect(PartForm::kTransitionDense, head * kDk * kDk, heads[head].transition, kDk * kDk);
  }
  expect(PartForm::kConvTail, 0, tuple.conv_tail, (kConvKernel - 1) * kChannels);
}

std::string TestEngine::ValueRow(ObjectKind kind, const Tokens& run, uint32_t layer, uint64_t token) const {
  const uint64_t floats = uint64_t{shape_.kv_heads} * shape_.value_dim;
  std::vector<float> row(floats);
  Content(kind, run, layer, PartForm::kValues, shape_.shard.rank).Write(row.data(), token * floats, floats);
  return std::string(reinterpret_cast<const char*>(row.data()), floats * sizeof(float));
}

std::string TestEngine::StateOfHead(ObjectKind kind, const Tokens& run, uint32_t layer, uint32_t head) const {
  std::vector<float> state(kDk * kDv);
  Content(kind, run, layer, PartForm::kState, shape_.shard.rank).Write(state.data(), head * state.size(), state.size());
  return std::string(reinterpret_cast<const char*>(state.data()), state.size() * sizeof(float));
}

}  // namespace ashlar::integration
