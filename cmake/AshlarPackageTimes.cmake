# SPDX-License-Identifier: Apache-2.0
# Run by cpack on the files of the package: makes their permissions and, with SOURCE_DATE_EPOCH, their times
# independent of who builds it and when. Then the same build makes the same package.
file(GLOB_RECURSE all LIST_DIRECTORIES true ${CPACK_TEMPORARY_DIRECTORY}/*)
execute_process(COMMAND chmod -R u=rwX,go=rX ${CPACK_TEMPORARY_DIRECTORY} COMMAND_ERROR_IS_FATAL ANY)
if(DEFINED ENV{SOURCE_DATE_EPOCH})
  execute_process(COMMAND touch --no-dereference --date=@$ENV{SOURCE_DATE_EPOCH} ${all} COMMAND_ERROR_IS_FATAL ANY)
endif()
