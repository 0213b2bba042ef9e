// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/emulator/block.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <vector>

thread_local ashlar::kernels::cuda::emulator::Index3 threadIdx, blockIdx, blockDim, gridDim;

namespace ashlar::kernels::cuda::emulator {
namespace {

constexpr int kLanes = 32;
constexpr size_t kStackBytes = 128 << 10;

[[noreturn]] void Fail(const char* what) {
  std::fprintf(stderr, "emulated block: %s\n", what);
  std::abort();
}

struct Copy {
  void* to;
  const void* from;  // null: zeros
  size_t bytes;
};

enum class FiberState { kReady, kAtBarrier, kExchanging, kDone };

struct Fiber {
  Index3 index;
  FiberState state = FiberState::kReady;
  bool started = false;
  jmp_buf context;
  ucontext_t first;
  std::deque<std::vector<Copy>> groups;  // the last is open
  const char* operation = nullptr;
  int deposits = 0;
};

struct Warp {
  // Two sets, because a lane may deposit again while others still read.
  alignas(16) std::byte deposits[2][kLanes * kDepositBytes];
};

// Fibers and stacks live on from block to block.
struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<std::byte*> stacks;
  std::vector<Warp> warps;
  std::vector<uint64_t> shared;
  void (*body)(void*) = nullptr;
  void* argument = nullptr;
  Fiber* running = nullptr;
  jmp_buf scheduler;
  std::minstd_rand random{1};

  ~Block() {
    for (std::byte* stack : stacks) munmap(stack, kStackBytes);
  }
};
thread_local Block block;

void Enter() {
  block.body(block.argument);
  block.running->state = FiberState::kDone;
  _longjmp(block.scheduler, 1);
}

void Resume(Fiber& fiber, size_t stack) {
  block.running = &fiber;
  threadIdx = fiber.index;
  if (_setjmp(block.scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.context, 1);
  fiber.started = true;
  getcontext(&fiber.first);
  fiber.first.uc_stack.ss_sp = block.stacks[stack];
  fiber.first.uc_stack.ss_size = kStackBytes;
  fiber.first.uc_link = nullptr;
  makecontext(&fiber.first, Enter, 0);
  setcontext(&fiber.first);
}

void Wait(FiberState state) {
  block.running->state = state;
  if (_setjmp(block.running->context) == 0) _longjmp(block.scheduler, 1);
}

// Runs a warp until each of its lanes is done or at the block's barrier.
void RunWarp(size_t first, size_t end) {
  for (;;) {
    size_t exchanging = 0;
    const char* operation = nullptr;
    for (size_t i = first; i < end; ++i) {
      Fiber& fiber = *block.fibers[i];
      if (fiber.state == FiberState::kReady) Resume(fiber, i);
      if (fiber.state != FiberState::kExchanging) continue;
      ++exchanging;
      if (operation != nullptr && std::strcmp(operation, fiber.operation) != 0) {
        Fail("lanes of a warp exchange in different operations");
      }
      operation = fiber.operation;
    }
    if (exchanging == 0) return;
    if (exchanging != end - first) Fail("a warp's exchange lacks lanes");
    for (size_t i = first; i < end; ++i) block.fibers[i]->state = FiberState::kReady;
  }
}

void RunBlock() {
  const size_t threads = block.fibers.size();
  const size_t warps = (threads + kLanes - 1) / kLanes;
  for (;;) {
    const size_t turn = block.random() % warps;
    for (size_t w = 0; w < warps; ++w) {
      const size_t warp = (w + turn) % warps;
      RunWarp(warp * kLanes, std::min(threads, (warp + 1) * kLanes));
    }
    size_t done = 0;
    for (const auto& fiber : block.fibers) done += fiber->state == FiberState::kDone;
    if (done == threads) return;
    if (done != 0) Fail("some threads have ended, others wait at a barrier");
    for (const auto& fiber : block.fibers) fiber->state = FiberState::kReady;
  }
}

void Prepare(Index3 threads, size_t shared_bytes) {
  const size_t count = size_t{threads.x} * threads.y * threads.z;
  while (block.stacks.size() < count) {
    void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED) Fail("no memory for stacks");
    block.stacks.push_back(static_cast<std::byte*>(stack));
  }
  block.fibers.clear();
  for (size_t i = 0; i < count; ++i) {
    auto fiber = std::make_unique<Fiber>();
    const auto at = static_cast<unsigned>(i);
    fiber->index = {at % threads.x, at / threads.x % threads.y, at / threads.x / threads.y};
    fiber->groups.emplace_back();
    block.fibers.push_back(std::move(fiber));
  }
  block.warps.resize((count + kLanes - 1) / kLanes);
  block.shared.assign((shared_bytes + 7) / 8, ~uint64_t{0});
}

}  // namespace

void RunGrid(Index3 blocks, Index3 threads, size_t shared_bytes, void (*body)(void*), void* context) {
  blockDim = threads;
  gridDim = blocks;
  block.body = body;
  block.argument = context;
  for (unsigned z = 0; z < blocks.z; ++z) {
    for (unsigned y = 0; y < blocks.y; ++y) {
      for (unsigned x = 0; x < blocks.x; ++x) {
        blockIdx = {x, y, z};
        Prepare(threads, shared_bytes);
        RunBlock();
      }
    }
  }
}

void* SharedBytes() {
  return block.shared.data();
}

void Barrier() {
  Wait(FiberState::kAtBarrier);
}

int Lane() {
  return static_cast<int>((threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % kLanes);
}

Deposits Exchange(const char* operation, const void* value, size_t bytes) {
  Fiber& fiber = *block.running;
  const size_t thread = threadIdx.x + blockDim.x * (threadIdx.y + size_t{blockDim.y} * threadIdx.z);
  std::byte* set = block.warps[thread / kLanes].deposits[fiber.deposits++ % 2];
  std::memcpy(set + thread % kLanes * kDepositBytes, value, bytes);
  fiber.operation = operation;
  Wait(FiberState::kExchanging);
  return {set};
}

void CopyLater(void* to, const void* from, size_t bytes) {
  block.running->groups.back().push_back({to, from, bytes});
}

void CloseGroup() {
  block.running->groups.emplace_back();
}

void WaitForGroups(int pending) {
  std::deque<std::vector<Copy>>& groups = block.running->groups;
  while (groups.size() > static_cast<size_t>(pending) + 1) {
    for (const Copy& copy : groups.front()) {
      if (copy.from == nullptr) {
        std::memset(copy.to, 0, copy.bytes);
      } else {
        std::memcpy(copy.to, copy.from, copy.bytes);
      }
    }
    groups.pop_front();
  }
}

}  // namespace ashlar::kernels::cuda::emulator
