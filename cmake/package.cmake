# `cpack` in the build folder makes cppool_VERSION_ARCHITECTURE.deb of what is installed. It needs dpkg-dev, file and, for its man pages,
# help2man: scripts/setup --tests.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_CONTACT "cppool <cppool@example.org>" CACHE STRING "The maintainer that the Debian package names")
set(CPACK_STRIP_FILES ON)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "warm pool of GPUs that runs context-parallel attention cases on request")
set(CPACK_PACKAGE_DESCRIPTION "The daemon cppoold keeps GPUs, CUDA and NCCL warm, one process for each
number of ranks, and runs cases on request: attention under context
parallelism, or your own. The command cppool runs and times suites of
cases; the client libraries are for test harnesses.")
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION devel)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
# For the C++ library's headers, for sources that are compiled for a run, and for Python ranks.
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "nlohmann-json3-dev, g++, python3")
# Debian's rules: the linker's cache is renewed by a trigger, and the changelog is compressed.
file(WRITE ${PROJECT_BINARY_DIR}/debian/triggers "activate-noawait ldconfig\n")
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA ${PROJECT_BINARY_DIR}/debian/triggers)
set(CPACK_PRE_BUILD_SCRIPTS ${CMAKE_CURRENT_LIST_DIR}/compress_changelog.cmake)
include(CPack)
