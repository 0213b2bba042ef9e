// SPDX-License-Identifier: Apache-2.0
// Pointers to the driver calls that arenas use: a program that contains them starts without a driver, and tests
// substitute their own.
#pragma once

#include <cuda.h>

#include <optional>

namespace ashlar::kernels::cuda {

struct Driver {
  decltype(&cuInit) init = nullptr;
  decltype(&cuGetErrorName) get_error_name = nullptr;
  decltype(&cuDeviceGet) device_get = nullptr;
  CUresult (*device_get_uuid)(CUuuid*, CUdevice) = nullptr;  // cuDeviceGetUuid_v2, which distinguishes MIG instances
  decltype(&cuDeviceGetAttribute) device_get_attribute = nullptr;
  decltype(&cuMemGetAllocationGranularity) get_granularity = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemAddressReserve) address_reserve = nullptr;
  decltype(&cuMemAddressFree) address_free = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuMemExportToShareableHandle) export_handle = nullptr;
  decltype(&cuMemImportFromShareableHandle) import_handle = nullptr;
};

// The calls of a driver's library; nothing if it cannot be loaded or lacks one of them. It stays loaded.
std::optional<Driver> LoadDriver(const char* library);

// Returns this machine's driver; null if there is none.
const Driver* SystemDriver();

}  // namespace ashlar::kernels::cuda
