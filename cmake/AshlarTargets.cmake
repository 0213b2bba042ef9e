# SPDX-License-Identifier: Apache-2.0
# Compile options of all targets, and the functions that declare targets.

find_program(ASHLAR_CCACHE ccache)
if(ASHLAR_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${ASHLAR_CCACHE})
endif()

find_package(Threads REQUIRED)
# A machine that only builds kernels/ may have to provide GoogleTest.
set(ASHLAR_GOOGLETEST_SOURCE "" CACHE PATH "GoogleTest's sources, where it is not installed")
if(ASHLAR_TESTS)
  if(ASHLAR_GOOGLETEST_SOURCE)
    add_subdirectory(${ASHLAR_GOOGLETEST_SOURCE} ${PROJECT_BINARY_DIR}/googletest EXCLUDE_FROM_ALL)
  else()
    find_package(GTest REQUIRED)
  endif()
  include(GoogleTest)
endif()

add_library(ashlar_options INTERFACE)
target_include_directories(ashlar_options INTERFACE ${PROJECT_SOURCE_DIR})
option(ASHLAR_WARNINGS_ARE_ERRORS "Refuse what the compiler warns of" ON)
target_compile_options(ashlar_options INTERFACE -Wall -Wextra -Wshadow -Wno-missing-field-initializers
  $<$<BOOL:${ASHLAR_WARNINGS_ARE_ERRORS}>:-Werror>)
target_link_libraries(ashlar_options INTERFACE Threads::Threads)
if(ASHLAR_UNITY)
  # g++ treats the files of a group as headers, and warns about an Impl with members of unnamed namespaces.
  target_compile_options(ashlar_options INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
endif()
# Hardening flags. tests/deploy/hardening_test.py checks the binaries for them.
if(NOT ASHLAR_SANITIZE AND CMAKE_SYSTEM_PROCESSOR STREQUAL x86_64)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX,C>:-fstack-protector-strong> $<$<COMPILE_LANGUAGE:CXX,C>:-fcf-protection>)
  add_compile_definitions($<$<AND:$<COMPILE_LANGUAGE:CXX,C>,$<NOT:$<CONFIG:Debug>>>:_FORTIFY_SOURCE=2>)
  add_link_options(-Wl,-z,relro,-z,now)
endif()
if(ASHLAR_SANITIZE)
  target_compile_options(ashlar_options INTERFACE
    -fsanitize=${ASHLAR_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(ashlar_options INTERFACE -fsanitize=${ASHLAR_SANITIZE})
  # With sanitizers, g++ 12 reports false maybe-uninitialized warnings inside the standard library.
  target_compile_options(ashlar_options INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized> $<$<CXX_COMPILER_ID:GNU>:-Wno-tsan>)
endif()

# Most of the compiler's time goes into headers, those of Abseil, gRPC and GoogleTest above all. A group reads them once.
option(ASHLAR_UNITY "Compile the sources of a folder in groups, each group as one file" OFF)
set(ASHLAR_UNITY_FILES 8)  # at most in a group, so that several cores have work and an edit recompiles little

# ashlar_unity(TARGET SOURCES ... [ALONE ...]): compiles these sources of one folder in groups of about the same size, except
# those after ALONE and those with their own compile options. Without ASHLAR_UNITY it does nothing.
function(ashlar_unity target)
  cmake_parse_arguments(arg "" "" "SOURCES;ALONE" ${ARGN})
  set(sources ${arg_SOURCES})
  list(FILTER sources EXCLUDE REGEX "^\\$<")  # objects of other targets
  if(arg_ALONE)
    list(REMOVE_ITEM sources ${arg_ALONE})
  endif()
  list(LENGTH sources count)
  if(NOT ASHLAR_UNITY OR count LESS 2)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  file(RELATIVE_PATH folder ${PROJECT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR})
  string(REPLACE "/" "_" folder ${folder})
  math(EXPR groups "(${count} + ${ASHLAR_UNITY_FILES} - 1) / ${ASHLAR_UNITY_FILES}")
  set(place 0)
  foreach(source ${sources})
    math(EXPR group "${place} * ${groups} / ${count}")
    set_source_files_properties(${source} TARGET_DIRECTORY ${target} PROPERTIES UNITY_GROUP ${folder}_${group})
    math(EXPR place "${place} + 1")
  endforeach()
endfunction()

# ashlar_library(NAME SOURCES ... [LINK ...] [ALONE ...]): one library per folder. ALONE: as in ashlar_unity.
function(ashlar_library name)
  cmake_parse_arguments(arg "" "" "SOURCES;LINK;ALONE" ${ARGN})
  add_library(${name} STATIC ${arg_SOURCES})
  ashlar_unity(${name} SOURCES ${arg_SOURCES} ALONE ${arg_ALONE})
  target_link_libraries(${name} PUBLIC $<BUILD_INTERFACE:ashlar_options> $<INSTALL_INTERFACE:Threads::Threads> ${arg_LINK})
endfunction()

# The unit tests: those beside the code that they test. `tools/test --fast` builds and runs them (ctest -L fast).
add_custom_target(fast_tests)

# ashlar_test(NAME SOURCES ... [LINK ...] [LABELS ...] [PREFIX ...]): a GoogleTest binary; each case is a ctest test.
function(ashlar_test name)
  cmake_parse_arguments(arg "" "TIMEOUT;PREFIX" "SOURCES;LINK;LABELS" ${ARGN})
  if(NOT ASHLAR_TESTS)
    return()
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  if(ASHLAR_SANITIZE)
    math(EXPR arg_TIMEOUT "3 * ${arg_TIMEOUT}")  # sanitized code is slower
  endif()
  add_executable(${name} ${arg_SOURCES})
  ashlar_unity(${name} SOURCES ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE ashlar_options ${arg_LINK} GTest::gtest GTest::gmock GTest::gtest_main)
  set(tests ${PROJECT_SOURCE_DIR}/tests)
  cmake_path(IS_PREFIX tests ${CMAKE_CURRENT_SOURCE_DIR} across_folders)
  if(NOT across_folders)
    add_dependencies(fast_tests ${name})
    list(APPEND arg_LABELS fast)
  endif()
  gtest_discover_tests(${name} TEST_PREFIX "${arg_PREFIX}" DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT ${arg_TIMEOUT} LABELS "${arg_LABELS}")
endfunction()

# ashlar_sub_folder(LIBRARY [SOURCES ...] [ALONE ...] [TEST NAME TEST_SOURCES ...]): a sub-folder's part of its parent's library,
# and of one of its parent's tests. ALONE: as in ashlar_unity.
function(ashlar_sub_folder library)
  cmake_parse_arguments(arg "" "TEST" "SOURCES;ALONE;TEST_SOURCES" ${ARGN})
  if(arg_SOURCES)
    target_sources(${library} PRIVATE ${arg_SOURCES})
    ashlar_unity(${library} SOURCES ${arg_SOURCES} ALONE ${arg_ALONE})
  endif()
  if(ASHLAR_TESTS AND arg_TEST)
    target_sources(${arg_TEST} PRIVATE ${arg_TEST_SOURCES})
    ashlar_unity(${arg_TEST} SOURCES ${arg_TEST_SOURCES})
  endif()
endfunction()
