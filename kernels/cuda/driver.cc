// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/driver.h"

#include <dlfcn.h>

namespace ashlar::kernels::cuda {
namespace {

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

}  // namespace

// Except for cuDeviceGetUuid, none of these calls has a second version yet, which would have another name.
std::optional<Driver> LoadDriver(const char* library) {
  void* loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (loaded == nullptr) return std::nullopt;
  Driver driver;
  const bool whole = Find(loaded, "cuInit", &driver.init) && Find(loaded, "cuGetErrorName", &driver.get_error_name) &&
                     Find(loaded, "cuDeviceGet", &driver.device_get) &&
                     Find(loaded, "cuDeviceGetUuid_v2", &driver.device_get_uuid) &&
                     Find(loaded, "cuDeviceGetAttribute", &driver.device_get_attribute) &&
                     Find(loaded, "cuMemGetAllocationGranularity", &driver.get_granularity) &&
                     Find(loaded, "cuMemCreate", &driver.create) && Find(loaded, "cuMemRelease", &driver.release) &&
                     Find(loaded, "cuMemAddressReserve", &driver.address_reserve) &&
                     Find(loaded, "cuMemAddressFree", &driver.address_free) && Find(loaded, "cuMemMap", &driver.map) &&
                     Find(loaded, "cuMemUnmap", &driver.unmap) && Find(loaded, "cuMemSetAccess", &driver.set_access) &&
                     Find(loaded, "cuMemExportToShareableHandle", &driver.export_handle) &&
                     Find(loaded, "cuMemImportFromShareableHandle", &driver.import_handle);
  if (whole) return driver;
  dlclose(loaded);
  return std::nullopt;
}

const Driver* SystemDriver() {
  static const std::optional<Driver> driver = LoadDriver("libcuda.so.1");
  return driver ? &*driver : nullptr;
}

}  // namespace ashlar::kernels::cuda
