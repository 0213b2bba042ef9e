// SPDX-License-Identifier: Apache-2.0
// The host back end: Highway, dispatched at run time to the best target of the CPU.
#include "kernels/host/attention/attention.h"
#include "kernels/host/decoding/decoding.h"
#include "kernels/host/linear/linear.h"
#include "kernels/host/rows/rows.h"
#include "kernels/host_queue.h"

namespace ashlar::kernels {
namespace {

class HostKernels final : public Kernels {
 public:
  std::string_view name() const override { return "host"; }
  std::unique_ptr<Queue> MakeQueue(Workers* workers) const override { return std::make_unique<HostQueue>(workers); }

 protected:
  Event DoCompose(const ComposeArgs& args, Queue& queue) const override { return Do(host::Compose, args, queue); }
  Event DoComposeTransitions(const ComposeTransitionsArgs& args, Queue& queue) const override {
    return Do(host::ComposeTransitions, args, queue);
  }
  Event DoCapture(const CaptureArgs& args, Queue& queue) const override { return Do(host::Capture, args, queue); }
  Event DoAdvanceSeam(const AdvanceSeamArgs& args, Queue& queue) const override {
    return Do(host::AdvanceSeam, args, queue);
  }
  Event DoDecodeBuffered(const DecodeBufferedArgs& args, Queue& queue) const override {
    return Do(host::DecodeBuffered, args, queue);
  }
  Event DoVerifyDrafts(const VerifyDraftsArgs& args, Queue& queue) const override {
    return Do(host::VerifyDrafts, args, queue);
  }
  Event DoRebuildState(const RebuildStateArgs& args, Queue& queue) const override {
    return Do(host::RebuildState, args, queue);
  }
  Event DoRotateKeys(const RotateKeysArgs& args, Queue& queue) const override {
    return Do(host::RotateKeys, args, queue);
  }
  Event DoLand(const LandArgs& args, Queue& queue) const override { return Do(host::Land, args, queue); }
  Event DoGather(const GatherArgs& args, Queue& queue) const override { return Do(host::Gather, args, queue); }
  Event DoChecksum(const ChecksumArgs& args, Queue& queue) const override { return Do(host::Checksum, args, queue); }
  Event DoAttendLanded(const AttendArgs& args, Queue& queue) const override {
    return Do(host::AttendLanded, args, queue);
  }
  Event DoAttendUnrotated(const AttendArgs& args, Queue& queue) const override {
    return Do(host::AttendUnrotated, args, queue);
  }
  Event DoAttendRotatedQuery(const AttendArgs& args, Queue& queue) const override {
    return Do(host::AttendRotatedQuery, args, queue);
  }

 private:
  template <typename Args>
  static Event Do(void (*operation)(const Args&, Workers*), const Args& args, Queue& queue) {
    operation(args, static_cast<HostQueue&>(queue).workers());
    return Event();
  }
};

}  // namespace

const Kernels& Host() {
  static const HostKernels kernels;
  return kernels;
}

}  // namespace ashlar::kernels
