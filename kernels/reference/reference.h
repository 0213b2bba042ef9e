// SPDX-License-Identifier: Apache-2.0
// The reference for every back end: plain loops over the arguments of kernels.h, one thread, fp64.
#pragma once

#include "kernels/kernels.h"

namespace ashlar::kernels::reference {

void Compose(const ComposeArgs& args);
void ComposeTransitions(const ComposeTransitionsArgs& args);
void Capture(const CaptureArgs& args);
void AdvanceSeam(const AdvanceSeamArgs& args);
void DecodeBuffered(const DecodeBufferedArgs& args);
void VerifyDrafts(const VerifyDraftsArgs& args);
void RebuildState(const RebuildStateArgs& args);
void RotateKeys(const RotateKeysArgs& args);
void Land(const LandArgs& args);
void Gather(const GatherArgs& args);
void Checksum(const ChecksumArgs& args);
void AttendLanded(const AttendArgs& args);
void AttendUnrotated(const AttendArgs& args);
void AttendRotatedQuery(const AttendArgs& args);

}  // namespace ashlar::kernels::reference
