# The targets as others name them, in a project that cppool is a part of as after find_package; and beside the programs of the build folder
# what they look for there.
add_library(cppool::client ALIAS cppool_client)
add_library(cppool::client_c ALIAS cppool_client_c)
add_library(cppool::case ALIAS cppool_case)
add_executable(cppool::cppoold ALIAS cppoold)
add_executable(cppool::cppool ALIAS cppool)

# All but the tests.
add_custom_target(cppool_programs DEPENDS cppoold cppool cppool_client_c)
foreach(module cppool_cuda cppool_cudnn cppool_gloo)
  if(TARGET ${module})
    add_dependencies(cppool_programs ${module})
  endif()
endforeach()
if(NOT PROJECT_IS_TOP_LEVEL)  # a harness is built with the daemon that it starts
  add_dependencies(cppool_client cppoold)
  if(CPPOOL_WITH_CUDA)
    add_dependencies(cppoold cppool_cuda)
  endif()
endif()

# The fork server of Python ranks, and a copy of the shim, which finds the programs by where it lies.
file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/share/cppool/shims)
file(COPY ${PROJECT_SOURCE_DIR}/client/command/shims/torchrun DESTINATION ${PROJECT_BINARY_DIR}/share/cppool/shims)
file(CREATE_LINK ${PROJECT_SOURCE_DIR}/client/python/cppool/_ranks ${PROJECT_BINARY_DIR}/share/cppool/_ranks SYMBOLIC)

# The headers for users: in ../include of the programs, where sources that the client compiles find them.
set(cppool_headers
  ${PROJECT_BINARY_DIR}/version/cppool/version.h
  ${PROJECT_SOURCE_DIR}/client/include/cppool/client.h
  ${PROJECT_SOURCE_DIR}/client/include/cppool/compile.h
  ${PROJECT_SOURCE_DIR}/client/include/cppool/pool.h
  ${PROJECT_SOURCE_DIR}/client/include/cppool/pool_error.h
  ${PROJECT_SOURCE_DIR}/client/include/cppool/run_result.h
  ${PROJECT_SOURCE_DIR}/client/include/cppool/suite.h
  ${PROJECT_SOURCE_DIR}/protocol/include/cppool/daemon_end.h
  ${PROJECT_SOURCE_DIR}/protocol/include/cppool/result.h
  ${PROJECT_SOURCE_DIR}/protocol/include/cppool/run_options.h
  ${PROJECT_SOURCE_DIR}/daemon/include/cppool/case.h
  ${PROJECT_SOURCE_DIR}/daemon/include/cppool/case_helpers.h
  ${PROJECT_SOURCE_DIR}/daemon/include/cppool/case_numbers.h
  ${PROJECT_SOURCE_DIR}/daemon/include/cppool/case_owners.h
  ${PROJECT_SOURCE_DIR}/kernels/include/cppool/attention.h
  ${PROJECT_SOURCE_DIR}/kernels/include/cppool/runtime.h)
file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/include/cppool)
foreach(header ${cppool_headers})
  get_filename_component(name ${header} NAME)
  file(CREATE_LINK ${header} ${PROJECT_BINARY_DIR}/include/cppool/${name} SYMBOLIC)
endforeach()
