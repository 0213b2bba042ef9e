#include "kernels/host/linear.h"

#include "kernels/reference/reference.h"

namespace ashlar::kernels::host {

void Compose(const ComposeArgs& args, Workers*) {
  reference::Compose(args);
}

void ComposeTransitions(const ComposeTransitionsArgs& args, Workers*) {
  reference::ComposeTransitions(args);
}

void Capture(const CaptureArgs& args, Workers*) {
  reference::Capture(args);
}

void AdvanceSeam(const AdvanceSeamArgs& args, Workers*) {
  reference::AdvanceSeam(args);
}

}  // namespace ashlar::kernels::host
