// SPDX-License-Identifier: Apache-2.0
// The place where kernels run: queues, events that tell of completion, and the workers that a caller lends.
//
// A back end never owns threads. The process creates a Workers (and, for asynchrony, a queue with its own thread) and
// passes it in; kernels use only these.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <type_traits>

namespace ashlar::kernels {

enum class MemoryKind : uint8_t { kHost = 1, kDevice = 2 };

class Queue;

// Completion of one operation: a queue and a position in it. Copying is free and nothing is allocated.
// The queue must outlive its events. A default-constructed event is complete.
class Event {
 public:
  Event() = default;
  Event(Queue* queue, uint64_t sequence) : queue_(queue), sequence_(sequence) {}

  bool Done() const;
  void Wait() const;

 private:
  Queue* queue_ = nullptr;
  uint64_t sequence_ = 0;
};

// Operations submitted to one queue run one after another in the order of submission; operations of two queues are
// unordered. A back end accepts only queues that it created (Kernels::MakeQueue).
class Queue {
 public:
  virtual ~Queue() = default;

  // The number of operations that have completed; operation `sequence` (1, 2, …) is complete when this is ≥ sequence.
  virtual uint64_t Completed() const = 0;
  virtual void WaitFor(uint64_t sequence) = 0;
};

inline bool Event::Done() const {
  return queue_ == nullptr || queue_->Completed() >= sequence_;
}
inline void Event::Wait() const {
  if (queue_ != nullptr) queue_->WaitFor(sequence_);
}

// The memory of a device. Copies are done when they return; they are for tests, benchmarks and set-up.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual void* Allocate(size_t bytes) = 0;
  virtual void Free(void* memory) = 0;
  virtual void CopyToDevice(void* device, const void* host, size_t bytes) = 0;
  virtual void CopyToHost(void* host, const void* device, size_t bytes) = 0;
};

// One slab of memory of one kind that another process can map. Cached objects are in arenas: CPU arenas are sealed
// memfds (storage/memory/arena.h), a GPU's arenas are memory of its driver (cuda/device_arena.h). The memory is freed
// with the object, or with the last mapping in another process.
class ArenaMemory {
 public:
  virtual ~ArenaMemory() = default;
  virtual MemoryKind kind() const = 0;
  virtual std::byte* data() const = 0;  // kDevice: an address for kernels and DeviceMemory's copies only
  virtual uint64_t bytes() const = 0;
  virtual int descriptor() const = 0;  // owned by the arena: duplicate or send it, never close it
};

// The reason why there is no arena.
struct ArenaError {
  bool out_of_memory = false;  // true: a retry may succeed; false: it will not
  std::string message;         // the refused call, and the driver's name of the error
};

// Threads lent by the caller. Run calls body(context, i) once for every i in [0, count), on up to Size() threads
// including the calling thread, and returns when all calls have returned. Bodies must not call Run.
class Workers {
 public:
  using Body = void (*)(void* context, int64_t index);

  virtual ~Workers() = default;
  virtual int Size() const = 0;
  virtual void Run(int64_t count, Body body, void* context) = 0;
};

// Calls fn(i) for every i in [0, count) on `workers`.
template <typename Fn>
void ParallelFor(Workers& workers, int64_t count, Fn&& fn) {
  using Callable = std::remove_reference_t<Fn>;
  workers.Run(
      count, [](void* context, int64_t index) { (*static_cast<Callable*>(context))(index); },
      const_cast<void*>(static_cast<const void*>(&fn)));
}
// Runs in the same way; without workers on the calling thread.
template <typename Fn>
void ParallelFor(Workers* workers, int64_t count, Fn&& fn) {
  if (workers != nullptr) return ParallelFor(*workers, count, fn);
  for (int64_t i = 0; i < count; ++i) fn(i);
}

}  // namespace ashlar::kernels
