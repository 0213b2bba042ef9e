# SPDX-License-Identifier: Apache-2.0
# Libraries that other programs load (the C ABI, the Python module): they export what their version script names, and
# contain a hidden gRPC. A process that loads one may have another gRPC (grpcio, vLLM), and gRPC keeps
# process-wide state: two of them must not share symbols.
#
# Abseil, Protobuf and re2 stay shared: Debian's archives of them are not position-independent. Abseil's symbols are in
# Debian's own inline namespace. A wheel includes these libraries.
set(ASHLAR_HIDDEN_ARCHIVES libgrpc++.a libgrpc.a libgpr.a libaddress_sorting.a libupb.a libcares.a libssl.a libcrypto.a libz.a)

# ashlar_link_hidden(TARGET VERSION_SCRIPT NAME): links the client library into a shared library or module.
#
# Protobuf refuses a second message of the same name in a process. So each of these libraries has its own descriptors
# NAME, six letters, in place of "ashlar" (RenameDescriptors.cmake).
function(ashlar_link_hidden target script name)
  foreach(proto cache composition hand_off prompt session)  # that the client has
    set(generated ${PROJECT_BINARY_DIR}/proto/ashlar/v1/${proto}.pb.cc)
    set(renamed ${CMAKE_CURRENT_BINARY_DIR}/${name}/${proto}.pb.cc)
    add_custom_command(OUTPUT ${renamed}
      COMMAND ${CMAKE_COMMAND} -DIN=${generated} -DOUT=${renamed} -DAS=${name} -P ${PROJECT_SOURCE_DIR}/cmake/RenameDescriptors.cmake
      DEPENDS ashlar_rpc ${PROJECT_SOURCE_DIR}/cmake/RenameDescriptors.cmake VERBATIM)
    list(APPEND descriptors ${renamed})
  endforeach()
  add_library(${target}_descriptors OBJECT ${descriptors})
  set_target_properties(${target}_descriptors PROPERTIES POSITION_INDEPENDENT_CODE ON UNITY_BUILD OFF)
  target_include_directories(${target}_descriptors SYSTEM PRIVATE ${PROJECT_BINARY_DIR}/proto)
  target_link_libraries(${target}_descriptors PRIVATE protobuf::libprotobuf)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_descriptors>)
  foreach(part client kernels proto rpc)
    list(APPEND archives $<TARGET_FILE:ashlar_${part}>)
  endforeach()
  foreach(name ${ASHLAR_HIDDEN_ARCHIVES})
    find_library(ASHLAR_ARCHIVE_${name} ${name} REQUIRED)
    list(APPEND archives ${ASHLAR_ARCHIVE_${name}})
  endforeach()
  add_dependencies(${target} ashlar_client)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}
    $<TARGET_PROPERTY:ashlar_client,INTERFACE_INCLUDE_DIRECTORIES>)
  target_include_directories(${target} SYSTEM PRIVATE ${PROJECT_BINARY_DIR}/proto)  # generated: its warnings are not ours
  file(GLOB abseil /usr/lib/${CMAKE_LIBRARY_ARCHITECTURE}/libabsl_*.so)
  find_library(ASHLAR_RE2 re2 REQUIRED)
  find_library(ASHLAR_HWY hwy REQUIRED)
  find_library(ASHLAR_ZSTD zstd REQUIRED)  # for the libcrypto.a of Debian 13; not needed by that of Debian 12
  target_link_options(${target} PRIVATE -Wl,--version-script=${script} -Wl,--as-needed -Wl,-Bsymbolic
    -Wl,-z,nodynamic-undefined-weak)
  target_link_libraries(${target} PRIVATE -Wl,--start-group ${archives} -Wl,--end-group ${abseil} protobuf::libprotobuf
    ${ASHLAR_RE2} ${ASHLAR_HWY} ${ASHLAR_ZSTD} ${ASHLAR_XXHASH} Threads::Threads ${CMAKE_DL_LIBS})
  if(TARGET ashlar_kernels_cuda)
    find_package(CUDAToolkit REQUIRED)
    target_link_libraries(${target} PRIVATE CUDA::cudart_static)
  endif()
  set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS ${script})
endfunction()
