// SPDX-License-Identifier: Apache-2.0
#include "daemon/engine/tensor_sources.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.pb.h"
#include "proto/invalid.h"

namespace ashlar::daemon {
namespace {

bool IsTensor(PartForm form) {
  return IsTransition(form) || form == PartForm::kState || form == PartForm::kConvTail ||
         form == PartForm::kStateExponents || form == PartForm::kOpaqueState || IsSpanRows(form);
}

}  // namespace

absl::Status TensorSources::Add(const std::string& field, int index, const v1::PartSource& part,
                                const Session& session) {
  const auto form = static_cast<PartForm>(part.form());
  if (part.form() != static_cast<uint32_t>(form) || !IsTensor(form)) {
    return Invalid(field, ".form: expected a tensor of a layer with a state");
  }
  const std::optional<TransitionForm> transition = TransitionFormOf(form);
  if (part.heads() > 0 && transition.has_value()) {
    runs_.push_back({{part.layer(), part.first_head(), part.heads(), *transition, part.rank()}, index});
  } else if (part.heads() > 0) {
    return Invalid(field, ".heads: must be 0; only transitions are stored per head");
  } else if (part.first_head() > 0) {
    return Invalid(field, ".first_head: must be 0 without heads");
  } else if (part.rank() > 0) {
    return Invalid(field, ".rank: must be 0 without heads");
  }
  if (form == PartForm::kTransitionZero) {
    if (part.heads() == 0) return Invalid(field, ".heads: required");
    const bool somewhere = part.region() != 0 || part.offset() != 0;
    return somewhere ? Invalid(field, ".region: must be 0 for zero transitions") : absl::OkStatus();
  }
  const Tensor tensor{session.FindRegion(part.region()), part.offset()};
  if (tensor.region != nullptr && tensor.region.get() != whole_) {
    if (absl::Status whole = tensor.region->CheckWhole(absl::StrCat(field, ".region")); !whole.ok()) return whole;
    whole_ = tensor.region.get();
  }
  if (!tensors_.emplace(std::tuple(part.layer(), form, part.first_head()), tensor).second) {
    return Invalid(field, ": the same part is given twice");
  }
  return absl::OkStatus();
}

bool TensorSources::Fit(const ObjectHeader& plan, std::vector<storage::PublishSource::Tensor>& tensors,
                        Regions& regions) const {
  for (const Part& part : plan.parts) {
    if (IsPaged(part.form) || part.Empty()) continue;
    const auto found = tensors_.find({part.layer, part.form, part.head_group});
    if (found == tensors_.end() || found->second.region == nullptr) return false;
    const auto& [region, offset] = found->second;
    if (offset % ElementBytes(part.dtype) != 0 || !region->Contains(offset, part.Bytes())) return false;
    tensors.push_back({part.layer, part.form, region->data() + offset, part.head_group, region->gpu()});
    regions.push_back(region);
  }
  return tensors.size() == tensors_.size();
}

}  // namespace ashlar::daemon
