# A list of kernels (fwd.def) becomes one translation unit a row, and a filtered copy of the list for the launch table.

# hattn_add_rows(TARGET name ARCH arch LIST file MACRO macro LAUNCH header ROWS file)
#   Reads the rows `MACRO(dtype, mask, head_dim_qk, head_dim_vo, tile_m, tile_n, stages[, scores])` of LIST, one a line, keeps those
#   whose dtype and head_dim_qk are selected (HATTN_DTYPES, HATTN_HEAD_DIMS), and makes
#     - what hattn_write_rows(ROWS) writes: the kept rows, in their order, after those of earlier lists;
#     - the object library TARGET, for ARCH: a source a row, which includes LAUNCH and says `MACRO_INSTANCE(...)`;
#     - rows/TARGET.objects: the objects in the order of the rows (the audit reads it, and OBJECT.log beside each).
function(hattn_add_rows)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "TARGET;ARCH;LIST;MACRO;LAUNCH;ROWS" "")
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/rows")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${arg_LIST}")
  file(STRINGS "${arg_LIST}" lines REGEX "^ *${arg_MACRO}\\(")
  set(kept "")
  set(sources "")
  foreach(line IN LISTS lines)
    set(columns "")
    if(line MATCHES "^ *${arg_MACRO}\\(([A-Za-z0-9_, ]+)\\) *(//.*)?$")
      string(REPLACE " " "" columns "${CMAKE_MATCH_1}")
      string(REPLACE "," ";" columns "${columns}")
    endif()
    list(LENGTH columns count)
    if(count LESS 7 OR count GREATER 8 OR "" IN_LIST columns)
      message(FATAL_ERROR "${arg_LIST}: expected ${arg_MACRO}(dtype, mask, head_dim_qk, head_dim_vo, tile_m, tile_n, stages[, scores]) "
                          "on one line, got: ${line}")
    endif()
    list(POP_FRONT columns dtype mask dqk dvo m n stages scores)
    if(NOT dtype IN_LIST HATTN_DTYPES OR NOT dqk IN_LIST HATTN_HEAD_DIMS)
      continue()
    endif()
    set(arguments "${dtype}, ${mask}, ${dqk}, ${dvo}, ${m}, ${n}, ${stages}")
    set(suffix "")
    if(count EQUAL 8)
      string(APPEND arguments ", ${scores}")
      set(suffix "_${scores}")
    endif()
    string(APPEND kept "${arg_MACRO}(${arguments})\n")
    string(TOLOWER "${arg_TARGET}_${dtype}_${mask}_qk${dqk}_vo${dvo}_m${m}_n${n}_s${stages}${suffix}" name)
    set(source "${folder}/${name}.cu")
    if(source IN_LIST sources)
      message(FATAL_ERROR "${arg_LIST}: the row (${arguments}) is there twice")
    endif()
    file(CONFIGURE OUTPUT "${source}" @ONLY CONTENT
         "// Made by CMake from a row of the list of kernels.\n#include \"${arg_LAUNCH}\"\n\n${arg_MACRO}_INSTANCE(${arguments})\n")
    list(APPEND sources "${source}")
  endforeach()
  if(NOT sources)
    message(FATAL_ERROR "${arg_LIST}: no row has a dtype of '${HATTN_DTYPES}' and a head_dim_qk of '${HATTN_HEAD_DIMS}'")
  endif()
  set_property(DIRECTORY APPEND_STRING PROPERTY "hattn_${arg_ROWS}" "${kept}")
  add_library(${arg_TARGET} OBJECT ${sources})
  hattn_kernel_options(${arg_TARGET} ${arg_ARCH})
  file(GENERATE OUTPUT "${folder}/${arg_TARGET}.objects" CONTENT "$<JOIN:$<TARGET_OBJECTS:${arg_TARGET}>,\n>\n")
endfunction()

# hattn_write_rows(ROWS...): rows/ROWS in the build folder, which table.cc includes; empty without a list for it.
function(hattn_write_rows)
  foreach(rows IN LISTS ARGV)
    get_property(kept DIRECTORY PROPERTY "hattn_${rows}")
    file(CONFIGURE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/rows/${rows}" @ONLY
         CONTENT "// Made by CMake: the selected rows of the lists of kernels.\n${kept}")
  endforeach()
endfunction()
