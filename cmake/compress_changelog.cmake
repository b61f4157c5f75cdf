# Run by cpack before it packs: CHANGELOG.md, too, under the name and in the form that Debian's rules want.
set(folder ${CPACK_TEMPORARY_INSTALL_DIRECTORY}/usr/share/doc/cppool)
execute_process(COMMAND gzip -9nc ${folder}/CHANGELOG.md OUTPUT_FILE ${folder}/changelog.gz COMMAND_ERROR_IS_FATAL ANY)
