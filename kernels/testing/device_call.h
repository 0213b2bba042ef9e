// SPDX-License-Identifier: Apache-2.0
// Copies a call's arguments from host memory, where tests and benchmarks make them, to the memory of a device.
#pragma once

#include <deque>
#include <map>
#include <vector>

#include "kernels/kernels.h"

namespace ashlar::kernels::testing {

// Copies of all arrays of one call, each in a separate allocation, so that a memory checker detects every access
// outside. The result of Stage is valid until the object ends.
class DeviceCall {
 public:
  explicit DeviceCall(DeviceMemory& memory) : memory_(memory) {}
  ~DeviceCall();
  DeviceCall(const DeviceCall&) = delete;
  DeviceCall& operator=(const DeviceCall&) = delete;

  // Two passes over the arguments: arrays shared by several of them are as long as the longest use.
  template <typename Args>
  Args Stage(const Args& args) {
    measuring_ = true;
    Place(args);
    measuring_ = false;
    steps_.clear();
    requests_.clear();
    spans_.clear();
    return Place(args);
  }

  // Copies what the call may have written to the caller's memory.
  void CopyBack();

 private:
  struct Copy {
    void* allocation = nullptr;
    void* device = nullptr;
    size_t bytes = 0;
    bool written = false;
  };

  ComposeArgs Place(ComposeArgs args);
  ComposeTransitionsArgs Place(ComposeTransitionsArgs args);
  CaptureArgs Place(CaptureArgs args);
  AdvanceSeamArgs Place(AdvanceSeamArgs args);
  DecodeBufferedArgs Place(DecodeBufferedArgs args);
  VerifyDraftsArgs Place(VerifyDraftsArgs args);
  RebuildStateArgs Place(RebuildStateArgs args);
  RotateKeysArgs Place(RotateKeysArgs args);
  LandArgs Place(LandArgs args);
  GatherArgs Place(GatherArgs args);
  ChecksumArgs Place(ChecksumArgs args);
  AttendArgs Place(AttendArgs args);

  void* Bytes(const void* host, size_t bytes, bool written);
  template <typename T>
  const T* In(const T* host, int64_t count) {
    return static_cast<const T*>(Bytes(host, static_cast<size_t>(count) * sizeof(T), false));
  }
  template <typename T>
  T* InOut(T* host, int64_t count) {
    return static_cast<T*>(Bytes(host, static_cast<size_t>(count) * sizeof(T), true));
  }
  // One pointer table whose arrays have `bytes` each, the last one `last_bytes`.
  void* const* Table(const void* const* host, int64_t count, size_t bytes, size_t last_bytes, bool written);

  LinearShape Shape(LinearShape shape);
  TokenInputs Inputs(const LinearShape& shape, TokenInputs inputs);
  TupleView Interior(const LinearShape& shape, TupleView view);
  std::span<const TupleView> Interiors(const LinearShape& shape, std::span<const TupleView> interiors);
  StateView State(const LinearShape& shape, StateView view);
  TupleTarget Tuple(const LinearShape& shape, TupleTarget tuple);
  BufferedRequest Request(const LinearShape& shape, BufferedRequest request, int32_t new_slots);
  std::span<const BufferedRequest> Requests(const LinearShape& shape, std::span<const BufferedRequest> requests,
                                            int32_t new_slots);
  // Slots of positions [first, first + tokens), `heads` rows of `dim` each.
  PagedSlots Slots(PagedSlots slots, int64_t first, int64_t tokens, int32_t heads, int32_t dim, bool written);

  DeviceMemory& memory_;
  bool measuring_ = false;
  std::map<const void*, Copy> copies_;  // keyed by address in host memory
  std::deque<std::vector<void*>> tables_;
  std::deque<std::vector<HeadTuple>> heads_;
  std::deque<std::vector<TupleView>> views_;
  std::deque<StateView> checkpoints_;
  std::vector<SeamStep> steps_;
  std::vector<BufferedRequest> requests_;
  std::vector<KeySpan> spans_;
};

}  // namespace ashlar::kernels::testing
