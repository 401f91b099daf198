# A list of kernels (fwd.def) becomes translation units of a few rows each, and a filtered copy of the list for the launch table.
#
# Parsing the headers takes a unit as long as one to two rows take. The rows of a unit have the same dtype, head_dim_qk and
# scores, so that what is compiled together depends on nothing but the lists and the options that select from them.

# hattn_add_rows(TARGET name ARCH arch LIST file MACRO macro LAUNCH header ROWS file [AROUND header])
#   Reads the rows `MACRO(dtype, mask, head_dim_qk, head_dim_vo, tile_m, tile_n, stages[, scores])` of LIST, one a line, keeps those
#   whose dtype and head_dim_qk are selected (HATTN_DTYPES, HATTN_HEAD_DIMS), and makes
#     - what hattn_write_rows(ROWS) writes: the kept rows, in their order, after those of earlier lists;
#     - the object library TARGET, for ARCH: sources that include LAUNCH and say `MACRO_INSTANCE(...)` once a row;
#     - with AROUND one more source, which includes that and says `MACRO_PREPARE(...)` once a row, and `MACRO_CONVERT(...)` once
#       for all rows that differ by their mask alone;
#     - for the audit rows/TARGET.rows, a line `source: columns` a row, in the order of the rows, and a line `source: around`
#       for the last source; and rows/TARGET.objects, what the sources are compiled to. OBJECT.log is beside each object.
function(hattn_add_rows)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "TARGET;ARCH;LIST;MACRO;LAUNCH;ROWS;AROUND" "")
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/rows")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${arg_LIST}")
  file(STRINGS "${arg_LIST}" lines REGEX "^ *${arg_MACRO}\\(")
  set(kept "")
  set(units "")
  set(unmasked "")
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
    list(JOIN columns ", " row)
    list(POP_FRONT columns dtype mask dqk)
    if(NOT dtype IN_LIST HATTN_DTYPES OR NOT dqk IN_LIST HATTN_HEAD_DIMS)
      continue()
    endif()
    # A list of CMake's cannot hold rows with semicolons; these have commas.
    if(row IN_LIST kept)
      message(FATAL_ERROR "${arg_LIST}: the row (${row}) is there twice")
    endif()
    list(APPEND kept "${row}")
    list(LENGTH columns count)
    set(scores "")
    if(count EQUAL 5)
      list(GET columns 4 scores)
    endif()
    string(TOLOWER "${arg_TARGET}_${dtype}_qk${dqk}_${scores}" unit)
    string(REGEX REPLACE "_$" "" unit "${unit}")
    list(APPEND units "${unit}")
    string(APPEND text_${unit} "${arg_MACRO}_INSTANCE(${row})\n")
    string(APPEND rows_text "${unit}: ${row}\n")
    list(JOIN columns ", " rest)
    list(APPEND unmasked "${dtype}, ${dqk}, ${rest}")
  endforeach()
  if(NOT kept)
    message(FATAL_ERROR "${arg_LIST}: no row has a dtype of '${HATTN_DTYPES}' and a head_dim_qk of '${HATTN_HEAD_DIMS}'")
  endif()
  list(REMOVE_DUPLICATES units)
  foreach(unit IN LISTS units)
    hattn_write_unit(${unit} "${arg_LAUNCH}" "${text_${unit}}")
  endforeach()
  if(arg_AROUND)
    list(REMOVE_DUPLICATES unmasked)
    set(text "")
    foreach(row IN LISTS kept)
      string(APPEND text "${arg_MACRO}_PREPARE(${row})\n")
    endforeach()
    foreach(row IN LISTS unmasked)
      string(APPEND text "${arg_MACRO}_CONVERT(${row})\n")
    endforeach()
    set(unit "${arg_TARGET}_around")
    hattn_write_unit(${unit} "${arg_AROUND}" "${text}")
    list(APPEND units "${unit}")
    string(APPEND rows_text "${unit}: around\n")
  endif()
  list(TRANSFORM units PREPEND "${folder}/")
  list(TRANSFORM units APPEND ".cu")
  list(TRANSFORM kept REPLACE "(.+)" "${arg_MACRO}(\\1)\n")
  list(JOIN kept "" kept)
  set_property(DIRECTORY APPEND_STRING PROPERTY "hattn_${arg_ROWS}" "${kept}")
  add_library(${arg_TARGET} OBJECT ${units})
  hattn_kernel_options(${arg_TARGET} ${arg_ARCH})
  file(CONFIGURE OUTPUT "${folder}/${arg_TARGET}.rows" @ONLY CONTENT "${rows_text}")
  file(GENERATE OUTPUT "${folder}/${arg_TARGET}.objects" CONTENT "$<JOIN:$<TARGET_OBJECTS:${arg_TARGET}>,\n>\n")
endfunction()

# hattn_write_unit(NAME HEADER TEXT): rows/NAME.cu in the build folder, where it would change.
function(hattn_write_unit name header text)
  file(CONFIGURE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/rows/${name}.cu" @ONLY
       CONTENT "// Made by CMake from the list of kernels.\n#include \"${header}\"\n\n${text}")
endfunction()

# hattn_write_rows(ROWS...): rows/ROWS in the build folder, which table.cc includes; empty without a list for it.
function(hattn_write_rows)
  foreach(rows IN LISTS ARGV)
    get_property(kept DIRECTORY PROPERTY "hattn_${rows}")
    file(CONFIGURE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/rows/${rows}" @ONLY
         CONTENT "// Made by CMake: the selected rows of the lists of kernels.\n${kept}")
  endforeach()
endfunction()
