# The Markdown files: length of README.md, links, names of files.
add_test(NAME "docs" COMMAND ${CMAKE_CURRENT_LIST_DIR}/docs_test.py ${PROJECT_SOURCE_DIR})
set_tests_properties("docs" PROPERTIES TIMEOUT 60)
