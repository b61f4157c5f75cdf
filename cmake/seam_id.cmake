# cmake -DROOT=... -DOUTPUT=... -P seam_id.cmake: writes a C++ file with SeamId() (kernels/build_id.h), a hash of the headers that
# the programs and the CUDA module must share, and OUTPUT.d, which lists these headers for the build.
# They are those of kernels/include, kernels/module/cuda_module.h, and the project's headers that these include.
cmake_minimum_required(VERSION 3.22)
file(GLOB_RECURSE pending ${ROOT}/kernels/include/*.h)
list(APPEND pending ${ROOT}/kernels/module/cuda_module.h)
set(headers)
while(pending)
  list(POP_FRONT pending header)
  if(header IN_LIST headers)
    continue()
  endif()
  list(APPEND headers ${header})
  file(STRINGS ${header} lines REGEX "^[ \t]*#[ \t]*include")
  foreach(line IN LISTS lines)
    if(line MATCHES "[<\"]([^>\"]+)[>\"]")
      foreach(folder ${ROOT} ${ROOT}/kernels/include)
        if(EXISTS ${folder}/${CMAKE_MATCH_1} AND NOT IS_DIRECTORY ${folder}/${CMAKE_MATCH_1})
          list(APPEND pending ${folder}/${CMAKE_MATCH_1})
        endif()
      endforeach()
    endif()
  endforeach()
endwhile()
list(SORT headers)

set(hashes)
foreach(header IN LISTS headers)
  file(SHA256 ${header} hash)
  file(RELATIVE_PATH name ${ROOT} ${header})
  string(APPEND hashes "${name} ${hash}\n")
endforeach()
string(SHA256 id "${hashes}")
string(SUBSTRING ${id} 0 16 id)

# Rewritten only when it changes, so that nothing is compiled again for nothing. Its time says nothing then: OUTPUT.stamp has it.
file(CONFIGURE OUTPUT ${OUTPUT} @ONLY CONTENT "#include \"kernels/build_id.h\"

const char* cppool::kernels::SeamId() { return \"@id@\"; }
")
file(TOUCH ${OUTPUT}.stamp)
list(JOIN headers " " headers)
file(WRITE ${OUTPUT}.d "${OUTPUT}.stamp: ${headers}\n")
