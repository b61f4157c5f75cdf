# What a build can be told, and the flags every target of the project is compiled with.

set(CPPOOL_CUDA "AUTO" CACHE STRING "Build the CUDA runtime: AUTO (when nvcc and NCCL are found), ON or OFF")
set(CPPOOL_CUDNN "AUTO" CACHE STRING "Build the kernels \"cudnn\": AUTO (when the headers of cuDNN and its frontend are found), ON or OFF")
set(CPPOOL_GLOO "AUTO" CACHE STRING "Build host ranks of several processes: AUTO (when gloo is found), ON or OFF")
set_property(CACHE CPPOOL_CUDA CPPOOL_CUDNN CPPOOL_GLOO PROPERTY STRINGS AUTO ON OFF)
# In a project that cppool is a part of, by add_subdirectory or FetchContent, both are off.
option(CPPOOL_BUILD_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(CPPOOL_WERROR "Treat warnings as errors" ${PROJECT_IS_TOP_LEVEL})
set(CPPOOL_SANITIZE "" CACHE STRING "Sanitizers for all host code, as for -fsanitize=: address,undefined or thread")
option(CPPOOL_UNITY "Compile the sources of a library or a test program together, a few at a time: a full build takes half the time" ON)
option(CPPOOL_FUZZ "Build tests/fuzz/ as fuzzers, and everything with libFuzzer's instrumentation (clang only)" OFF)

# cppool_auto_on_off(OPTION RESULT): the option as AUTO, ON or OFF, however it was written.
function(cppool_auto_on_off option result)
  string(TOUPPER "${${option}}" value)
  if(value MATCHES "^(ON|TRUE|YES|Y|1)$")
    set(value ON)
  elseif(value MATCHES "^(OFF|FALSE|NO|N|0)$")
    set(value OFF)
  elseif(NOT value STREQUAL "AUTO")
    message(FATAL_ERROR "${option} is AUTO, ON or OFF, not '${${option}}'")
  endif()
  set(${result} ${value} PARENT_SCOPE)
endfunction()

if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_C_STANDARD 11)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
# The programs and the module they open lie side by side, in the build tree as in a prefix.
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)

add_library(cppool_flags INTERFACE)
# Every include is a path from the root of the project, or from the include/ of a folder that the target links.
target_include_directories(cppool_flags INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>)
# At -O3 GCC reports `const char* + std::string` (-Wrestrict, its bug 105651) and an optional's string that is not there.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(cppool_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict;-Wno-maybe-uninitialized>"
    $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wno-restrict>)
endif()
target_compile_options(cppool_flags INTERFACE
  $<$<COMPILE_LANGUAGE:C,CXX>:-Wall -Wextra $<$<BOOL:${CPPOOL_WERROR}>:-Werror>>
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra $<$<BOOL:${CPPOOL_WERROR}>:-Werror=all-warnings>>)

# Most of the time of a C++ file goes into what nlohmann/json.hpp and the like instantiate: cppool_unity(TARGET [BATCH]) lets the sources of a
# target share it, 8 at a time unless BATCH says otherwise.
function(cppool_unity target)
  list(APPEND ARGN 8)
  list(GET ARGN 0 batch)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${CPPOOL_UNITY} UNITY_BUILD_BATCH_SIZE ${batch})
endfunction()

# cppool_inner_loops(TARGET SOURCE ...): sources whose loops run over tensors. Vectorised whatever the build type is, except where somebody
# wants to step through them, and not instrumented for the fuzzers, which do not run them.
function(cppool_inner_loops target)
  set_source_files_properties(${ARGN} TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS
    "$<$<NOT:$<CONFIG:Debug>>:-O3>;$<$<BOOL:${CPPOOL_FUZZ}>:-fno-sanitize=fuzzer-no-link>")
endfunction()

if(CPPOOL_SANITIZE)
  # With sanitizers GCC's warnings that follow values through a function are wrong at times (its manual says so).
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-Wno-maybe-uninitialized;-Wno-array-bounds;-Wno-stringop-overflow;-Wno-stringop-overread>")
  endif()
  add_compile_options(
    $<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${CPPOOL_SANITIZE}>
    $<$<COMPILE_LANGUAGE:C,CXX>:-fno-omit-frame-pointer>
    $<$<COMPILE_LANGUAGE:C,CXX>:-fno-sanitize-recover=all>)
  add_link_options(-fsanitize=${CPPOOL_SANITIZE})
endif()

if(CPPOOL_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    message(FATAL_ERROR "CPPOOL_FUZZ needs clang, whose libFuzzer it uses; this is ${CMAKE_CXX_COMPILER_ID}")
  endif()
  add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=fuzzer-no-link>)
endif()
