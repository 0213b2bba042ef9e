// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/texts.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <memory>

#include "kernels/kernels.h"
#include "kernels/mutex.h"

namespace ashlar::simulation {
namespace {

const storage::PublishSource& Shared(const Text& text) {
  static const auto* const sources = [] {
    auto* all = new std::map<Text, storage::PublishSource>;
    for (const auto& [each, plan] : Plans()) all->emplace(each, storage::TestSource(plan, ContentOf(each)));
    return all;
  }();
  return sources->at(text);
}

const std::byte* TensorOf(const Text& text, uint32_t layer, PartForm form) {
  for (const storage::PublishSource::Tensor& tensor : Shared(text).tensors) {
    if (tensor.layer == layer && tensor.form == form) return tensor.data;
  }
  std::abort();
}

std::vector<float> ComputeStateAfter(uint32_t layer, const std::vector<Text>& texts) {
  const kernels::LinearShape shape = storage::TestShape();
  const auto heads = static_cast<size_t>(shape.heads);
  const auto transition = static_cast<size_t>(shape.d_k) * shape.d_k,
             state = static_cast<size_t>(shape.d_k) * shape.d_v;
  std::vector<kernels::HeadTuple> tuples;
  for (const Text& text : texts) {
    const auto* const transitions = reinterpret_cast<const float*>(TensorOf(text, layer, PartForm::kTransitionDense));
    const auto* const states = reinterpret_cast<const float*>(TensorOf(text, layer, PartForm::kState));
    for (size_t head = 0; head < heads; ++head) {
      tuples.push_back({.transition = transitions + head * transition, .state = states + head * state});
    }
  }
  std::vector<kernels::TupleView> interiors;
  for (size_t i = 0; i < texts.size(); ++i) interiors.push_back({.heads = tuples.data() + i * heads});
  std::vector<float> behind = StateBefore();
  std::vector<void*> places;
  for (size_t head = 0; head < heads; ++head) places.push_back(behind.data() + head * state);
  const auto queue = kernels::Reference().MakeQueue(nullptr);
  kernels::Reference()
      .Compose({.shape = shape, .interiors = interiors, .state = {.heads = places.data()}}, *queue)
      .Wait();
  return behind;
}

}  // namespace

const std::map<Text, ObjectHeader>& Plans() {
  static const auto* const plans = [] {
    auto* all = new std::map<Text, ObjectHeader>;
    for (TenantId tenant = 1; tenant <= kTenants; ++tenant) {
      for (uint64_t text = 1; text <= kTexts; ++text) {
        all->emplace(Text(tenant, text), storage::TestPlan(text, 20 + 40 * text, ObjectKind::kSegment, tenant));
      }
      for (const uint64_t text : kBundle) {
        ObjectHeader& part = all->at({tenant, text});
        part.key = all->at({tenant, kBundle[0]}).key;
        part.shard = {.rank = static_cast<uint32_t>(text - kBundle[0]), .size = std::size(kBundle)};
      }
    }
    return all;
  }();
  return *plans;
}

std::vector<Text> BundleOf(const Text& text) {
  if (Plans().at(text).shard.size == 1) return {text};
  std::vector<Text> all;
  for (const uint64_t part : kBundle) all.emplace_back(text.first, part);
  return all;
}

storage::PublishSource SourceOf(const Text& text, uint64_t publish) {
  return publish % 8 == 0 ? storage::TestSource(Plans().at(text), ContentOf(text)) : Shared(text);
}

std::vector<float> StateBefore() {
  const kernels::LinearShape shape = storage::TestShape();
  return std::vector<float>(static_cast<size_t>(shape.heads) * shape.d_k * shape.d_v, 0.5f);
}

const std::vector<float>& StateAfter(uint32_t layer, const std::vector<Text>& texts) {
  using Name = std::pair<uint32_t, std::vector<Text>>;
  struct Known {
    Mutex mutex;
    std::map<Name, std::vector<float>> states ABSL_GUARDED_BY(mutex);
  };
  static auto& known = *new Known;
  {
    MutexLock lock(known.mutex);
    if (const auto found = known.states.find({layer, texts}); found != known.states.end()) return found->second;
  }
  std::vector<float> behind =
      ComputeStateAfter(layer, texts);  // declared outside, because other threads may need others
  MutexLock lock(known.mutex);
  return known.states.emplace(Name(layer, texts), std::move(behind)).first->second;
}

}  // namespace ashlar::simulation
