# cmake -DROOT=... -DOUTPUT=... -P commit.cmake: writes a C++ file with Commit() (kernels/build_id.h), the commit that is
# checked out, empty where there is no git repository of the project itself. The file is rewritten only when it changes.
cmake_minimum_required(VERSION 3.22)
set(commit)
find_program(git git)
if(git AND EXISTS ${ROOT}/.git)
  execute_process(COMMAND ${git} rev-parse --short=12 HEAD WORKING_DIRECTORY ${ROOT}
    OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_QUIET)
  if(failed)
    set(commit)
  endif()
endif()
file(CONFIGURE OUTPUT ${OUTPUT} @ONLY CONTENT "#include \"kernels/build_id.h\"

const char* cppool::kernels::Commit() { return \"@commit@\"; }
")
