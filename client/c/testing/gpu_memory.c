// SPDX-License-Identifier: Apache-2.0
/* Memory of an emulated GPU (kernels/cuda/emulator): its driver's allocations are memfds that bear the GPU's name. Here
 * it is mapped as memory of the CPU, which is impossible on a real GPU. */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <unistd.h>

#include "client/c/testing/engine.h"

void take_gpu_memory(ashlar_memory* memory) {
  static const char name[] = "emulated GPU";
  void* data;
  memory->kind = ASHLAR_MEMORY_GPU;
  memory->bytes = 2 << 20;
  memory->gpu_descriptor = memfd_create("emulated-device-0", MFD_CLOEXEC);
  REQUIRE(memory->gpu_descriptor >= 0 && ftruncate(memory->gpu_descriptor, (off_t)memory->bytes) == 0);
  data = mmap(NULL, memory->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory->gpu_descriptor, 0);
  REQUIRE(data != MAP_FAILED);
  memory->gpu_data = data;
  memcpy(memory->gpu, name, sizeof name);
}
