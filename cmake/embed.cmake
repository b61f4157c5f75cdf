# cppool_embed(OUTPUT FILE.cpp HEADER FILE.h NAMESPACE NAME FUNCTION NAME FILES ...): builds files into a program. OUTPUT, made in the
# binary folder, defines `std::string NAMESPACE::FUNCTION(const std::string& name)`, which HEADER declares: the text of a file by its
# name without extension, empty for another name.
set(CPPOOL_EMBED_SCRIPT ${CMAKE_CURRENT_LIST_DIR}/embed_files.cmake)
function(cppool_embed)
  cmake_parse_arguments(EMBED "" "OUTPUT;HEADER;NAMESPACE;FUNCTION" "FILES" ${ARGN})
  list(TRANSFORM EMBED_FILES PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/ REGEX "^[^/]")
  set(output ${CMAKE_CURRENT_BINARY_DIR}/${EMBED_OUTPUT})
  add_custom_command(
    OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} "-DOUTPUT=${output}" "-DHEADER=${EMBED_HEADER}" "-DNAMESPACE=${EMBED_NAMESPACE}"
            "-DFUNCTION=${EMBED_FUNCTION}" "-DFILES=${EMBED_FILES}" -P ${CPPOOL_EMBED_SCRIPT}
    DEPENDS ${EMBED_FILES} ${CPPOOL_EMBED_SCRIPT}
    VERBATIM)
endfunction()
