# Compile options of every target of ours, and the two ways a target is declared.

find_program(ASHLAR_CCACHE ccache)
if(ASHLAR_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${ASHLAR_CCACHE})
endif()

find_package(Threads REQUIRED)
# A machine that builds kernels alone may have to bring its own GoogleTest.
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
target_compile_options(ashlar_options INTERFACE -Wall -Wextra -Wno-missing-field-initializers -Werror)
target_link_libraries(ashlar_options INTERFACE Threads::Threads)
if(ASHLAR_SANITIZE)
  target_compile_options(ashlar_options INTERFACE
    -fsanitize=${ASHLAR_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(ashlar_options INTERFACE -fsanitize=${ASHLAR_SANITIZE})
  # g++ 12 reports false maybe-uninitialized inside the standard library when it instruments.
  target_compile_options(ashlar_options INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized> $<$<CXX_COMPILER_ID:GNU>:-Wno-tsan>)
endif()

# ashlar_library(NAME SOURCES ... [LINK ...]): one library a folder.
function(ashlar_library name)
  cmake_parse_arguments(arg "" "" "SOURCES;LINK" ${ARGN})
  add_library(${name} STATIC ${arg_SOURCES})
  target_link_libraries(${name} PUBLIC $<BUILD_INTERFACE:ashlar_options> $<INSTALL_INTERFACE:Threads::Threads> ${arg_LINK})
endfunction()

# ashlar_test(NAME SOURCES ... [LINK ...] [LABELS ...] [PREFIX ...]): a GoogleTest binary; each case is a ctest test.
function(ashlar_test name)
  cmake_parse_arguments(arg "" "TIMEOUT;PREFIX" "SOURCES;LINK;LABELS" ${ARGN})
  if(NOT ASHLAR_TESTS)
    return()
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE ashlar_options ${arg_LINK} GTest::gtest GTest::gmock GTest::gtest_main)
  gtest_discover_tests(${name} TEST_PREFIX "${arg_PREFIX}" DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT ${arg_TIMEOUT} LABELS "${arg_LABELS}")
endfunction()

# ashlar_room(LIBRARY [SOURCES ...] [TEST NAME TEST_SOURCES ...]): a sub-folder's part of its parent's library, and of one of
# its parent's tests.
function(ashlar_room library)
  cmake_parse_arguments(arg "" "TEST" "SOURCES;TEST_SOURCES" ${ARGN})
  if(arg_SOURCES)
    target_sources(${library} PRIVATE ${arg_SOURCES})
  endif()
  if(ASHLAR_TESTS AND arg_TEST)
    target_sources(${arg_TEST} PRIVATE ${arg_TEST_SOURCES})
  endif()
endfunction()
