// SPDX-License-Identifier: Apache-2.0
// The reference as a back end.
#include "kernels/host_queue.h"
#include "kernels/reference/reference.h"

namespace ashlar::kernels {
namespace {

class ReferenceKernels final : public Kernels {
 public:
  std::string_view name() const override { return "reference"; }
  std::unique_ptr<Queue> MakeQueue(Workers* workers) const override { return std::make_unique<HostQueue>(workers); }

 protected:
  Event DoCompose(const ComposeArgs& args, Queue&) const override { return reference::Compose(args), Event(); }
  Event DoComposeTransitions(const ComposeTransitionsArgs& args, Queue&) const override {
    return reference::ComposeTransitions(args), Event();
  }
  Event DoCapture(const CaptureArgs& args, Queue&) const override { return reference::Capture(args), Event(); }
  Event DoAdvanceSeam(const AdvanceSeamArgs& args, Queue&) const override {
    return reference::AdvanceSeam(args), Event();
  }
  Event DoDecodeBuffered(const DecodeBufferedArgs& args, Queue&) const override {
    return reference::DecodeBuffered(args), Event();
  }
  Event DoVerifyDrafts(const VerifyDraftsArgs& args, Queue&) const override {
    return reference::VerifyDrafts(args), Event();
  }
  Event DoRebuildState(const RebuildStateArgs& args, Queue&) const override {
    return reference::RebuildState(args), Event();
  }
  Event DoRotateKeys(const RotateKeysArgs& args, Queue&) const override { return reference::RotateKeys(args), Event(); }
  Event DoLand(const LandArgs& args, Queue&) const override { return reference::Land(args), Event(); }
  Event DoGather(const GatherArgs& args, Queue&) const override { return reference::Gather(args), Event(); }
  Event DoChecksum(const ChecksumArgs& args, Queue&) const override { return reference::Checksum(args), Event(); }
  Event DoAttendLanded(const AttendArgs& args, Queue&) const override { return reference::AttendLanded(args), Event(); }
  Event DoAttendUnrotated(const AttendArgs& args, Queue&) const override {
    return reference::AttendUnrotated(args), Event();
  }
  Event DoAttendRotatedQuery(const AttendArgs& args, Queue&) const override {
    return reference::AttendRotatedQuery(args), Event();
  }
};

}  // namespace

const Kernels& Reference() {
  static const ReferenceKernels kernels;
  return kernels;
}

}  // namespace ashlar::kernels
