# SPDX-License-Identifier: Apache-2.0
# Whether the cuda back end is built: ASHLAR_CUDA_FOUND.
set(ASHLAR_CUDA AUTO CACHE STRING "Build the cuda back end: AUTO (where a compiler is found), ON or OFF")
set_property(CACHE ASHLAR_CUDA PROPERTY STRINGS AUTO ON OFF)

# CUDA's runtime and the sanitizers use the same addresses.
if(ASHLAR_CUDA STREQUAL "ON" OR (ASHLAR_CUDA STREQUAL "AUTO" AND NOT ASHLAR_SANITIZE))
  if(NOT DEFINED CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX} AND EXISTS /usr/local/cuda/bin/nvcc)
    set(CMAKE_CUDA_COMPILER /usr/local/cuda/bin/nvcc)
  endif()
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90a-real 100-real CACHE STRING "GPUs that kernels are compiled for")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(ASHLAR_CUDA_FOUND TRUE)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    if(ASHLAR_CCACHE)
      set(CMAKE_CUDA_COMPILER_LAUNCHER ${ASHLAR_CCACHE})
    endif()
  elseif(ASHLAR_CUDA STREQUAL "ON")
    message(FATAL_ERROR "ASHLAR_CUDA is ON, but there is no CUDA compiler")
  endif()
endif()

