# How device code is compiled. Why each flag is there:
#   compute_90a,sm_90a   WGMMA, TMA and setmaxnreg exist only in the "a" variant, which runs on Hopper and nothing else
#   compute_80,...       the sm80 kernels are translated to PTX once, and from there to each code of HATTN_SM80_CODES
#   --compress-mode=size a fifth of the size; a process unpacks the kernels that it runs, when it first runs them. Other modes leave
#                        sm_90a as it is
#   -O3 --use_fast_math  flush to zero and approximate division; code that needs exact rounding uses PTX instructions by name
#   -DNDEBUG             an assert is a call, and a call serialises the WGMMA pipeline
#   -Xptxas -v           registers, stack and spills of every kernel, kept beside its object for the audit
# No relocatable device code: every consumer would need a device-link step.

# nvcc's messages go to OBJECT.log. If there is ccache, it is used; it keeps the messages too.
if(NOT DEFINED CMAKE_CUDA_COMPILER_LAUNCHER)
  find_program(HATTN_CCACHE ccache)
  mark_as_advanced(HATTN_CCACHE)
  if(HATTN_CCACHE)
    # ccache then ignores the path of the build folder, so that all builds share what they compile.
    set(CMAKE_CUDA_COMPILER_LAUNCHER
        "${CMAKE_COMMAND}" -E env "CCACHE_BASEDIR=${CMAKE_CURRENT_BINARY_DIR}" CCACHE_NOHASHDIR=1 "${HATTN_CCACHE}")
  endif()
endif()
set(hattn_cuda_launcher sh "${CMAKE_CURRENT_LIST_DIR}/keep_log.sh" ${CMAKE_CUDA_COMPILER_LAUNCHER})

# The launch parameters: the header that cxx makes of src/params.rs. Copied below the build folder, so that every Cargo profile
# includes the same file, and only where it has changed.
set(HATTN_PARAMS_HEADER "" CACHE FILEPATH "The header that cxx makes of src/params.rs")
if(NOT EXISTS "${HATTN_PARAMS_HEADER}")
  message(FATAL_ERROR "HATTN_PARAMS_HEADER='${HATTN_PARAMS_HEADER}' is no file: `HATTN_NO_KERNELS=1 cargo check -p "
                      "hopper-attention-sys` makes target/cxxbridge/hopper-attention-sys/src/params.rs.h")
endif()
set(hattn_generated_include "${CMAKE_CURRENT_BINARY_DIR}/include")
configure_file("${HATTN_PARAMS_HEADER}" "${hattn_generated_include}/hopper-attention-sys/src/params.rs.h" COPYONLY)

# hattn_kernel_options(TARGET ARCH...): flags and include roots of the kernels for these architectures.
function(hattn_kernel_options target)
  set(codes "--compress-mode=size")
  if("sm90" IN_LIST ARGN)
    list(APPEND codes "SHELL:-gencode arch=compute_90a,code=sm_90a")
  endif()
  if("sm80" IN_LIST ARGN)
    foreach(code IN LISTS HATTN_SM80_CODES)
      list(APPEND codes "SHELL:-gencode arch=compute_80,code=${code}")
    endforeach()
  endif()
  foreach(code IN LISTS codes)
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${code}>")
  endforeach()
  target_compile_features(${target} PRIVATE cxx_std_17 cuda_std_17)
  set_target_properties(${target} PROPERTIES
    CXX_EXTENSIONS OFF
    CUDA_EXTENSIONS OFF
    CUDA_SEPARABLE_COMPILATION OFF
    CUDA_COMPILER_LAUNCHER "${hattn_cuda_launcher}"
    POSITION_INDEPENDENT_CODE ON)
  target_include_directories(${target} PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}/include" "${CMAKE_CURRENT_SOURCE_DIR}/kernels"
    "${hattn_generated_include}")
  target_include_directories(${target} SYSTEM PRIVATE "${HATTN_CUTLASS_INCLUDE}" ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  separate_arguments(more UNIX_COMMAND "${HATTN_NVCC_FLAGS}")
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:-O3;--use_fast_math;-DNDEBUG;--expt-relaxed-constexpr;--expt-extended-lambda;-Xptxas;-v>"
    "$<$<COMPILE_LANGUAGE:CUDA>:${more}>"
    "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>")
endfunction()
