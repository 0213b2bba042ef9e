// SPDX-License-Identifier: Apache-2.0
#include "examples/refengine/matrix.h"

#include <cblas.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "hwy/targets.h"

// Not in OpenBLAS's headers; only builds for several CPU types have them.
extern "C" {
void gotoblas_dynamic_init() __attribute__((weak));
void gotoblas_dynamic_quit() __attribute__((weak));
}

namespace ashlar::refengine {
namespace {

// Below this many multiply-adds a product is done before a second thread has woken up.
constexpr int64_t kWorthSplitting = 1 << 16;
// Parts per worker: enough to even out slow threads, and few enough to keep packing cheap.
constexpr int64_t kPartsPerWorker = 2;
// Parts begin at multiples of this, which is a multiple of every register block in OpenBLAS.
constexpr int64_t kPartGrain = 16;

// OpenBLAS identifies CPUs by model number, and treats CPUs newer than itself as a Pentium 4, at a fifth of the speed
// (Debian's 0.3.21 on Emerald Rapids). In that case, this selects kernels by the CPU's features.
void ChooseKernels() {
  constexpr char kCoreType[] = "OPENBLAS_CORETYPE";  // OpenBLAS reads it when it starts
  const bool generic = std::strcmp(openblas_get_corename(), "Prescott") == 0;
  if (!generic || std::getenv(kCoreType) != nullptr || gotoblas_dynamic_init == nullptr) return;
  const int64_t targets = hwy::SupportedTargets();
  const char* core = targets & HWY_AVX3 ? "SkylakeX" : targets & HWY_AVX2 ? "Haswell" : nullptr;
  if (core == nullptr) return;
  setenv(kCoreType, core, 1);
  gotoblas_dynamic_quit();
  gotoblas_dynamic_init();
  unsetenv(kCoreType);
}

// Before main: while no other thread runs that may read the environment or multiply.
[[maybe_unused]] const bool kPrepared = [] {
  ChooseKernels();
  openblas_set_num_threads(1);
  return true;
}();

// Rows [begin, end) of C, or columns if `columns`.
MatMulArgs PartOf(const MatMulArgs& args, bool columns, int64_t begin, int64_t end) {
  MatMulArgs part = args;
  if (columns) {
    part.n = end - begin;
    part.b += args.b_transposed ? begin * args.b_stride : begin;
    part.c += begin;
  } else {
    part.m = end - begin;
    part.a += begin * args.a_stride;
    part.c += begin * args.c_stride;
  }
  return part;
}

}  // namespace

void MatMul(const MatMulArgs& args) {
  if (args.m == 0 || args.n == 0) return;
  const float beta = args.accumulate ? 1.0f : 0.0f;
  if (args.m == 1) {  // a decoded token: bound by reading B, so do not pack it
    const CBLAS_TRANSPOSE trans = args.b_transposed ? CblasNoTrans : CblasTrans;
    const int64_t rows = args.b_transposed ? args.n : args.k;
    const int64_t columns = args.b_transposed ? args.k : args.n;
    cblas_sgemv(CblasRowMajor, trans, rows, columns, args.scale, args.b, args.b_stride, args.a, 1, beta, args.c, 1);
    return;
  }
  cblas_sgemm(CblasRowMajor, CblasNoTrans, args.b_transposed ? CblasTrans : CblasNoTrans, args.m, args.n, args.k,
              args.scale, args.a, args.a_stride, args.b, args.b_stride, beta, args.c, args.c_stride);
}

void MatMul(const MatMulArgs& args, kernels::Workers& workers) {
  if (workers.Size() == 1 || args.m * args.n * args.k < kWorthSplitting) {
    MatMul(args);
    return;
  }
  const bool columns = args.n > args.m;
  const int64_t length = columns ? args.n : args.m;
  const int64_t grains = (length + kPartGrain - 1) / kPartGrain;
  const int64_t parts = std::min(grains, kPartsPerWorker * workers.Size());
  kernels::ParallelFor(workers, parts, [&](int64_t part) {
    const int64_t begin = grains * part / parts * kPartGrain;
    const int64_t end = std::min(length, grains * (part + 1) / parts * kPartGrain);
    MatMul(PartOf(args, columns, begin, end));
  });
}

}  // namespace ashlar::refengine
