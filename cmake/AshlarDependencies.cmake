# SPDX-License-Identifier: Apache-2.0
# Third-party libraries, all from Debian 12. docs/libraries.md says why each was chosen.
find_package(absl REQUIRED)
find_package(Protobuf REQUIRED)
find_package(gRPC REQUIRED)
find_package(OpenSSL REQUIRED)
find_package(spdlog REQUIRED)
find_package(yaml-cpp REQUIRED)
find_package(prometheus-cpp REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(MICROHTTPD REQUIRED IMPORTED_TARGET GLOBAL libmicrohttpd)
pkg_check_modules(ZMQ REQUIRED IMPORTED_TARGET GLOBAL libzmq)
# Without it a daemon whose configuration sets sandbox: on does not start.
pkg_check_modules(SECCOMP IMPORTED_TARGET GLOBAL libseccomp)

# Debian's package configuration asks for the headers of libraries that only RocksDB itself uses.
find_library(ASHLAR_ROCKSDB rocksdb REQUIRED)
add_library(RocksDB SHARED IMPORTED GLOBAL)
set_target_properties(RocksDB PROPERTIES IMPORTED_LOCATION ${ASHLAR_ROCKSDB})

# UCX: Debian's, or a newer one that was installed under UCX_ROOT.
set(UCX_ROOT "$ENV{UCX_ROOT}" CACHE PATH "Where UCX is installed; empty: where pkg-config finds it")
if(UCX_ROOT)
  set(ENV{PKG_CONFIG_PATH} "${UCX_ROOT}/lib/pkgconfig:$ENV{PKG_CONFIG_PATH}")
endif()
pkg_check_modules(ASHLAR_UCX REQUIRED IMPORTED_TARGET GLOBAL ucx)
add_library(ashlar_ucx ALIAS PkgConfig::ASHLAR_UCX)
