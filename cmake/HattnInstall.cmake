# The installed files and the packages. Component `runtime`: what programs need. `development`: what compilers need.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(config_dir "${CMAKE_INSTALL_LIBDIR}/cmake/hopper_attention")
set(pc_dir "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
file(RELATIVE_PATH HATTN_PC_PREFIX "/${pc_dir}" "/")
string(REGEX REPLACE "/$" "" HATTN_PC_PREFIX "${HATTN_PC_PREFIX}")
configure_package_config_file(cmake/hopper_attentionConfig.cmake.in "${PROJECT_BINARY_DIR}/hopper_attentionConfig.cmake"
  INSTALL_DESTINATION "${config_dir}" PATH_VARS CMAKE_INSTALL_INCLUDEDIR CMAKE_INSTALL_LIBDIR)
# Before 1.0 a minor version may break sources, so find_package accepts the same minor version only.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/hopper_attentionConfigVersion.cmake" COMPATIBILITY SameMinorVersion)

# hattn_pkg_config(NAME DESCRIPTION LINKED PRIVATE): writes NAME.pc. LINKED: what a program links. PRIVATE: what the shared library
# links itself.
function(hattn_pkg_config HATTN_PC_NAME HATTN_PC_DESCRIPTION HATTN_PC_LINKED HATTN_PC_PRIVATE)
  configure_file(cmake/hopper_attention.pc.in "${PROJECT_BINARY_DIR}/${HATTN_PC_NAME}.pc" @ONLY)
endfunction()
list(TRANSFORM HATTN_SYSTEM_LIBS PREPEND "-l" OUTPUT_VARIABLE system_libs)
list(JOIN system_libs " " system_libs)
hattn_pkg_config(hopper_attention "${PROJECT_DESCRIPTION}" "-L\${libdir} -lhopper_attention" "${system_libs}")
# If both libraries are installed, linkers take the shared one, even with `pkg-config --static`. This file names the archive.
hattn_pkg_config(hopper_attention-static "${PROJECT_DESCRIPTION} (the static library)"
  "\${libdir}/libhopper_attention.a ${system_libs}" "")

install(FILES "${hattn_shared}" "${hattn_lib}/libhopper_attention.so.${HATTN_ABI_VERSION}"
  DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT runtime
  PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
# In the repository, the licence files of the crate are links. Install the files that they point to.
foreach(name LICENSE-MIT LICENSE-APACHE)
  file(REAL_PATH "${PROJECT_SOURCE_DIR}/${name}" licence)
  install(FILES "${licence}" DESTINATION "${CMAKE_INSTALL_DOCDIR}" COMPONENT runtime RENAME "${name}")
endforeach()
install(FILES "${PROJECT_BINARY_DIR}/THIRD-PARTY-LICENSES.txt" DESTINATION "${CMAKE_INSTALL_DOCDIR}" COMPONENT runtime)

install(FILES "${hattn_static}" "${hattn_lib}/libhopper_attention.so" DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT development)
install(DIRECTORY include/ DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT development FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")
if(HATTN_DLPACK_INCLUDE)
  # Its licence is Apache-2.0, whose text is LICENSE-APACHE.
  install(FILES "${HATTN_DLPACK_INCLUDE}/dlpack/dlpack.h" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/dlpack" COMPONENT development)
endif()
install(FILES "${PROJECT_BINARY_DIR}/hopper_attentionConfig.cmake" "${PROJECT_BINARY_DIR}/hopper_attentionConfigVersion.cmake"
  DESTINATION "${config_dir}" COMPONENT development)
install(FILES "${PROJECT_BINARY_DIR}/hopper_attention.pc" "${PROJECT_BINARY_DIR}/hopper_attention-static.pc"
  DESTINATION "${pc_dir}" COMPONENT development)

if(HATTN_IS_TOP_LEVEL)
  # In the build folder, `cpack` makes an archive of both components. `cpack -G DEB` makes a Debian package of each.
  set(hattn_flavour cpu)
  if(HATTN_CUDA)
    set(hattn_flavour cuda)
  endif()
  set(CPACK_GENERATOR TGZ)
  set(CPACK_PACKAGE_NAME hopper-attention)
  set(CPACK_PACKAGE_VENDOR "the hopper-attention developers")
  set(CPACK_PACKAGE_CONTACT "${CPACK_PACKAGE_VENDOR}")
  set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
  set(CPACK_PACKAGE_FILE_NAME "hopper-attention-${PROJECT_VERSION}-linux-${CMAKE_SYSTEM_PROCESSOR}-${hattn_flavour}")
  set(CPACK_RESOURCE_FILE_LICENSE "${PROJECT_SOURCE_DIR}/LICENSE-MIT")
  set(CPACK_STRIP_FILES OFF)
  set(CPACK_DEB_COMPONENT_INSTALL ON)
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
  set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME "libhopper-attention${HATTN_ABI_VERSION}")
  set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME "libhopper-attention-dev")
  set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS "libhopper-attention${HATTN_ABI_VERSION} (= ${PROJECT_VERSION})")
  include(CPack)
endif()
