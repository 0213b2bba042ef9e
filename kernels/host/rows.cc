#include "kernels/host/rows.h"

#include "kernels/reference/reference.h"

namespace ashlar::kernels::host {

void RotateKeys(const RotateKeysArgs& args, Workers*) {
  reference::RotateKeys(args);
}

void Land(const LandArgs& args, Workers*) {
  reference::Land(args);
}

void Gather(const GatherArgs& args, Workers*) {
  reference::Gather(args);
}

void Checksum(const ChecksumArgs& args, Workers*) {
  reference::Checksum(args);
}

}  // namespace ashlar::kernels::host
