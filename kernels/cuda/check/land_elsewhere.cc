// SPDX-License-Identifier: Apache-2.0
// Lands keys into the device memory of another process, which checks the bytes: what a daemon does for an engine.
//
// usage: cuda_land_elsewhere ipc|arena; exit status 0 only if every byte is as expected. The other process is this
// program too. ipc: memory of an engine's allocator, by CUDA's IPC handles. arena: memory that is made to be shared, by
// a file descriptor.
#include <cuda_runtime.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/checksum.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/device_arena.h"
#include "kernels/cuda/launch.h"

namespace ashlar::kernels::cuda {
namespace {

constexpr int32_t kHeads = 2, kDim = 256, kUnitTokens = 32, kPageTokens = 16;
constexpr int64_t kTokens = 1000, kRow = int64_t{kHeads} * kDim, kPages = 128;
constexpr int64_t kUnits = (kTokens + kUnitTokens - 1) / kUnitTokens, kFirst = 7;

// Both processes create the same rows and page table.
std::vector<uint16_t> Rows() {
  std::mt19937 engine(20261121);
  std::vector<uint16_t> rows(static_cast<size_t>(kTokens * kRow));
  for (uint16_t& number : rows) number = static_cast<uint16_t>(engine());
  return rows;
}
int32_t PageOf(int64_t index) {
  return static_cast<int32_t>(index * 53 % kPages);
}

constexpr size_t kPoolBytes = kPages * kPageTokens * kRow * sizeof(uint16_t);

void Require(bool arena, const ArenaError& error) {
  if (arena) return;
  std::fprintf(stderr, "land_elsewhere: %s\n", error.message.c_str());
  std::exit(1);
}

const Driver& RequireDriver() {
  if (SystemDriver() != nullptr) return *SystemDriver();
  std::fprintf(stderr, "land_elsewhere: no driver, or one without virtual memory management\n");
  std::exit(1);
}

// The daemon's side: lands in memory that the other process owns.
int Land(void* pages) {
  const Kernels* kernels = CudaOrNull();
  if (kernels == nullptr) return 2;
  DeviceMemory& memory = *kernels->memory();
  const std::vector<uint16_t> rows = Rows();
  auto* stored = static_cast<uint16_t*>(memory.Allocate(rows.size() * 2));
  memory.CopyToDevice(stored, rows.data(), rows.size() * 2);
  auto* checksums = static_cast<uint64_t*>(memory.Allocate(kUnits * sizeof(uint64_t)));
  std::vector<const void*> units;
  for (int64_t u = 0; u < kUnits; ++u) units.push_back(stored + u * kUnitTokens * kRow);
  std::vector<int32_t> table;
  for (int64_t p = 0; p * kPageTokens < kFirst + kTokens; ++p) table.push_back(PageOf(p));
  {
    const std::unique_ptr<Queue> queue = kernels->MakeQueue(nullptr);
    kernels
        ->Land({.source = {.units = units.data(),
                           .unit_tokens = kUnitTokens,
                           .tokens = kTokens,
                           .heads = kHeads,
                           .dim = kDim,
                           .dtype = DType::kBF16},
                .target = {.base = pages,
                           .page_stride = kPageTokens * kRow,
                           .token_stride = kRow,
                           .head_stride = kDim,
                           .page_tokens = kPageTokens,
                           .page_table = table.data(),
                           .dtype = DType::kBF16},
                .first_position = kFirst,
                .unit_checksums = checksums},
               *queue)
        .Wait();
  }
  std::vector<uint64_t> digests(kUnits);
  memory.CopyToHost(digests.data(), checksums, kUnits * sizeof(uint64_t));
  int wrong = 0;
  for (int64_t u = 0; u < kUnits; ++u) {
    const int64_t tokens = std::min<int64_t>(kUnitTokens, kTokens - u * kUnitTokens);
    wrong += digests[u] != UnitChecksum(rows.data() + u * kUnitTokens * kRow, static_cast<size_t>(tokens * kRow) * 2);
  }
  memory.Free(checksums);
  memory.Free(stored);
  if (wrong != 0) std::fprintf(stderr, "land_elsewhere: %d checksums are wrong\n", wrong);
  return wrong == 0 ? 0 : 1;
}

int LandByHandle(const std::string& hexadecimal) {
  cudaIpcMemHandle_t handle;
  if (hexadecimal.size() != 2 * sizeof(handle)) return 2;
  std::string bytes;
  for (size_t i = 0; i < hexadecimal.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(hexadecimal.substr(i, 2), nullptr, 16));
  }
  std::memcpy(&handle, bytes.data(), sizeof(handle));
  void* pages = nullptr;
  Check(cudaIpcOpenMemHandle(&pages, handle, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
  const int result = Land(pages);
  Check(cudaIpcCloseMemHandle(pages), "cudaIpcCloseMemHandle");
  return result;
}

int LandByDescriptor(int descriptor, uint64_t bytes) {
  ArenaError error;
  const auto arena =
      DeviceArena::Import(RequireDriver(), 0, descriptor, bytes, DeviceArena::Access::kReadWrite, &error);
  Require(arena != nullptr, error);
  close(descriptor);
  return Land(arena->data());
}

// The engine's side: starts another process that lands in `pages`, passes it `arguments`, and checks the pages.
int HaveLanded(std::byte* pages, std::vector<std::string> arguments) {
  constexpr uint16_t kUntouched = 0xabcd;
  std::vector<uint16_t> expected(kPoolBytes / sizeof(uint16_t), kUntouched), found(expected.size());
  DeviceMemory& memory = *CudaOrNull()->memory();
  memory.CopyToDevice(pages, expected.data(), kPoolBytes);
  const pid_t child = fork();
  if (child == 0) {
    // A fresh program: a forked process cannot use its parent's CUDA.
    std::vector<char*> words;
    for (std::string& argument : arguments) words.push_back(argument.data());
    words.push_back(nullptr);
    execv("/proc/self/exe", words.data());
    _exit(127);
  }
  int status = 0;
  if (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    std::fprintf(stderr, "land_elsewhere: the other process failed\n");
    return 1;
  }
  const std::vector<uint16_t> rows = Rows();
  for (int64_t t = 0; t < kTokens; ++t) {
    const int64_t at = kFirst + t, slot = PageOf(at / kPageTokens) * int64_t{kPageTokens} + at % kPageTokens;
    std::copy_n(rows.begin() + t * kRow, kRow, expected.begin() + slot * kRow);
  }
  memory.CopyToHost(found.data(), pages, kPoolBytes);
  if (found != expected) {
    std::fprintf(stderr, "land_elsewhere: pages differ from what was landed\n");
    return 1;
  }
  std::printf("landed %lld tokens in another process's device memory, every byte as expected\n",
              static_cast<long long>(kTokens));
  return 0;
}

int OwnAllocation(const char* program) {
  void* pages = nullptr;
  Check(cudaMalloc(&pages, kPoolBytes), "cudaMalloc");
  cudaIpcMemHandle_t handle;
  Check(cudaIpcGetMemHandle(&handle, pages), "cudaIpcGetMemHandle");
  std::string hexadecimal;
  for (const char byte : handle.reserved) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned char>(byte));
    hexadecimal += digits;
  }
  const int result = HaveLanded(static_cast<std::byte*>(pages), {program, "ipc", hexadecimal});
  Check(cudaFree(pages), "cudaFree");
  return result;
}

int OwnArena(const char* program) {
  ArenaError error;
  const auto arena = DeviceArena::Make(RequireDriver(), 0, kPoolBytes, &error);
  Require(arena != nullptr, error);
  fcntl(arena->descriptor(), F_SETFD, 0);  // the program that is started inherits it, in place of a socket
  return HaveLanded(arena->data(),
                    {program, "arena", std::to_string(arena->descriptor()), std::to_string(arena->bytes())});
}

}  // namespace

int Main(const std::vector<std::string>& arguments) {
  const std::string how = arguments.size() > 1 ? arguments[1] : "";
  if ((how != "ipc" && how != "arena") || arguments.size() > 4) {
    std::fprintf(stderr, "usage: cuda_land_elsewhere ipc|arena\n");
    return 2;
  }
  if (CudaOrNull() == nullptr) {
    std::fprintf(stderr, "cuda_land_elsewhere: no GPU that this build has kernels for\n");
    return 2;
  }
  if (arguments.size() == 2) return how == "ipc" ? OwnAllocation(arguments[0].c_str()) : OwnArena(arguments[0].c_str());
  if (how == "ipc") return LandByHandle(arguments[2]);
  if (arguments.size() < 4) return 2;
  return LandByDescriptor(std::stoi(arguments[2]), std::stoull(arguments[3]));
}

}  // namespace ashlar::kernels::cuda

int main(int count, char** arguments) {
  return ashlar::kernels::cuda::Main({arguments, arguments + count});
}
