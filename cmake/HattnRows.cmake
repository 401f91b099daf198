# A list of kernels (fwd.def) becomes translation units of a few rows each, and a filtered copy of the list for the launch table.
#
# Several rows share a unit, because parsing the headers takes as long as compiling one to two rows. The rows of a unit have the same
# head_dim_qk. Those which also have the same dtype and the same column behind `stages` stay together, and of these groups as many
# share a unit as have up to HATTN_ROWS_OF_UNIT rows in all. Few cores parse headers less often with larger units. Many cores would
# wait for the largest unit. So what is compiled together depends on the lists, on the options that select rows, and on the number of
# cores.
cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
set(HATTN_ROWS_OF_UNIT 8)
if(cores LESS 8)
  set(HATTN_ROWS_OF_UNIT 16)
endif()

# hattn_add_rows(ARCH/PASS)
#   Reads kernels/ARCH/PASS/PASS.def. A row is one line:
#   `HATTN_PASS_ARCH(dtype, mask, head_dim_qk, head_dim_vo, tile_m, tile_n, stages[, more]...)`, where `more` is the type of scores
#   (sm90/fp8), or `modified` (sm90/fwd, sm90/bwd, and sm90/fp8 behind the type of scores).
#   Keeps the rows with a selected dtype and head_dim_qk (HATTN_DTYPES, HATTN_HEAD_DIMS). A list without such a row adds nothing:
#   only the lists sm90/fwd and sm80/fwd have head dim 96, only forward lists have head dims above 128, and only sm90/fp8 has E4M3.
#   Of the kept rows it makes
#     - for the launch table bwd_rows.def (of the pass bwd) or fwd_rows.def: the kept rows, in their order, after those of earlier
#       lists;
#     - objects of the library hattn_kernels: sources that include launch.hpp, beside the list, and say
#       `HATTN_PASS_ARCH_INSTANCE(...)` once a row;
#     - if there is an around.hpp beside the list, one more source. It includes that file and says `HATTN_PASS_ARCH_PREPARE(...)`
#       once a row, and `HATTN_PASS_ARCH_CONVERT(...)` once for all rows that differ by their mask alone. Rows with one more
#       column share what is made of the rows without it;
#     - for the audit rows/hattn_PASS_ARCH.rows, a line `source: columns` a row, in the order of the rows, and a line
#       `source: around` for the last source.
function(hattn_add_rows list)
  string(REGEX MATCH "^([^/]+)/([^/]+)$" match "${list}")
  set(arch "${CMAKE_MATCH_1}")
  set(pass "${CMAKE_MATCH_2}")
  set(target hattn_${pass}_${arch})
  set(file "${CMAKE_CURRENT_SOURCE_DIR}/kernels/${list}/${pass}.def")
  string(TOUPPER "hattn_${pass}_${arch}" macro)
  set(table fwd_rows.def)
  if(pass STREQUAL "bwd")
    set(table bwd_rows.def)
  endif()
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/rows")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${file}")
  file(STRINGS "${file}" lines REGEX "^ *${macro}\\(")
  set(kept "")
  set(groups "")
  set(group_of_rows "")
  set(units "")
  set(around "")
  set(unmasked "")
  foreach(line IN LISTS lines)
    set(columns "")
    if(line MATCHES "^ *${macro}\\(([A-Za-z0-9_, ]+)\\) *(//.*)?$")
      string(REPLACE " " "" columns "${CMAKE_MATCH_1}")
      string(REPLACE "," ";" columns "${columns}")
    endif()
    list(LENGTH columns count)
    if(count LESS 7 OR count GREATER 9 OR "" IN_LIST columns)
      message(FATAL_ERROR "${file}: expected ${macro}(dtype, mask, head_dim_qk, head_dim_vo, tile_m, tile_n, stages[, more]...) "
                          "on one line, got: ${line}")
    endif()
    list(JOIN columns ", " row)
    list(POP_FRONT columns dtype mask dqk)
    if(NOT dtype IN_LIST HATTN_DTYPES OR NOT dqk IN_LIST HATTN_HEAD_DIMS)
      continue()
    endif()
    # A list of CMake's cannot hold rows with semicolons; these have commas.
    if(row IN_LIST kept)
      message(FATAL_ERROR "${file}: the row (${row}) is there twice")
    endif()
    list(APPEND kept "${row}")
    list(LENGTH columns count)
    set(more "")
    if(count GREATER 4)
      list(GET columns 4 more)
    endif()
    set(group "${dqk}_${dtype}_${more}")
    list(APPEND groups "${group}")
    list(APPEND group_of_rows "${group}")
    math(EXPR rows_of_${group} "0${rows_of_${group}} + 1")
    if(count EQUAL 4)
      list(JOIN columns ", " rest)
      list(APPEND around "${row}")
      list(APPEND unmasked "${dtype}, ${dqk}, ${rest}")
    endif()
  endforeach()
  if(NOT kept)
    return()
  endif()
  list(REMOVE_DUPLICATES groups)
  foreach(group IN LISTS groups)
    string(REGEX MATCH "^[0-9]+" dqk "${group}")
    math(EXPR rows "0${rows_in_${dqk}} + ${rows_of_${group}}")
    if(NOT units_of_${dqk} OR rows GREATER HATTN_ROWS_OF_UNIT)
      math(EXPR units_of_${dqk} "0${units_of_${dqk}} + 1")
      set(rows ${rows_of_${group}})
      list(APPEND units "${target}_qk${dqk}_${units_of_${dqk}}")
    endif()
    set(rows_in_${dqk} ${rows})
    set(unit_of_${group} "${target}_qk${dqk}_${units_of_${dqk}}")
  endforeach()
  foreach(row group IN ZIP_LISTS kept group_of_rows)
    set(unit "${unit_of_${group}}")
    string(APPEND text_${unit} "${macro}_INSTANCE(${row})\n")
    string(APPEND rows_text "${unit}: ${row}\n")
  endforeach()
  foreach(unit IN LISTS units)
    hattn_write_unit(${unit} ${list}/launch.hpp "${text_${unit}}")
  endforeach()
  if(EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/kernels/${list}/around.hpp")
    list(REMOVE_DUPLICATES unmasked)
    set(text "")
    foreach(row IN LISTS around)
      string(APPEND text "${macro}_PREPARE(${row})\n")
    endforeach()
    foreach(row IN LISTS unmasked)
      string(APPEND text "${macro}_CONVERT(${row})\n")
    endforeach()
    set(unit "${target}_around")
    hattn_write_unit(${unit} ${list}/around.hpp "${text}")
    list(APPEND units "${unit}")
    string(APPEND rows_text "${unit}: around\n")
  endif()
  list(TRANSFORM units PREPEND "${folder}/")
  list(TRANSFORM units APPEND ".cu")
  list(TRANSFORM kept REPLACE "(.+)" "${macro}(\\1)\n")
  list(JOIN kept "" kept)
  set_property(DIRECTORY APPEND_STRING PROPERTY hattn_${table} "${kept}")
  add_library(${target} OBJECT ${units})
  hattn_kernel_options(${target} ${arch})
  hattn_add_objects(${target})
  file(CONFIGURE OUTPUT "${folder}/${target}.rows" @ONLY CONTENT "${rows_text}")
endfunction()

# hattn_add_objects(TARGET): the objects of an object library become part of hattn_kernels, and rows/TARGET.objects lists them for
# the audit, which reads OBJECT.log beside each too.
function(hattn_add_objects target)
  target_sources(hattn_kernels PRIVATE $<TARGET_OBJECTS:${target}>)
  file(GENERATE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/rows/${target}.objects" CONTENT "$<JOIN:$<TARGET_OBJECTS:${target}>,\n>\n")
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
