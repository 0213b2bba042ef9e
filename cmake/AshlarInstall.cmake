# SPDX-License-Identifier: Apache-2.0
# `cmake --install`: the client library (component client), and the programs (component node).
#
# Only the public interfaces are installed: ashlar/engine.h and ashlar/router.h for C++ and ashlar.h for C. The C++ headers are below one root,
# include/ashlar, which is on the include path: <ashlar/engine.h> includes <tensor/types.h>.
# cmake/AshlarConfig.cmake.in is for find_package(Ashlar), cmake/ashlar.pc.in for pkg-config.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(include_root ${CMAKE_INSTALL_INCLUDEDIR}/ashlar)
set(config_folder ${CMAKE_INSTALL_LIBDIR}/cmake/Ashlar)

foreach(part client kernels proto rpc)
  set_target_properties(ashlar_${part} PROPERTIES EXPORT_NAME ${part})
endforeach()
target_include_directories(ashlar_client INTERFACE $<INSTALL_INTERFACE:${include_root}>)
install(TARGETS ashlar_client ashlar_kernels ashlar_proto ashlar_rpc EXPORT AshlarTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT client)
install(EXPORT AshlarTargets NAMESPACE Ashlar:: DESTINATION ${config_folder} COMPONENT client)
install(DIRECTORY client/include/ashlar DESTINATION ${include_root} COMPONENT client)
install(FILES tensor/types.h DESTINATION ${include_root}/tensor COMPONENT client)

# Programs that link the archives need CUDA's runtime if kernels/cuda was built.
set(ASHLAR_CUDA_FOUND FALSE)
if(TARGET ashlar_kernels_cuda)
  set(ASHLAR_CUDA_FOUND TRUE)
endif()
configure_package_config_file(cmake/AshlarConfig.cmake.in ${PROJECT_BINARY_DIR}/AshlarConfig.cmake
  INSTALL_DESTINATION ${config_folder})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/AshlarConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/AshlarConfig.cmake ${PROJECT_BINARY_DIR}/AshlarConfigVersion.cmake
  DESTINATION ${config_folder} COMPONENT client)
configure_file(cmake/ashlar.pc.in ashlar.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/ashlar.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT client)

if(TARGET ashlar_c)
  install(TARGETS ashlar_c LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT client)
  install(FILES client/c/include/ashlar.h client/c/include/ashlar_types.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT client)
  configure_file(cmake/ashlar-c.pc.in ashlar-c.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/ashlar-c.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT client)
endif()

# Targets that build what a component installs: `--target client`, `--target node`.
add_custom_target(client DEPENDS ashlar_client)
if(TARGET ashlar_c)
  add_dependencies(client ashlar_c)
endif()
add_custom_target(node DEPENDS ashlard ashlarctl)

install(TARGETS ashlard RUNTIME DESTINATION ${CMAKE_INSTALL_SBINDIR} COMPONENT node)
install(TARGETS ashlarctl RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT node)
install(FILES deploy/ashlard.example.yaml DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT node)
