# A prefix that can be moved: bin/ with the programs, lib/ with the CUDA module that they open there, the client library, the headers
# for harnesses and for cases, examples, and a CMake package.
include(CMakePackageConfigHelpers)

set_target_properties(cppool_client PROPERTIES EXPORT_NAME client)
set_target_properties(cppool_client_c PROPERTIES EXPORT_NAME client_c)
set_target_properties(cppool_base PROPERTIES EXPORT_NAME base)
set_target_properties(cppool_protocol PROPERTIES EXPORT_NAME protocol)
set_target_properties(cppool_case PROPERTIES EXPORT_NAME case)
set_target_properties(cppool_flags PROPERTIES EXPORT_NAME flags)
# cppool_flags comes along because static libraries name what they link; its warnings do not reach their users.
install(TARGETS cppool_client cppool_protocol cppool_base cppool_flags EXPORT cppoolClientTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS cppool_client_c EXPORT cppoolClientCTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS cppool_case EXPORT cppoolCaseTargets)
install(TARGETS cppoold cppool EXPORT cppoolProgramsTargets RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
# The documents, in the folders that they have here, so that links between them hold; `copyright` has the notices of what is compiled in.
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${CMAKE_CURRENT_LIST_DIR}/copyright DESTINATION ${CMAKE_INSTALL_DOCDIR})
file(GLOB_RECURSE documents CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR} client/*.md client/*.png daemon/*.md kernels/*.md protocol/*.md protocol/*.schema.json)
foreach(document README.md ARCHITECTURE.md CHANGELOG.md ${documents})
  get_filename_component(folder ${document} DIRECTORY)
  install(FILES ${PROJECT_SOURCE_DIR}/${document} DESTINATION ${CMAKE_INSTALL_DOCDIR}/${folder})
endforeach()
install(FILES ${CMAKE_CURRENT_LIST_DIR}/completion.bash DESTINATION share/bash-completion/completions RENAME cppool)
find_program(CPPOOL_HELP2MAN help2man)
if(CPPOOL_HELP2MAN)
  add_custom_command(OUTPUT man1/cppool.1.gz
    COMMAND ${CMAKE_CURRENT_LIST_DIR}/man_pages ${CPPOOL_HELP2MAN} $<TARGET_FILE:cppool> $<TARGET_FILE:cppoold> man1
    DEPENDS ${CMAKE_CURRENT_LIST_DIR}/man_pages cppool cppoold VERBATIM)
  add_custom_target(cppool_man_pages ALL DEPENDS man1/cppool.1.gz)
  add_dependencies(cppool_programs cppool_man_pages)
  install(DIRECTORY ${PROJECT_BINARY_DIR}/man1 DESTINATION ${CMAKE_INSTALL_MANDIR})
else()
  message(STATUS "cppool: without man pages (no help2man: scripts/setup --tests installs it)")
endif()
foreach(part kernels daemon client client/python)
  get_filename_component(name ${part} NAME)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/${part}/examples/ DESTINATION ${CMAKE_INSTALL_DOCDIR}/examples/${name} USE_SOURCE_PERMISSIONS)
endforeach()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/client/python/cppool/_ranks DESTINATION share/cppool FILES_MATCHING PATTERN "*.py" PATTERN __pycache__ EXCLUDE)
install(PROGRAMS ${PROJECT_SOURCE_DIR}/client/command/shims/torchrun DESTINATION share/cppool/shims)
install(FILES ${cppool_headers} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/cppool)
if(CPPOOL_WITH_CUDA)
  # Found by the daemon at ../lib whatever the system calls its folder of libraries.
  install(TARGETS cppool_cuda LIBRARY DESTINATION lib)
endif()
if(CPPOOL_WITH_CUDNN)
  install(TARGETS cppool_cudnn LIBRARY DESTINATION lib)
endif()
if(CPPOOL_WITH_GLOO)
  install(TARGETS cppool_gloo LIBRARY DESTINATION lib)
endif()

# For those without CMake: the same two libraries. Both have the name cppool_client, and the linker takes the shared one unless it is told.
file(RELATIVE_PATH to_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
foreach(part client client_c)
  if(part STREQUAL "client")
    set(libraries "-l:libcppool_client.a -l:libcppool_protocol.a -l:libcppool_base.a -pthread\nRequires: nlohmann_json >= 3.10")
    set(language "C++20")
  else()
    set(libraries "-lcppool_client")
    set(language "C")
  endif()
  file(WRITE ${PROJECT_BINARY_DIR}/cppool_${part}.pc "prefix=\${pcfiledir}/${to_prefix}
Name: cppool_${part}
Description: Client library of cppool for ${language}
Version: ${PROJECT_VERSION}
Cflags: -I\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}
Libs: -L\${prefix}/${CMAKE_INSTALL_LIBDIR} ${libraries}
")
  install(FILES ${PROJECT_BINARY_DIR}/cppool_${part}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()

set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/cppool)
foreach(part Client ClientC Case Programs)
  install(EXPORT cppool${part}Targets NAMESPACE cppool:: DESTINATION ${package_folder})
endforeach()
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/cppoolConfig.cmake.in ${PROJECT_BINARY_DIR}/cppoolConfig.cmake
  INSTALL_DESTINATION ${package_folder})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/cppoolConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/cppoolConfig.cmake ${PROJECT_BINARY_DIR}/cppoolConfigVersion.cmake
  DESTINATION ${package_folder})
